"""DRY against its description, followed step by step in float64, and against the example in llama.cpp's sources."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu import dry
from engine.errors import UsageError
from engine.sampling.sampler import Sampler, SamplerParams
from tests.tiers import examples

N_VOCAB = 12
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}


def random_logits(seed: int, n: int = N_VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=n) * 3).astype(np.float32)


def edited(logits: np.ndarray, history: list[int], **options: Any) -> np.ndarray:
    """All logits after the edits."""
    return Sampler(SamplerParams(**OFF | {"dry_multiplier": 0.8} | options), logits.size).candidates(logits, history)[1]


# --- the description, word by word -----------------------------------------------------------------------------


def since_breaker(window: list[int], breakers: list[tuple[int, ...]]) -> int:
    """The tokens after the breaker that begins last, the longest one if several do."""
    for first in reversed(range(len(window))):
        here = [b for b in breakers if tuple(window[first : first + len(b)]) == b]
        if here:
            return len(window) - first - max(map(len, here))
    return len(window)


def repetitions(window: list[int], reach: int) -> dict[int, int]:
    """For each token, the length of the longest end of the window that also stands before an occurrence of the token."""
    found: dict[int, int] = {}
    n = len(window)
    for place in range(1, n):
        fits = [m for m in range(min(place, reach) + 1) if window[place - m : place] == window[n - m :]]
        found[window[place]] = max(found.get(window[place], 0), *fits)
    return found


def reference(logits: np.ndarray, history: list[int], p: SamplerParams) -> np.ndarray:
    x = logits.astype(np.float64)
    if p.dry_multiplier == 0 or p.dry_penalty_last_n == 0:
        return x
    window = history if p.dry_penalty_last_n < 0 else history[-p.dry_penalty_last_n :]
    breakers = [tuple(breaker) for breaker in p.dry_breakers]
    for token, length in repetitions(window, since_breaker(window, breakers)).items():
        reaches = since_breaker(window, breakers) >= p.dry_allowed_length
        if reaches and length >= p.dry_allowed_length and (token,) not in breakers:
            x[token] -= p.dry_multiplier * p.dry_base ** (length - p.dry_allowed_length)
    return x


tokens = st.integers(0, 3)


@given(
    history=st.one_of(
        st.lists(tokens, max_size=60),
        # Repetitions of repetitions, which the Z-algorithm has to get right.
        st.tuples(st.lists(tokens, min_size=1, max_size=5), st.integers(1, 12), st.lists(tokens, max_size=4)).map(
            lambda x: x[0] * x[1] + x[2] + x[0]
        ),
    ),
    allowed=st.integers(0, 5),
    base=st.sampled_from([1.0, 1.25, 1.75, 3.0]),
    multiplier=st.sampled_from([0.1, 0.8, 5.0]),
    last_n=st.sampled_from([-1, 0, 1, 7, 25, 100]),
    breakers=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3),
    seed=st.integers(0, 1000),
)
@examples(1250, 250)
def test_dry_is_its_description(
    history: list[int],
    allowed: int,
    base: float,
    multiplier: float,
    last_n: int,
    breakers: list[tuple[int, ...]],
    seed: int,
) -> None:
    options: dict[str, Any] = {"dry_multiplier": multiplier, "dry_base": base, "dry_allowed_length": allowed}
    params = SamplerParams(**OFF | options, dry_penalty_last_n=last_n, dry_breakers=breakers)
    sampler, logits = Sampler(params, N_VOCAB), random_logits(seed)
    for _ in range(2):  # nothing is carried over from one call to the next
        values = sampler.candidates(logits, history)[1]
        # The penalty is rounded once and the difference once.
        assert np.allclose(values, reference(logits, history, params), rtol=3e-7, atol=1e-6)


def test_the_example_of_llama_cpp() -> None:
    """``a b c c b c y a b c``: c continues a repetition of 3 tokens, b one of 1, and y one of 2."""
    a, b, c, y = range(4)
    history = [a, b, c, c, b, c, y, a, b, c]
    found = -edited(np.zeros(4, np.float32), history, dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1)
    assert found.tolist() == [0, 1, 4, 2]
    longer = -edited(np.zeros(4, np.float32), history, dry_multiplier=1.0, dry_base=2.0)
    assert longer.tolist() == [0, 0, 2, 1]


# --- what follows from it --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, N_VOCAB - 1), max_size=40), st.sampled_from([{}, {"temperature": 0.0}, OFF]))
@examples(100, 20)
def test_switched_off_it_changes_no_bit(history: list[int], options: dict[str, Any]) -> None:
    logits = random_logits(len(history))
    options = {"seed": 1} | options
    plain = Sampler(SamplerParams(**options), N_VOCAB).candidates(logits, history)
    for off in ({"dry_multiplier": 0.0, "dry_base": 3.0}, {"dry_multiplier": 2.0, "dry_penalty_last_n": 0}):
        ids, values = Sampler(SamplerParams(**options | off), N_VOCAB).candidates(logits, history)
        assert np.array_equal(ids, plain[0])
        assert np.array_equal(values.view(np.int32), plain[1].view(np.int32))


def test_a_repetition_is_left_at_once() -> None:
    """Greedily, the token that would go on with a long repetition loses to the next best."""
    logits = np.array([0, 9, 8.5, 0], np.float32)
    history = [0, 1, 0, 1, 0, 1, 0]
    assert Sampler(SamplerParams(temperature=0), 4).sample(logits, 7, history) == 1
    assert Sampler(SamplerParams(temperature=0, dry_multiplier=0.8), 4).sample(logits, 7, history) == 2
    assert Sampler(SamplerParams(temperature=0, dry_multiplier=0.8), 4).sample(logits, 7, [2, *history[3:]]) == 2
    assert Sampler(SamplerParams(temperature=0, dry_multiplier=0.4), 4).sample(logits, 4, [3, 0, 1, 3, 0]) == 1


def test_a_breaker_ends_what_is_compared_and_is_not_penalized() -> None:
    history = [0, 1, 9, 2, 3, 4, 0, 1, 9, 2, 3]
    zeros = np.zeros(N_VOCAB, np.float32)
    options: dict[str, Any] = {"dry_multiplier": 1.0, "dry_base": 2.0}
    assert -edited(zeros, history, **options)[4] == 2**3
    assert -edited(zeros, history, **options, dry_breakers=[(9,)])[4] == 2**0
    assert -edited(zeros, history, **options, dry_breakers=[(9, 2)])[4] == 0
    assert -edited(zeros, history, **options, dry_breakers=[(1, 9)])[4] == 2**0
    assert -edited(zeros, history, **options, dry_breakers=[(9, 3)])[4] == 2**3
    assert -edited(zeros, history, **options, dry_breakers=[(4,)])[4] == 0
    # A token that only begins a breaker is penalized.
    assert -edited(zeros, history, **options, dry_breakers=[(4, 8)])[4] == 2**3


def test_it_comes_after_bias_and_penalties() -> None:
    history = [0, 1, 2, 0, 1]
    found = edited(
        np.full(3, 3, np.float32), history, logit_bias={2: 1.0}, repeat_penalty=2.0, dry_multiplier=1.5, dry_base=1.0
    )
    assert found[2] == (3 + 1) / 2 - 1.5


@pytest.mark.parametrize("base", [1.0, 1.75, 1e10, 3e38])
@pytest.mark.parametrize("multiplier", [1e-30, 1.0, 3e38])
def test_no_penalty_is_infinite(base: float, multiplier: float) -> None:
    logits = random_logits(1)
    values = edited(logits, [1] * 1000, dry_multiplier=multiplier, dry_base=base)
    assert np.isfinite(values).all()
    assert values[1] <= logits[1] and np.array_equal(np.delete(values, 1), np.delete(logits, 1))
    exact = min(math.log(multiplier) + 40 * math.log(base), math.log(3.4e38))
    assert math.log(max(float(dry.penalty(multiplier, base, 40)), 1e-45)) == pytest.approx(exact, abs=0.01)


class Counted:
    """A window that counts how often it is read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.size, self.reads = tokens, len(tokens), 0

    def __getitem__(self, i: int) -> int:
        self.reads += 1
        return self.tokens[i]


