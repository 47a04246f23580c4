"""Traces: they do not change the logits, the lens ends at the logits, and the weights are those of the kernels."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.contents import stored
from engine.cache.kv import AttentionCacheSpec, KVCache
from engine.cache.sequence import Sequence
from engine.cache.types import CACHE_TYPES, CHUNK, Types
from engine.cpu.backend import Backend
from engine.errors import UsageError
from engine.trace.attention import attention_weights, cached_keys, first_visible, hadamard
from engine.trace.capture import TracedPass, WatchedOperations
from engine.trace.drafts import fates
from engine.trace.states import delta_states
from engine.trace.trace import Trace, top_weights
from tests.oracle.models import CASES, prompts, write_gguf

TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return"


@pytest.fixture(scope="module", params=["pycoder", "pycoder-moe-mtp"])
def llm(request: pytest.FixtureRequest) -> Iterator[engine.LLM]:
    """The bundled model, and one with delta nets, experts and a layer that drafts."""
    with engine.load(request.param, n_ctx=256, device="cpu") as opened:
        yield opened


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.array_equal(one.view(np.uint32), other.view(np.uint32)))


@pytest.mark.first
def test_a_traced_pass_has_the_logits_of_any_other(llm: engine.LLM) -> None:
    ids = llm.tokenize(TEXT)
    rows = llm.logits(ids)
    for at in (0, 1, len(ids) - 1, 15, len(ids) // 2, len(ids) - 1):
        assert same(llm.trace(ids, token=at).logits, rows[at])
    llm.reset()
    assert same(llm.trace(ids).logits, rows[-1])
    # Nor does what follows depend on it.
    assert same(llm.logits(ids), rows)
    assert same(llm.trace(ids, token=-2).logits, rows[-2])
    assert same(llm.prefill(ids)[0], rows[-1])


def test_the_lens_of_the_last_layer_is_what_the_sampler_sees(llm: engine.LLM) -> None:
    answer = llm.complete(TEXT, max_tokens=1, temperature=0, logprobs=7)
    trace = llm.trace(TEXT, top=7)
    assert trace.layers[-1].stream.lens == answer.logprobs[0].top
    assert len(trace.layers) == llm.config.n_layer
    assert all(len(layer.stream.lens) == 7 for layer in trace.layers)


def test_what_a_layer_adds_leads_to_its_norm(llm: engine.LLM) -> None:
    trace = llm.trace(TEXT)
    before = trace.embedding.norm
    for layer in trace.layers:
        assert set(layer.added) == {"mixer", "network"}
        assert abs(layer.stream.norm - before) <= sum(layer.added.values()) * (1 + 1e-6)
        before = layer.stream.norm


def test_weights_add_up_and_experts_are_those_of_the_router(llm: engine.LLM) -> None:
    trace, n = llm.trace(TEXT), len(llm.tokenize(TEXT))
    shown = 0
    for layer, config in zip(trace.layers, llm.config.layers, strict=True):
        mixer: Any = config.mixer
        if layer.mixer == "attention":
            assert layer.attention is not None
            assert layer.attention.weights.shape == (mixer.n_head, n)
            np.testing.assert_allclose(layer.attention.weights.sum(1) + layer.attention.sinks, 1, rtol=1e-12)
            shown += 1
        else:
            assert layer.mixer == "delta net" and layer.attention is None
            assert len(layer.states) == mixer.n_v and min(layer.states) > 0
        network: Any = config.network
        if layer.network == "experts":
            chosen = [expert for expert, _ in layer.experts]
            assert len(set(chosen)) == network.n_used and max(chosen) < network.n_expert
            assert sum(weight for _, weight in layer.experts) == pytest.approx(1, rel=1e-5)
        else:
            assert layer.experts == ()
    assert shown


# --- the weights against the kernels ---------------------------------------------------------------------------

FAMILIES = [
    *("llama", "qwen3", "qwen35", "gemma3", "gemma2", "gpt-oss", "llama4", "phi3-long", "olmo2", "mistral3", "gemma3n"),
    *("gemma4-moe", "gemma4-e", "falcon-h1", "exaone4", "qwen2", "command-r-plus", "apertus", "hunyuan-dense"),
]
"""Norms of heads, of rows, after rotation and centered; gates, sinks, windows, frames, bounded scores, factors by position,
shared keys, two mixers."""


class Attended(WatchedOperations):
    """Also keeps the results of attention."""

    def attention(self, *args: Any) -> Any:
        return self._kept(super().attention(*args))

    def attend_past(self, *args: Any) -> Any:
        return self._kept(super().attend_past(*args))

    def _kept(self, result: Any) -> Any:
        result = self._ops.plain(result)
        self._traced.keep("attended", result)
        return result


def values_of(cache: Any, first: int, end: int) -> np.ndarray:
    """The values of positions in a cache of float32: float64 [end - first, n_head_kv, d_v]."""
    at = np.arange(first, end)
    pages = cache.table[0, at // CHUNK]
    return stored(cache.values, cache.v_type, cache.d_v, True, pages, at % CHUNK).astype(np.float64)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_times_values_are_the_result_of_the_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine.load(write_gguf(CASES[name], tmp_path / "a.gguf"), device="cpu", cache_type="f32")
    model, ids = llm.model, prompts(CASES[name])[-1].tolist()
    monkeypatch.setattr("engine.trace.capture.WatchedOperations", Attended)
    passing = TracedPass(model)
    (row,) = llm.read_by(ids, passing)[1]
    found = {(kept.layer, kept.name): row[kept.begin : kept.end] for kept in passing.kept}
    assert passing.asked
    for il, arguments in passing.asked.items():
        heads, cache = arguments.heads, arguments.cache
        raw = found[il, "query"]
        weights = attention_weights(model.ops, arguments, raw, len(ids) - 1, 0)
        values = values_of(cache, weights.first, len(ids))
        shared = np.repeat(values, heads.n_head // heads.n_head_kv, axis=1)
        expected = np.einsum("hj,jhd->hd", weights.weights, shared)
        if heads.gated:
            gates = raw.reshape(heads.n_head, 2, heads.d_k)[:, 1].astype(np.float64)
            expected /= 1 + np.exp(-gates)
        error = np.abs(found[il, "attended"].reshape(expected.shape) - expected).max()
        assert error <= 1e-5 * max(1.0, np.abs(expected).max()), f"layer {il}"


@pytest.mark.parametrize("kind", CACHE_TYPES.values(), ids=CACHE_TYPES)
def test_keys_are_read_from_every_cache(kind: Any) -> None:
    """To half a step of the integers, in a block that is rotated; and to the last bit of float16 and float32."""
    ops, d, n = Backend(1), 128, 70
    cache = KVCache([AttentionCacheSpec(2, d, d)], 128, 128, Types(kind, kind), ops.zeros, ops.store)
    memory, sequence = cache.layers[0], Sequence(cache)
    sequence.claim(0, n)
    cache.publish()
    k = np.random.default_rng(3).standard_normal((n, 2, d)).astype(np.float32)
    ops.append(memory, k, k, np.arange(n, dtype=np.int32))
    found = cached_keys(ops, memory, 0, 3, n)  # type: ignore[arg-type]
    if not kind.quantized:
        expected = k[3:].astype(np.float16) if kind.bits == 16 else k[3:]
        np.testing.assert_array_equal(found, expected)
        return
    block = kind.block(d)
    turn = hadamard(block) / np.sqrt(block)
    errors = ((found - k[3:]).reshape(-1, block) @ turn).reshape(-1)
    steps = np.abs(k[3:].astype(np.float64).reshape(-1, block) @ turn).max(1) / (8 if kind.bits == 4 else kind.most)
    # The scale is rounded to 11 bits, too, and q4_0 cuts its largest integer.
    bound = (1 if kind.bits == 4 else 0.5) + (kind.most + 1) / 2**11
    assert np.abs(errors.reshape(-1, block) / steps[:, None]).max() <= bound


def test_windows() -> None:
    """Those of ``engine/cache/window.py``: the latest positions, all of them, all but the first one, and a frame."""
    assert [first_visible(p, 3) for p in (0, 2, 5)] == [0, 0, 3]
    assert [first_visible(p, 0) for p in (0, 7)] == [0, 0]
    assert [first_visible(p, -1) for p in (1, 7)] == [1, 1]
    assert [first_visible(p, -8) for p in (7, 8, 20)] == [0, 8, 16]


# --- states and drafts -----------------------------------------------------------------------------------------


def test_states_are_those_that_the_engine_stores() -> None:
    """After 16 tokens the engine stores the state; before, the cache holds the updates of the tokens."""
    with engine.load("pycoder-moe-mtp", n_ctx=256, device="cpu") as llm:
        ids = llm.tokenize(TEXT)[:16]
        trace = llm.trace(ids, drafts=0)
        (tracer,) = [llm._tracer]
        assert tracer is not None and len(ids) == 16
        nets = tracer._pass.nets
        assert sorted(nets) == [layer.index for layer in trace.layers if layer.states]
        for il, (net, memory) in nets.items():
            stored_state = delta_states(llm.model.ops, net, memory, 0, 16)
            keys, deltas, decays = (np.asarray(ring)[0, :16] for ring in (memory.keys, memory.deltas, memory.decays))
            state = np.zeros_like(stored_state)
            for k, u, e in zip(keys.astype(np.float64), deltas, decays, strict=True):
                of_key = [h // (net.n_v // net.n_k) if net.grouped else h % net.n_k for h in range(net.n_v)]
                state = np.stack([e[h] * state[h] + np.outer(u[h], k[of_key[h]]) for h in range(net.n_v)])
            np.testing.assert_allclose(stored_state, state, rtol=0, atol=1e-5 * np.abs(state).max())
            norms = np.sqrt((stored_state**2).sum((1, 2)))
            np.testing.assert_allclose(trace.layers[il].states, norms, rtol=1e-12)


def test_the_fate_of_drafts() -> None:
    assert [(each.fate, each.own) for each in fates([5, 6, 7, 8], [5, 6, 9, 1, 2])] == [
        ("kept", 5),
        ("kept", 6),
        ("refused", 9),
        ("dropped", None),
    ]
    assert [each.fate for each in fates([5, 6], [5, 6, 7])] == ["kept", "kept"]


@pytest.mark.parametrize(
    ("name", "draft", "source"),
    [("pycoder-moe-mtp", None, "mtp"), ("pycoder", "pycoder-draft", "model"), ("pycoder", None, "lookup")],
)
def test_drafts_that_are_kept_are_the_greedy_answer(name: str, draft: str | None, source: str) -> None:
    with engine.load(name, n_ctx=256, device="cpu", draft_model=draft) as llm:
        kept = 0
        for text in (TEXT, "x = 1\n" * 8, "import numpy as np\nimport "):
            trace = llm.trace(text, drafts=3)
            answer = llm.complete(text, temperature=0, max_tokens=4, ignore_eos=True).ids
            if trace.drafts is None:
                assert source == "lookup"
                continue
            assert trace.drafts.source == source
            own = [each.own for each in trace.drafts.drafts if each.own is not None]
            assert [trace.drafts.after, *own] == answer[: 1 + len(own)]
            kept += sum(each.fate == "kept" for each in trace.drafts.drafts)
        assert kept


# --- what is shown, and what is refused ------------------------------------------------------------------------


def test_what_an_architecture_does_not_show_is_said(tmp_path: Path) -> None:
    for name in ("deepseek2", "deepseek4", "granitehybrid", "kimi-linear", "lfm2"):
        llm = engine.load(write_gguf(CASES[name], tmp_path / f"{name}.gguf"), device="cpu")
        ids = prompts(CASES[name])[0].tolist()
        trace = llm.trace(ids, drafts=0)
        assert same(trace.logits, llm.logits(ids)[-1])
        for layer in trace.layers:
            parts = layer.attention is not None, bool(layer.states), bool(layer.missing), layer.mixer
            assert any(parts[:3]) or layer.mixer in ("short convolution", "")
        json.dumps(trace.as_json(3), allow_nan=False)


def test_the_json_has_what_the_book_says(llm: engine.LLM) -> None:
    trace = llm.trace(TEXT, top=2)
    found = json.loads(json.dumps(trace.as_json(2), allow_nan=False))
    assert set(found) == {"object", "version", "position", "tokens", "embedding", "layers", "drafts"}
    assert [each["id"] for each in found["tokens"]] == trace.ids
    assert "".join(each["text"] for each in found["tokens"]).endswith(" return")
    for layer, shown in zip(trace.layers, found["layers"], strict=True):
        assert len(shown["lens"]) == 2 and shown["lens"][0]["logprob"] == layer.stream.lens[0].logprob
        if layer.attention is not None:
            for head, each in enumerate(shown["heads"]):
                expected = top_weights(layer.attention, head, 2)
                assert [(at["position"], at["weight"]) for at in each["top"]] == expected
                assert expected[0][1] == layer.attention.weights[head].max()


def test_bad_arguments_are_one_sentence(llm: engine.LLM) -> None:
    wrong: list[dict[str, Any]] = [
        {"token": 99},
        {"token": -99},
        {"token": "a"},
        {"top": 0},
        {"drafts": 16},
        {"drafts": -1},
    ]
    for options in wrong:
        with pytest.raises(UsageError, match=next(iter(options))):
            llm.trace("a = 1", **options)
    with pytest.raises(UsageError, match="no tokens"):
        llm.trace([])


def test_answers_go_on_beside_a_trace() -> None:
    """A trace takes a slot that no answer has, or one that an answer gives back and gets again."""
    options: dict[str, Any] = {"max_tokens": 24, "seed": 3, "ignore_eos": True}
    with engine.load("pycoder-moe-mtp", n_ctx=128, device="cpu", parallel=2) as llm:
        alone = llm.complete(["import os", TEXT], **options)
        expected = llm.trace(TEXT).as_json(3)
        for n in (1, 2):
            answers = llm.generate(["import os", TEXT][:n], **options)
            for answer in answers:
                next(answer)
            assert llm.trace(TEXT).as_json(3) == expected
            for answer in answers:
                list(answer)
            assert [answer.ids for answer in answers] == [answer.ids for answer in alone[:n]]
        llm.check_pages()


def test_a_model_that_is_divided_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine.load(n_ctx=64, device="cpu") as llm:
        monkeypatch.setattr(llm.model, "stages", [object()])
        with pytest.raises(UsageError, match="divided between devices"):
            llm.trace("a")
        monkeypatch.undo()
    with (
        engine.load(n_ctx=64, device="cpu,cpu", split_mode="tensor") as llm,
        pytest.raises(UsageError, match="divided between devices"),
    ):
        llm.trace("a")


def test_a_closed_model_forgets_its_tracer() -> None:
    llm = engine.load(n_ctx=64, device="cpu")
    assert isinstance(llm.trace("a = 1"), Trace)
    llm.close()
    assert llm._tracer is None
    with pytest.raises(UsageError, match="closed"):
        llm.trace("a = 1")
