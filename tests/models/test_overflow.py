"""Whole models whose arithmetic overflows: one sentence says so, and other answers in the same passes do not notice."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import engine
from engine.errors import ModelError
from engine.grammar.grammar import Grammar
from engine.hub.resolve import resolve
from engine.sampling.finite import check_rows
from engine.speculative.params import SpeculationParams
from tests.families import ONE_OF_EACH
from tests.ggufs import damaged
from tests.oracle.models import prompts, write_gguf
from tests.tiers import few

PROMPT = "def fib(n):"
SAID = "the model produced (NaN|infinite) logits; the file is damaged or its arithmetic overflowed: compare .*f32$"
NAMED = "the model produced logits after tokens? .*, counted from 0, that are not finite; the file is damaged or "

HUGE = 1e30
"""A weight of a norm by which whatever is normalized next has a square that float32 does not have."""

IN_RANGE = ("output_norm", "attn_q_norm", "nextn")
"""Norms whose results stay numbers: logits, queries of which one score is by far the largest, drafts."""

BOUNDED = {
    "gpt-oss": ("post_attention_norm",),
    # Its network has a limit, and a prompt of 70 tokens has no row that is made of 128.
    "deepseek4": ("ffn_norm", "blk.3.attn_compressor_norm"),
    # The router of its streams is a tanh.
    "gemma3n": ("altup_router_norm",),
    # Queries, as by attn_q_norm.
    "mistral4": ("attn_q_a_norm",),
    "deepseek32": ("attn_q_a_norm",),
    # The indexer chooses as many positions as the prompt has.
    "glm-dsa": ("attn_q_a_norm", "indexer.k_norm"),
}
"""The same in single architectures."""


def norms_of(path: Path, architecture: str) -> list[str]:
    """The norms of a file after which a model overflows, without those of the layer that drafts, the last one: those of the
    first and of the last layer that has a norm of this name."""
    tensors = gguf.GGUFReader(path).tensors
    drafting = {tensor.name.split(".")[1] for tensor in tensors if "nextn" in tensor.name}
    skipped = *IN_RANGE, *BOUNDED.get(architecture, ()), *(f"blk.{il}." for il in drafting)
    norms = [t.name for t in tensors if len(t.shape) == 1 and "norm" in t.name]
    alike: dict[str, list[str]] = {}
    for name in norms:
        if not any(part in name for part in skipped):
            alike.setdefault(re.sub(r"^blk\.\d+\.", "", name), []).append(name)
    return [name for each in alike.values() for name in dict.fromkeys((each[0], each[-1]))]


@pytest.mark.parametrize("architecture", few(sorted(ONE_OF_EACH, key=lambda name: (name != "phi3", name))))
def test_a_huge_weight_of_any_norm_is_said(architecture: str, tmp_path: Path) -> None:
    case = ONE_OF_EACH[architecture]
    path, ids = write_gguf(case, tmp_path / "m.gguf"), prompts(case)[1].tolist()
    names = norms_of(path, architecture)
    assert len(names) >= 3
    for name in names:
        bad = damaged(path, tmp_path / "bad.gguf", name, 7, HUGE)
        with engine.load(bad, device="cpu", n_ctx=128, n_threads=1) as llm:
            with pytest.raises(ModelError, match=NAMED):
                llm.logits(ids)
            with pytest.raises(ModelError, match=SAID):
                llm.complete(ids, max_tokens=2, temperature=0)


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> engine.LLM:
    """The bundled model with a norm by which the row of every token would become 0."""
    path = tmp_path_factory.mktemp("models") / "bad.gguf"
    return engine.load(damaged(resolve(None), path, "blk.1.attn_norm.weight", 3, 1e20), device="cpu", n_ctx=256)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0, "speculation": SpeculationParams(lookup=True)},
        {"temperature": 0, "grammar": Grammar.regex("[a-z ]+")},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "logit_bias": {5: -np.inf}},
        {"temperature": 0, "logits_processors": [lambda ids, logits: None]},
    ],
    ids=lambda options: next(
        (name for name in options if name not in ("temperature", "seed")), str(options["temperature"])
    ),
)
def test_no_answer_is_empty_without_a_word(overflowing: engine.LLM, options: dict[str, Any]) -> None:
    answer = overflowing.generate(PROMPT, max_tokens=4, **options)
    with pytest.raises(ModelError, match=SAID):
        list(answer)
    assert answer.text == "" and answer.finish_reason is None


@pytest.mark.parametrize("cache_type", ["i8", "q8_0"])
def test_keys_that_a_cache_cannot_represent_are_said(cache_type: str, tmp_path: Path) -> None:
    bad = damaged(resolve(None), tmp_path / "bad.gguf", "blk.1.attn_norm.weight", 3, 1e20)
    with engine.load(bad, device="cpu", n_ctx=64, cache_type=cache_type) as llm, pytest.raises(ModelError, match=NAMED):
        llm.logits(llm.tokenize(PROMPT))


@pytest.mark.parametrize(
    "use",
    [
        lambda llm, ids: llm.logits(ids),
        lambda llm, ids: llm.prefill(ids),
        lambda llm, ids: [llm.read(ids), llm.step(5)],
    ],
    ids=["logits", "prefill", "step"],
)
def test_logits_are_numbers_or_an_error(overflowing: engine.LLM, use: Callable[[engine.LLM, list[int]], Any]) -> None:
    overflowing.reset()
    with pytest.raises(ModelError, match=NAMED):
        use(overflowing, overflowing.tokenize(PROMPT))


def test_the_message_names_tokens() -> None:
    rows = np.zeros((9, 4), np.float32)
    check_rows(rows, 0)
    rows[2, 1] = -np.inf
    with pytest.raises(
        ModelError, match=r"produced logits after token 12, counted from 0, that are not finite; the file"
    ):
        check_rows(rows, 10)
    rows[4:, 0] = np.nan
    with pytest.raises(
        ModelError, match=r"produced logits after tokens 2, 4, 5 and 3 more, counted from 0, that are not"
    ):
        check_rows(rows, 0)


def test_it_ends_only_the_answer_that_overflows(tmp_path: Path) -> None:
    """A token in a pass of two answers, whose logits are not finite; its answer has all tokens before it."""
    token, n_embd = 9, 72
    path = write_gguf(ONE_OF_EACH["ernie4_5"], tmp_path / "m.gguf")
    bad = damaged(path, tmp_path / "bad.gguf", "token_embd.weight", token * n_embd + 1, 1e30)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logit_bias": {token: -np.inf}}
    with engine.load(bad, device="cpu", n_ctx=64, parallel=2, n_threads=1) as llm:
        assert llm.config.n_embd == n_embd
        alone = llm.complete([3, 4, 5], **options).ids
        one = llm.generate([3, 4, 5], **options)
        other = llm.generate([6, 7], **options | {"logit_bias": {token: 1e4}})
        both = zip(one, other, strict=False)
        next(both)
        with pytest.raises(ModelError, match=SAID):
            next(both)
        list(one)
        assert one.ids == alone and other.ids == [token]


def test_a_draft_model_that_overflows_drafts_nothing(tmp_path: Path) -> None:
    bad = damaged(resolve("pycoder-draft"), tmp_path / "draft.gguf", "blk.0.ffn_norm.weight", 3, 1e30)
    with engine.load(device="cpu", n_ctx=128, draft_model=bad) as llm:
        for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
            plain = llm.complete(PROMPT, max_tokens=12, speculation=SpeculationParams(enabled=False), **options)
            for accept in ("exact", "ratio", "p-min"):
                params = SpeculationParams(draft_max=4, accept=accept)
                drafted = llm.complete(PROMPT, max_tokens=12, speculation=params, **options)
                assert drafted.ids == plain.ids
