"""``examples/law.py`` against the engine: every bit of the logits, and against rational arithmetic."""

import importlib.util
import math
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import engine
from engine import numerics
from engine.gguf.file import read_gguf
from engine.synthetic.model import make_model
from engine.synthetic.shape import N_VOCAB_TINY, Shape
from tests.conftest import REPOSITORY
from tests.tiers import examples, few

BUNDLED = REPOSITORY / "engine" / "data" / "pycoder-dense-Q4_K_M.gguf"


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("law_example", REPOSITORY / "examples" / "law.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


law = _load()


def differing(a: np.ndarray, b: np.ndarray) -> int:
    assert a.shape == b.shape and a.dtype == b.dtype == np.float32
    return int((a.view(np.int32) != b.view(np.int32)).sum())


# --- models ----------------------------------------------------------------------------------------------------


def check(path: Path, prompt: list[int], count: int, temperature: float) -> None:
    """The engine's answer and the logits of every step are those of the law."""
    with engine.load(path, n_ctx=512, cache_type="f16") as llm:
        chain: dict[str, Any] = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}
        ids = llm.complete(prompt, max_tokens=count, ignore_eos=True, **chain).ids
        expected = llm.logits(prompt + ids)
    assert len(ids) == count and len({*ids}) > 1 and np.isfinite(expected).all()
    model = law.Model(read_gguf(path))
    for position, token in enumerate(prompt + ids, 1):
        logits = model.step(token)
        assert differing(logits, expected[position - 1]) == 0, f"position {position - 1}"
        if len(prompt) <= position < len(prompt) + count:
            assert law.choose(logits, position, temperature, 7) == ids[position - len(prompt)]


PROMPT = "class Stack:\n    def"


@pytest.mark.first
@pytest.mark.parametrize(("count", "temperature"), few([(12, 0.8), (120, 0.0), (200, 1.0)]))
def test_the_bundled_model(count: int, temperature: float) -> None:
    with engine.load(n_ctx=256) as llm:
        prompt = llm.tokenize(PROMPT)
    check(BUNDLED, prompt, count, temperature)


@pytest.mark.first
@pytest.mark.parametrize(
    ("shape", "quant", "temperature"),
    few([("llama", "Q8_0", 0.0), ("llama", "F32", 0.8), ("qwen3", "Q6_K", 0.8), ("llama", "Q8_0", 0.8)]),
)
def test_a_random_model(shape: str, quant: str, temperature: float, tmp_path: Path) -> None:
    """Rows of nine units, which are five chains; heads of neighbouring pairs with divided frequencies; two chunks."""
    check(make_model(tmp_path / "m.gguf", f"tiny-{shape}", quant), [*range(40, 90)], 24, temperature)