@pytest.mark.parametrize("period", [1, 2, 7, 500, 10_000])
@pytest.mark.parametrize("reach", [3, 10_000])
def test_the_search_is_linear(period: int, reach: int) -> None:
    window = Counted(np.random.default_rng(period).integers(0, 3, period).tolist() * (10_000 // period))
    longest = np.zeros(3, np.int32)
    dry.find_repetitions.py_func(window, reach, 2, longest)
    # Each comparison reads two tokens, and either extends the stretch that was found or ends the search at one place.
    assert window.reads <= 5 * window.size
    compiled = np.zeros(3, np.int32)
    dry.find_repetitions(np.array(window.tokens), reach, 2, compiled)
    assert np.array_equal(longest, compiled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dry_multiplier": -0.5}, r"dry_multiplier must be 0 or more \(0 switches it off\), not -0.5"),
        ({"dry_base": 0.9}, r"dry_base must be at least 1 \(dry_multiplier 0 switches DRY off\), not 0.9"),
        ({"dry_allowed_length": -1}, "dry_allowed_length must be 0 or more, not -1"),
        ({"dry_allowed_length": 1.5}, "dry_allowed_length must be a whole number, not 1.5"),
        ({"dry_penalty_last_n": -2}, r"dry_penalty_last_n must be -1 \(all\), 0 \(none\) or more, not -2"),
        ({"dry_breakers": "abc"}, "dry_breakers must be sequences of token ids, not 'abc'"),
        ({"dry_breakers": [()]}, r"a sequence in dry_breakers must have at least one token id, unlike an empty tuple"),
        ({"dry_breakers": [3]}, "a sequence in dry_breakers must have at least one token id, unlike 3"),
        ({"dry_breakers": [(-1,)]}, "a token id in dry_breakers must be 0 or more, not -1"),
        ({"dry_breakers": [(1, "a")]}, "a token id in dry_breakers must be a whole number, not 'a'"),
    ],
)
def test_parameters_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=rf"^{message}\.$"):
        SamplerParams(**options)


def test_tokens_are_checked() -> None:
    with pytest.raises(UsageError, match="dry_breakers names token 12, but the vocabulary ends at 11"):
        edited(random_logits(1), [], dry_breakers=[(3, 12)])
    with pytest.raises(UsageError, match="the history contains token 12, but the vocabulary ends at 11"):
        edited(random_logits(1), [12])
    narrow = Sampler(SamplerParams(dry_multiplier=1, dry_breakers=[(3, 11), (2,), (11,)], seed=1), 12).narrowed(10)
    assert narrow.params.dry_breakers == ((2,),)
