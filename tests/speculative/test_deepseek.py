"""Answers of deepseek4, deepseek2 and step35 with the drafts of their own layers, and of llama with those of networks of
EAGLE-3 and DSpark: token for token those without, and as many drafts kept as these get right; conversations that are taken up
again.

Equal texts would hide a layer that drafts from the wrong streams: then fewer drafts are kept.  So proposals are compared with
those of a model that has read the text afresh, and the number of drafts kept with what follows from those proposals.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.types import CHUNK
from engine.sampling.sampler import Sampler
from engine.speculative.mtp import MTPDraft
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from tests import dflash, eagle3
from tests.families import FAMILIES, Tensors, quantized, rewritten, write_quantized
from tests.oracle.families.deepseek4 import DeepSeek4
from tests.oracle.models import write_gguf
from tests.tiers import amount, few

N_CTX = 256
COUNT = 21
MOST = 4
PLAIN = SpeculationParams(enabled=False)
DRAFTED = SpeculationParams(draft_max=MOST, draft_min=MOST)

LENGTHS = [130, 30, 1, 2, 3, 5, 8, 13, 21, 36, 38, 40, 41, 59, 62, 64, 100, 108, 120, 127]
"""Tokens of 20 prompts: answers go over the ends of blocks of 4 and 128, of the window of 40, of a chunk of attention, and of
the 9 rows that the indexer chooses."""


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts from the first step on, and no pauses."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)


LARGE, OWN = 100.0, 0.5


def agreeing(tensors: Tensors, norm: np.ndarray, heads: bool = False) -> Tensors:
    """Random weights changed so that the trunk and its layers often agree: what follows a token depends mostly on the token.

    Embeddings become large beside what layers add; a layer that drafts passes them on, and hears the trunk more softly.
    norm: the weights of the norm before the output, which become those of these layers; heads: so do those of the output.
    """
    changed, own = dict(tensors), np.float32(OWN)
    for name, data in tensors.items():
        enorm = tensors.get(name.replace("eh_proj", "enorm").replace("e_proj", "enorm"), norm)
        straight = np.diag(np.float32(LARGE / norm.size**0.5) / enorm) if enorm.shape == norm.shape else enorm
        if name == "token_embd.weight":
            changed[name] = data * np.float32(LARGE)
        elif name.endswith("nextn.eh_proj.weight"):
            changed[name] = np.concatenate([straight, data[:, enorm.size :] * own], axis=1)
        elif name == "mtp.0.e_proj.weight":
            changed[name] = straight
        elif name == "mtp.0.h_proj.weight":
            changed[name] = data * own
        elif name.endswith(("shared_head_norm.weight", "mtp.0.norm.weight")):
            changed[name] = norm
        elif heads and name.endswith("shared_head_head.weight"):
            changed[name] = tensors["output.weight"]
    return changed


def load(architecture: str, folder: Path) -> engine.LLM:
    """A model that drafts: deepseek4 with its layer in a file of its own, deepseek2, step35 with a chain of layers, or llama
    with a network of EAGLE-3 or of DSpark."""
    if architecture in ("eagle3", "dflash"):
        network = eagle3 if architecture == "eagle3" else dflash
        paths = network.agreeing(make_model(folder / "llama.gguf", "tiny-llama", "F32"), folder)
        return engine.load(paths[0], draft_model=paths[1], n_ctx=N_CTX, device="cpu", n_threads=1)
    case = FAMILIES[{"deepseek2": "deepseek2-glm", "step35": "step35-mtp"}.get(architecture, architecture)]
    norm = case.tensors()["output_norm.weight"]

    def change(tensors: Tensors) -> Tensors:
        return quantized(agreeing(tensors, norm, heads=True), "Q8_0")

    path = rewritten(write_gguf(case, folder / "m.f32"), folder / "m.gguf", change)
    given: dict[str, Any] = {"n_ctx": N_CTX, "device": "cpu", "n_threads": 1}
    if isinstance(case, DeepSeek4):
        plain = case.write_layer(folder / "l.f32", "ds4")
        given["draft_model"] = rewritten(plain, folder / "l.gguf", change)
    return engine.load(path, **given)


@pytest.fixture(scope="module", params=["deepseek4", "deepseek2", "step35", "eagle3", "dflash"])
def pair(request: Any, tmp_path_factory: Any) -> tuple[engine.LLM, engine.LLM]:
    """The same model twice."""
    folder = tmp_path_factory.mktemp("model")
    return load(request.param, folder), load(request.param, folder)


def noted(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], Sampler]]:
    """A list to which every proposal of the layer is added: the tokens before it, its own, and what drew them."""
    draft: Any = llm.draft
    found, propose = [], draft.propose

    def noting(known: list[int], count: int, sampler: Sampler, *rest: Any) -> Any:
        proposal = propose(known, count, sampler, *rest)
        found.append((list(known), list(proposal.tokens), sampler))
        return proposal

    monkeypatch.setattr(draft, "propose", noting)
    return found


def same(one: list[int], other: list[int]) -> int:
    """The number of tokens at the beginning that are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.more
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_do_not_show(
    pair: tuple[engine.LLM, engine.LLM], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, fresh = pair
    draft, other, n_vocab = llm.draft, fresh.draft, llm.config.n_vocab
    assert isinstance(draft, MTPDraft) and isinstance(other, MTPDraft)
    proposals = noted(llm, monkeypatch)
    drafted = accepted = 0
    for seed, length in enumerate(LENGTHS[: amount(len(LENGTHS), 2)]):
        prompt = np.random.default_rng(seed).integers(0, n_vocab, length).tolist()
        given: dict[str, Any] = {"max_tokens": COUNT, "temperature": temperature, "seed": seed, "ignore_eos": True}
        expected = llm.complete(prompt, speculation=PLAIN, **given).ids
        # Right: every pass gives its drafts and the token after them.  Wrong: one token, as long as drafts are made.
        for offset, counts in ((0, (16, 16)), (1, (16 * MOST, 0))):
            draft.script = np.full(N_CTX, -1, np.int32)
            draft.script[length : length + COUNT] = [(token + offset) % n_vocab for token in expected]
            found = llm.complete(prompt, speculation=DRAFTED, **given)
            assert found.ids == expected and found.speculation is not None
            assert (found.speculation.drafted, found.speculation.accepted) == counts
        draft.script = None
        proposals.clear()
        found = llm.complete(prompt, speculation=DRAFTED, **given)
        assert found.ids == expected and found.speculation is not None
        kept = sum(same(tokens, [*prompt, *expected][len(known) :]) for known, tokens, _ in proposals)
        for known, tokens, sampler in proposals[seed % 4 :: 4]:
            fresh.reset()
            fresh.read(known[:-1])
            assert other.propose(known, len(tokens), sampler, 0.0, False, fresh.sequence).tokens == tokens
        assert (found.speculation.drafted, found.speculation.accepted) == (MOST * len(proposals), kept)
        drafted, accepted = drafted + found.speculation.drafted, accepted + kept
    # Drafts that are always rejected, or always kept, would show nothing.
    assert 0.3 < accepted / drafted < 0.95


@pytest.mark.thorough
@pytest.mark.parametrize("accept", ["ratio", "p-min"])
def test_other_ways_to_accept(pair: tuple[engine.LLM, engine.LLM], accept: str) -> None:
    """The same text each time, and at temperature 0 that without drafts; some drafts are kept."""
    prompt = np.random.default_rng(3).integers(0, pair[0].config.n_vocab, 120).tolist()
    params = SpeculationParams(accept=accept, accept_p_min=0.05, draft_max=MOST)
    for temperature in (0.0, 0.8):
        given: dict[str, Any] = {"max_tokens": COUNT, "temperature": temperature, "seed": 1, "ignore_eos": True}
        found = [llm.complete(prompt, speculation=params, **given) for llm in pair]
        assert found[0].ids == found[1].ids
        if not temperature:
            assert found[0].ids == pair[0].complete(prompt, speculation=PLAIN, **given).ids
        assert all(each.speculation is not None and each.speculation.accepted > 0 for each in found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "other"), [("deepseek4", "deepseek4"), ("deepseek2", "deepseek4"), ("deepseek4", "deepseek2")]
)
def test_as_draft_models(name: str, other: str, tmp_path: Path) -> None:
    """A model that drafts for itself is always right; one of the other architecture follows the answer all the same."""
    paths = [write_quantized(FAMILIES[each], tmp_path / f"{i}.gguf") for i, each in enumerate((name, other))]
    llm = engine.load(paths[0], draft_model=paths[1], n_ctx=N_CTX, device="cpu", n_threads=1)
    prompt = np.random.default_rng(1).integers(0, llm.config.n_vocab, 110).tolist()
    for temperature in (0.0, 0.8):
        given: dict[str, Any] = {"max_tokens": COUNT, "temperature": temperature, "seed": 3, "ignore_eos": True}
        expected = llm.complete(prompt, speculation=PLAIN, **given).ids
        found = llm.complete(prompt, speculation=DRAFTED, **given)
        assert found.ids == expected and found.speculation is not None
        counts = found.speculation.drafted, found.speculation.accepted
        assert counts == (16, 16) if name == other else counts[0] > 16 > counts[1]