@pytest.mark.first
def test_groups_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one layer, keys and values do not depend on attention, so it is only computed at some positions."""
    shape = Shape("llama", 1, 64, 2, 1, 32, 64, N_VOCAB_TINY, 1088, 1e4, 1e-5)
    path = make_model(tmp_path / "m.gguf", shape, "Q8_0")
    ids = np.random.default_rng(5).integers(0, 256, 1030).tolist()
    with engine.load(path, n_ctx=1088, cache_type="f16") as llm:
        expected = llm.logits(ids)
    model, attention = law.Model(read_gguf(path)), law.attention
    for position, token in enumerate(ids):
        compared = position in (510, 511, 512, 513, 580, 1023, 1024, 1029)
        monkeypatch.setattr(law, "attention", attention if compared else lambda q, keys, values: np.zeros_like(q))
        logits = model.step(token)
        assert not compared or differing(logits, expected[position]) == 0, f"position {position}"


def test_the_program_prints_answers_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    law.main()
    with engine.load(n_ctx=256, cache_type="f16") as llm:
        free: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 12, "ignore_eos": True}
        texts = [llm.complete("def add(a, b):", temperature=t, seed=s, **free).text for t, s in ((0.0, 0), (0.8, 7))]
    assert capsys.readouterr().out.splitlines() == [repr(text) for text in texts]


def test_other_models_are_refused(tmp_path: Path) -> None:
    gemma, coarse, plain = (
        read_gguf(make_model(tmp_path / f"{i}.gguf", f"tiny-{shape}", quant))
        for i, (shape, quant) in enumerate((("gemma3", "Q8_0"), ("llama", "Q4_0"), ("llama", "Q8_0")))
    )
    more = {"blk.0.attn_q.bias": plain.tensors["blk.0.attn_norm.weight"]}
    for file, problem in (
        (gemma, "not of gemma3"),
        (coarse, "is in Q4_0: this law has only"),
        (replace(plain, tensors=dict(plain.tensors) | more), "what blk.0.attn_q.bias would do"),
        (
            replace(plain, metadata=plain.metadata | {"llama.rope.scaling.factor": 2.0}),
            "what llama.rope.scaling.factor",
        ),
        (
            replace(
                plain,
                metadata=plain.metadata | {"llama.expert_count": 8},
                kinds=plain.kinds | {"llama.expert_count": "u32"},
            ),
            "not of mixtures",
        ),
    ):
        with pytest.raises(ValueError, match=problem):
            law.Model(file)


# --- functions -------------------------------------------------------------------------------------------------


def test_functions() -> None:
    rng = np.random.default_rng(3)
    wide = np.concatenate([rng.uniform(-95, 90, 1000), rng.standard_normal(1000) * 1e-3, [0, -0.0, -np.inf]])
    x = wide.astype(np.float32)
    assert differing(law.exp(x), np.array([numerics.exp(v) for v in x], np.float32)) == 0
    x = np.exp(rng.uniform(-60, 60, 1000)).astype(np.float32)
    assert differing(law.log(x), np.array([numerics.log(v) for v in x], np.float32)) == 0
    for seed, position in ((0, 0), (7, 63), (2**32 - 1, 10**6), (2**64 - 1, 5)):
        noise = [numerics.gumbel(np.uint64(seed), position, token) for token in range(300)]
        assert differing(law.gumbel(seed, position, 300), np.array(noise, np.float32)) == 0


# --- one rounding ----------------------------------------------------------------------------------------------

bits = st.integers(0, 2**32 - 1).map(lambda i: float(np.array(i, np.uint32).view(np.float32))).filter(math.isfinite)
short = st.builds(lambda m, e: math.ldexp(m, e), st.integers(-(2**13), 2**13), st.integers(-40, 20))


def nearest(exact: Fraction) -> np.float32:
    """The float32 nearest to a rational number, ties to an even last bit, 0 and subnormal numbers included."""
    guess = np.float32(float(exact))
    around = [guess, np.nextafter(guess, np.float32(np.inf)), np.nextafter(guess, np.float32(-np.inf))]
    return min(around, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1))


@pytest.mark.first
@examples(1000)
@given(st.one_of(bits, short), st.one_of(bits, short), st.one_of(bits, short), st.integers(-60, 60))
@example(1 + 2.0**-12, 1 + 2.0**-12, -(1 + 2.0**-11), 0)
@example(2.0**-12, 2.0**-12, 1.0, 0)  # a tie
@example(1 + 2.0**-23, (1 - 2.0**-23) * 2.0**-24, 1 + 2.0**-23, 0)  # a tie, but for 2**-70, which float64 loses
@example(1 + 2.0**-23, (2.0**-23 - 1) * 2.0**-24, 1 + 2.0**-23, 0)
@example(1 + 2.0**-23, (2.0**-23 - 1) * 2.0**-24, -1 - 2.0**-23, 0)
@example(2.0**-70, 2.0**-79 + 2.0**-100, 0.0, 0)  # subnormal
def test_fma_rounds_once(a: float, b: float, c: float, shift: int) -> None:
    """Also where c is far from the product, and where it is halfway between two numbers but for the product."""
    for other in (c, math.ldexp(a * b, shift) if abs(a * b) < 2.0**60 else c):
        x, y, z = (np.float32(v) for v in (a, b, other))
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if abs(exact) < 2**127:
            got = law.fma(np.array([x]), np.array([y]), np.array([z]))[0]
            assert got == nearest(exact), (x, y, z)
