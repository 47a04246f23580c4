"""Receipts: that of an answer does not depend on how it was computed, the model that gave it verifies it, and whatever is
changed in it is found."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from engine import Grammar, SpeculationParams
from engine.errors import ContextError, EngineError, UsageError
from engine.receipts.form import chain_of, fingerprint_of, problem_of
from engine.sampling.params import SamplerParams
from tests.tiers import examples

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
LOOKUP = SpeculationParams(lookup=True)


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load(n_ctx=256, device="cpu", parallel=4)


@pytest.fixture(scope="module")
def receipt(llm: engine.LLM) -> dict[str, Any]:
    answer = llm.complete(PROMPT, max_tokens=24, seed=3, repeat_penalty=1.1, ignore_eos=True, receipt=True)
    assert len(answer.ids) == 24
    return answer.receipt()


def sealed(receipt: dict[str, Any]) -> dict[str, Any]:
    """A receipt whose hashes agree with what it says."""
    named = receipt | {"fingerprint": fingerprint_of(receipt["model"])}
    return named | {"chain": chain_of(named)}


def test_a_receipt_is_that_of_the_logits(llm: engine.LLM, receipt: dict[str, Any]) -> None:
    prompt, tokens = receipt["prompt"], receipt["tokens"]
    rows = llm.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    for row, best in zip(rows, receipt["best"], strict=True):
        order = np.argsort(-row, kind="stable")[:2]
        assert best == [[int(i), float(row[i])] for i in order]
    assert problem_of(json.loads(json.dumps(receipt))) == ""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_threads": 1, "batch_size": 16},
        {"cache_type": "i8", "n_ctx": 512},
    ],
    ids=["after other answers", "small passes", "long context"],
)
def test_it_does_not_depend_on_how_it_was_computed(receipt: dict[str, Any], options: dict[str, Any]) -> None:
    with engine.load(device="cpu", **{"n_ctx": 256} | options) as other:
        other.complete(PROMPT[:20], max_tokens=4, seed=1)
        more: Any = {"max_tokens": 24, "seed": 3, "repeat_penalty": 1.1, "ignore_eos": True, "receipt": True}
        assert other.complete(PROMPT, **more).receipt() == receipt
        assert other.complete(PROMPT, speculation=LOOKUP, logprobs=2, **more).receipt() == receipt
        assert other.verify(receipt).same


def test_a_draft_model_does_not_show(receipt: dict[str, Any]) -> None:
    with engine.load(n_ctx=256, device="cpu", draft_model="pycoder-draft") as other:
        answer = other.complete(PROMPT, max_tokens=24, seed=3, repeat_penalty=1.1, ignore_eos=True, receipt=True)
        assert answer.receipt() == receipt
        assert answer.speculation is not None and answer.speculation.drafted > 0


def test_company_does_not_show(llm: engine.LLM, receipt: dict[str, Any]) -> None:
    more: Any = {"max_tokens": 24, "seed": 3, "repeat_penalty": 1.1, "ignore_eos": True, "receipt": True}
    answers = llm.complete(["x = 1\n" * 20, PROMPT, "import ", PROMPT], speculation=LOOKUP, **more)
    assert answers[1].receipt() == answers[3].receipt() == receipt
    assert all(llm.verify(answer.receipt()).same for answer in answers)


def test_a_hybrid_that_drafts_for_itself() -> None:
    """Delta nets, experts and a layer that drafts: states are rolled back in the answer, and read in chunks in the replay."""
    prompts: Any = [PROMPT * 6, PROMPT * 6 + "def mul("]
    more: Any = {"max_tokens": 20, "seed": 3, "ignore_eos": True, "receipt": True}
    with engine.load("pycoder-moe-mtp", n_ctx=256, device="cpu", parallel=2) as drafting:
        answers = drafting.complete(prompts, **more)
        assert all(answer.speculation.accepted for answer in answers if answer.speculation is not None)
        receipts = [answer.receipt() for answer in answers]
        assert all(drafting.verify(receipt).same for receipt in receipts)
    with engine.load("pycoder-moe-mtp", n_ctx=256, device="cpu", mtp=False, batch_size=16) as plain:
        assert plain.complete(prompts[1], **more).receipt() == receipts[1]
        assert plain.verify(receipts[0]).same


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "bias": {"seed": 5, "logit_bias": {20: 3.0, 21: float("-inf")}, "presence_penalty": 0.5},
    "all filters": {"seed": 5, "top_k": 0, "typical_p": 0.9, "top_p": 0.9, "xtc_probability": 0.5},
    "dry": {"seed": 5, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    "stop": {"temperature": 0, "stop": ["\n"]},
    "healed": {"temperature": 0, "heal": True, "logprobs": 1},
    "json": {"seed": 5, "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 3}},
    "regex": {"seed": 5, "grammar": Grammar.regex("[a-z]{2,8} = [0-9]+"), "ignore_eos": True},
    "nothing": {"max_tokens": 0},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("speculation", [None, LOOKUP], ids=["plain", "drafts"])
def test_every_way_to_choose_tokens_can_be_verified(
    llm: engine.LLM, options: dict[str, Any], speculation: SpeculationParams | None
) -> None:
    answer = llm.complete(PROMPT, **{"max_tokens": 16, "receipt": True, "speculation": speculation} | options)
    receipt = json.loads(json.dumps(answer.receipt()))
    found = llm.verify(receipt)
    assert found.problem == ""
    ended = answer.finish_reason == "stop" and "stop" not in options
    assert found.n_tokens == len(receipt["tokens"]) == len(answer.ids) + ended


def test_a_long_prompt_with_a_budget_can_be_verified() -> None:
    with engine.load(n_ctx=512, device="cpu", kv_budget=256) as thin:
        prompt = np.random.default_rng(2).integers(10, 8000, 400).tolist()
        answer = thin.complete(prompt, max_tokens=12, seed=2, ignore_eos=True, receipt=True)
        assert answer.timings.dropped_n > 0
        assert thin.verify(answer.receipt()).problem == ""
        claimed = sealed(answer.receipt() | {"model": {**answer.receipt()["model"], "kv_budget": 320}})
        assert "kv_budget" in thin.verify(claimed).problem


def as_javascript(value: Any) -> Any:
    """A JSON value as JavaScript writes it again: 1.0 becomes 1."""
    if isinstance(value, dict):
        return {key: as_javascript(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_javascript(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def test_a_receipt_may_pass_through_javascript(llm: engine.LLM) -> None:
    answer = llm.complete(PROMPT, max_tokens=8, seed=1, temperature=1.0, top_p=1.0, receipt=True)
    receipt = json.loads(json.dumps(answer.receipt()))
    again = as_javascript(receipt)
    assert json.dumps(again) != json.dumps(receipt)
    assert problem_of(again) == ""
    assert llm.verify(again).same


def test_a_template_does_not_matter_to_a_replay(llm: engine.LLM) -> None:
    messages = [{"role": "user", "content": "def add(a, b):"}]
    answer = llm.chat(messages, chat_template="chatml", max_tokens=8, seed=1, receipt=True)
    receipt = sealed(answer.receipt() | {"model": {**answer.receipt()["model"], "template": "0" * 64}})
    assert llm.verify(receipt).same


# --- what is changed is found ----------------------------------------------------------------------------------------


def changes(receipt: dict[str, Any], data: st.DataObject) -> tuple[str, dict[str, Any]]:
    """What was changed in a receipt, and the result."""
    changed, n = copy.deepcopy(receipt), len(receipt["tokens"])
    i, j = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    what = data.draw(
        st.sampled_from(["token", "prompt", "seed", "parameter", "digest", "best", "order", "cut", "weights"])
    )
    if what in ("token", "prompt"):
        ids = changed["tokens" if what == "token" else "prompt"]
        ids[i % len(ids)] = (ids[i % len(ids)] + data.draw(st.integers(1, 8191))) % 8192
    elif what == "seed":
        changed["parameters"]["seed"] = data.draw(st.integers(0, 2**64 - 1))
    elif what == "parameter":
        name = data.draw(st.sampled_from(["temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty"]))
        changed["parameters"][name] = data.draw(st.floats(0.25, 1))
    elif what == "digest":
        bits = int(receipt["digests"][i], 16) ^ 1 << data.draw(st.integers(0, 127))
        changed["digests"][i] = f"{bits:032x}"
    elif what == "best":
        value = np.float32(changed["best"][i][0][1])
        changed["best"][i][0][1] = float(np.nextafter(value, np.float32(np.inf)))
    elif what == "order":
        for name in ("tokens", "digests", "best"):
            changed[name][i], changed[name][j] = changed[name][j], changed[name][i]
    elif what == "cut":
        for name in ("tokens", "digests", "best"):
            del changed[name][i:]
    else:
        bits = int(receipt["model"]["weights"], 16) ^ 1 << data.draw(st.integers(0, 255))
        changed["model"]["weights"] = f"{bits:064x}"
    return what, changed


@pytest.mark.first
@examples(200)
@given(data=st.data())
def test_every_change_breaks_the_hashes(receipt: dict[str, Any], data: st.DataObject) -> None:
    _, changed = changes(receipt, data)
    same = json.dumps(changed) == json.dumps(receipt)
    assert (problem_of(changed) == "") == same


@pytest.mark.first
@examples(60)
@given(data=st.data())
def test_a_change_with_new_hashes_is_found_by_a_replay(
    llm: engine.LLM, receipt: dict[str, Any], data: st.DataObject
) -> None:
    what, changed = changes(receipt, data)
    changed = sealed(changed)
    assert problem_of(changed) == ""
    if what in ("seed", "parameter"):
        # It is true if the answer is the same with it, and only then.
        names = [
            *SamplerParams.__dataclass_fields__.keys() & changed["parameters"].keys() - {"logit_bias", "dry_breakers"}
        ]
        options = {name: changed["parameters"][name] for name in names}
        again = llm.complete(changed["prompt"], max_tokens=24, ignore_eos=True, receipt=True, **options).receipt()
        assert llm.verify(changed).same == (again["chain"] == changed["chain"])
    else:
        assert llm.verify(changed).same == (json.dumps(changed) == json.dumps(receipt))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@examples(60)
@given(data=st.data())
def test_no_receipt_breaks_a_replay(llm: engine.LLM, receipt: dict[str, Any], data: st.DataObject) -> None:
    """Any JSON in the place of a field, or of a parameter whose chain was computed again."""
    name, value = data.draw(st.sampled_from(sorted(receipt))), data.draw(values)
    assert problem_of(receipt | {name: value}) or name == "engine" or receipt[name] == value
    name, value = data.draw(st.sampled_from(sorted(receipt["parameters"]))), data.draw(values)
    try:
        changed = sealed(receipt | {"parameters": receipt["parameters"] | {name: value}})
    except ValueError:  # a number that is not finite
        return
    try:
        llm.verify(changed)
    except EngineError as error:
        assert "\n" not in str(error)


def test_a_message_says_what_differs_and_by_how_much(llm: engine.LLM, receipt: dict[str, Any]) -> None:
    changed = copy.deepcopy(receipt)
    changed["best"][5][0][1] += 0.5
    found = llm.verify(sealed(changed))
    assert (found.same, found.token, found.difference) == (False, 5, 0.5)
    assert found.problem.startswith("token 5 of 24 differs: its logits differ: the two largest are ")
    changed = copy.deepcopy(receipt)
    changed["digests"][2] = changed["digests"][3]
    found = llm.verify(sealed(changed))
    assert (found.same, found.token, found.difference) == (False, 2, 0)
    changed = copy.deepcopy(receipt)
    changed["tokens"][7] = 11
    found = llm.verify(sealed(changed))
    assert found.token == 7
    assert found.problem.startswith("token 7 of 24 differs: the receipt has 11 (")


def test_one_bit_of_a_weight_is_found(tmp_path: Path, llm: engine.LLM, receipt: dict[str, Any]) -> None:
    path = tmp_path / "model.gguf"
    data = bytearray(llm.path.read_bytes())
    tensor = llm.model.gguf.tensors["blk.0.ffn_down.weight"]
    data[tensor.offset + tensor.nbytes // 2] ^= 1
    path.write_bytes(data)
    with engine.load(path, n_ctx=256, device="cpu") as other:
        found = other.verify(receipt)
        claimed, own = (str(model["weights"])[:12] for model in (receipt["model"], other.identity()))
        said = "it is the receipt of another model, or of another cache"
        assert found.problem == f"{said}: weights {claimed}… instead of {own}…."
        # Whoever claims these weights is found, too: the logits differ.
        renamed = sealed(receipt | {"model": other.identity()})
        assert other.verify(renamed).token is not None
    with engine.load(llm.path, n_ctx=256, device="cpu", cache_type="f16") as other:
        assert other.verify(receipt).problem == f"{said}: cache k=i8 v=i8 instead of k=f16 v=f16."


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_replayed_is_refused(llm: engine.LLM) -> None:
    with pytest.raises(UsageError, match="logits processors"):
        llm.complete(PROMPT, receipt=True, logits_processors=[lambda ids, logits: None])
    for mode in ("ratio", "p-min"):
        drafts = SpeculationParams(lookup=True, accept=mode)
        with pytest.raises(UsageError, match=f"accepted by {mode} depends on the drafts"):
            llm.complete(PROMPT, receipt=True, speculation=drafts)
        answer = llm.complete(PROMPT, receipt=True, speculation=drafts, temperature=0, max_tokens=8)
        assert llm.verify(answer.receipt()).same


def test_who_did_not_ask_has_no_receipt(llm: engine.LLM) -> None:
    answer = llm.complete(PROMPT, max_tokens=2)
    with pytest.raises(UsageError, match="receipt=True"):
        answer.receipt()
    begun = llm.generate(PROMPT, max_tokens=2, receipt=True)
    next(begun)
    with pytest.raises(UsageError, match="wait for its end"):
        begun.receipt()
    begun.close()
    assert llm.verify(begun.receipt()).same
    with pytest.raises(UsageError, match="receipt=True"):
        pickle.loads(pickle.dumps(begun)).receipt()


def test_bad_receipts_are_one_sentence(llm: engine.LLM, receipt: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(receipt))
    assert llm.verify(path).same
    path.write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        llm.verify(path)
    with pytest.raises(UsageError, match="cannot be read"):
        llm.verify(tmp_path / "none.json")
    with pytest.raises(ContextError, match="n_ctx"):
        llm.verify(sealed(receipt | {"prompt": receipt["prompt"] * 20}))
    assert "beyond" in llm.verify(sealed(receipt | {"prompt": [9000]})).problem
    for name, value in {
        "temperature": "hot",
        "seed": -1,
        "logit_bias": 3,
        "grammar": {"kind": "grammar", "source": "x"},
        "stop": "\n",
        "max_tokens": None,
    }.items():
        with pytest.raises(UsageError) as caught:
            llm.verify(sealed(receipt | {"parameters": receipt["parameters"] | {name: value}}))
        assert "\n" not in str(caught.value)