# --- conversations ---------------------------------------------------------------------------------------------


def answer(llm: engine.LLM, prompt: list[int]) -> tuple[engine.Generation, tuple[int, int]]:
    """The answer to a prompt, and how many drafts were made and kept."""
    given: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": len(prompt), "ignore_eos": True}
    found = llm.complete(prompt, speculation=DRAFTED, **given)
    assert found.speculation is not None
    return found, (found.speculation.drafted, found.speculation.accepted)


@pytest.mark.parametrize("pair", few(["deepseek2", "deepseek4"]), indirect=True)
def test_conversations_are_taken_up_again(pair: tuple[engine.LLM, engine.LLM], tmp_path: Path) -> None:
    """Only what is new is read: the next message, the same prompt again, a message that replaces an earlier one, also further
    back than rings reach.  Answers and drafts are those of a model that reads all of it.  A saved conversation goes on so."""
    llm, fresh = pair
    (end, *_) = llm.tokenizer.eog_ids
    words = np.random.default_rng(4).integers(0, 200, 400).tolist()

    def ask(prompt: list[int], n_read: int) -> list[int]:
        found, drafts = answer(llm, prompt)
        assert found.timings.prompt_n == n_read
        fresh.reset()
        expected, expected_drafts = answer(fresh, prompt)
        assert (found.ids, drafts) == (expected.ids, expected_drafts)
        return found.ids

    llm.reset()
    text: list[int] = []
    prompts = []
    for i, (first, n) in enumerate(((0, 70), (70, 30), (100, 20), (120, 40))):
        # The beginning of an answer follows the end of a message, as templates have it.
        text += [*words[first : first + n], end, words[0]]
        prompts.append(list(text))
        # The last token of an answer was chosen, not read; the token at its end is new.
        text += [*ask(text, n + 2 + 2 * (i > 0)), end]
        if i == 1:
            llm.save_state(tmp_path / "state")
    other = words[300:330]
    whole, (first, second, third, fourth) = text[:-1], (len(prompt) for prompt in prompts)
    ask(prompts[3], 1)
    assert llm.reread is None
    # Another fourth message, then another third one: from the ends of answers, or, beyond rings, from the last whole page.
    far = llm.recurrent_bytes > 0
    ask([*whole[: third + 13], *other], 30 + far * ((third + 13) % CHUNK))
    ask([*whole[: second + 13], *other], 30 + far * ((second + 13) % CHUNK))
    assert llm.reread is None
    # All of it again, and another message after the first one, which is beyond all rings: from the last whole page.
    ask([*prompts[3], *other], fourth + 30 - second - 13 + far * ((second + 13) % CHUNK))
    ask([*prompts[0][:-1], *other], 30 + (first - 1) % CHUNK)
    assert llm.reread is None
    # All of it again, from the last whole page of it, but pages of compressed rows, which hold more than all of the text,
    # were cut; in the middle of an answer, too.
    ask([*prompts[3], *other], 30 + (fourth - (first - 1) // CHUNK * CHUNK if far else fourth % CHUNK))
    ask([*whole[: first + 5], *other], 30 + (first + 5) % CHUNK)
    assert llm.reread is None
    # In the middle of a long message there is no state at a whole page.
    message = words[140:390]
    ask([*message, end, words[0]], 252)
    ask([*message[:70], *other], 100)
    assert llm.reread is not None and llm.reread.startswith("70 tokens are read again")
    # A saved conversation.
    llm.reset()
    saved = llm.load_state(tmp_path / "state")
    assert saved == whole[: second + 11] and llm.n_cached == len(saved)
    ask(prompts[2], third - second - 11)
