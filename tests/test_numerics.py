"""engine/numerics.py against float64, NumPy's float16 and exact rational arithmetic."""

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from engine import numerics
from engine.ops.activation import KINDS

Array = np.ndarray
INF = np.float32(np.inf)
NAN = np.float32(np.nan)


def mapped(f: Callable[..., Any], dtype: type = np.float32) -> Callable[..., Array]:
    """f applied to each element of an array, compiled as the engine's own loops are."""

    @njit(error_model="numpy")
    def loop(x, y):
        for i in range(x.size):
            y[i] = f(x[i])

    def call(x: Array) -> Array:
        y: Array = np.empty(x.size, dtype)
        loop(np.ascontiguousarray(x), y)
        return y

    return call


exp = mapped(numerics.exp)
log = mapped(numerics.log)
log1p = mapped(numerics.log1p)
sigmoid = mapped(numerics.sigmoid)
silu = mapped(numerics.silu)
softplus = mapped(numerics.softplus)
gelu = mapped(numerics.gelu)
normal_gelu = mapped(numerics.normal_gelu)
tanh = mapped(numerics.tanh)
exp2 = mapped(numerics.exp2)
expm1 = mapped(numerics.expm1)
half_to_float = mapped(numerics.half_to_float)
stored_half = mapped(numerics.stored_half, np.uint16)
float_to_half = mapped(numerics.float_to_half, np.uint16)


def floats(low: float, high: float, n: int = 400_000) -> Array:
    """n float32 values from low to high (both positive or both negative), evenly spaced in their bits: every exponent
    in between is represented.  The step is odd, so all residues of the low bits occur."""
    first, last = (int(np.float32(abs(v)).view(np.int32)) for v in (low, high))
    step = max(1, (abs(last - first) // n) | 1)
    bits = np.arange(min(first, last), max(first, last), step, dtype=np.int64)
    bits = np.append(bits, max(first, last))
    x = bits.astype(np.int32).view(np.float32)
    return x if low > 0 else -x


def ulps(y: Array, exact: Array) -> float:
    """The largest error of y in units in the last place of the exact (float64) result, if that is normal."""
    with np.errstate(over="ignore"):
        unit = np.spacing(np.maximum(np.abs(exact).astype(np.float32), np.float32(2**-126))).astype(np.float64)
    return float(np.max(np.abs(y.astype(np.float64) - exact) / unit))


def exact_sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def exact_softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


def exact_gelu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def exact_normal_gelu(x: Array) -> Array:
    return np.array([0.5 * each * math.erfc(-each / math.sqrt(2)) for each in x])


# --- accuracy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "exact", "low", "high", "bound"),
    [
        (exp, np.exp, 1e-30, 88.7228, 1.1),
        (exp, np.exp, -1e-30, -87.0, 1.1),
        (exp2, np.exp2, -1e-30, -125.0, 2.0),
        (expm1, np.expm1, 1e-30, 88.7228, 2.0),
        (expm1, np.expm1, -1e-30, -87.0, 2.0),
        (log, np.log, 1.1754944e-38, 3.4e38, 1.5),
        (log, np.log, 0.5, 2.0, 1.5),
        (log1p, np.log1p, 1e-30, 1e30, 2.5),
        (log1p, np.log1p, -1e-30, -0.99999994, 2.5),
        (sigmoid, exact_sigmoid, 1e-30, 100.0, 2.5),
        (sigmoid, exact_sigmoid, -1e-30, -87.0, 2.5),
        (silu, lambda x: x * exact_sigmoid(x), 1e-30, 1e30, 2.5),
        (silu, lambda x: x * exact_sigmoid(x), -1e-30, -87.0, 2.5),
        (softplus, exact_softplus, 1e-30, 1e30, 3.0),
        (softplus, exact_softplus, 15.0, 25.0, 3.0),
        (softplus, exact_softplus, -1e-30, -87.0, 3.0),
        (gelu, exact_gelu, 1e-30, 1e10, 2.5),
        (gelu, exact_gelu, -1e-30, -0.5, 3.5),
        (normal_gelu, exact_normal_gelu, 1e-30, 1e30, 6.0),
        (normal_gelu, exact_normal_gelu, -1e-30, -13.0, 6.5),
        (tanh, np.tanh, 1e-30, 100.0, 1.5),
        (tanh, np.tanh, -1e-30, -0.625, 1.5),
        (tanh, np.tanh, -0.625, -100.0, 3.5),
    ],
)
def test_error_against_float64(
    function: Callable[[Array], Array], exact: Callable[[Array], Array], low: float, high: float, bound: float
) -> None:
    x = floats(low, high)
    assert ulps(function(x), exact(x.astype(np.float64))) < bound


def test_gelu_absolute_error_of_the_negative_tail() -> None:
    """There the result decreases like exp(-0.8 x**2), so the error of the exponent shows: only the absolute error is
    small."""
    x = floats(-0.5, -30.0)
    error = np.abs(gelu(x).astype(np.float64) - exact_gelu(x.astype(np.float64)))
    assert error.max() < 6e-8


def test_softcap_is_a_scaled_tanh() -> None:
    cap = 30.0
    softcap = mapped(njit(lambda x: numerics.softcap(x, np.float32(30.0))))
    for x in (floats(1e-30, 1e5), floats(-1e-30, -1e5)):
        y = softcap(x)
        assert ulps(y, cap * np.tanh(x.astype(np.float64) / cap)) < 3.5
        assert np.abs(y).max() <= cap


BITS = {
    "exp": "5ba7f164dd8ce3ef",
    "exp2": "eaa87d49bc985f4c",
    "expm1": "d0cf64eb7fd3d528",
    "gelu": "88835196bcf05b68",
    "log": "61a0bd26afcefa14",
    "normal_gelu": "7f6886a343d930d2",
    "log1p": "6fb2d1721a786b0b",
    "sigmoid": "01ec512135118190",
    "silu": "963a907549409f23",
    "softplus": "2c155ac79b3e1ee3",
    "tanh": "c25f2bd136ff6560",
}


@pytest.mark.parametrize("name", BITS)
def test_the_bits_of_a_function_stay_the_same(name: str) -> None:
    """A bound of the error permits others, but then the same seed would give other answers."""
    # So many, because the first steps of a polynomial rarely show in the result.
    ranges = [(1e-30, 3e38), (-1e-30, -3e38), (0.25, 4.0), (-0.25, -4.0)]
    x = np.concatenate([floats(*ends) for ends in ranges])
    y = globals()[name](x)
    assert hashlib.sha256(y[~np.isnan(y)].tobytes()).hexdigest()[:16] == BITS[name]


# --- exact values, ends, order ---------------------------------------------------------------------------------


def test_exact_values() -> None:
    def one(function: Callable[[Array], Array], x: float) -> float:
        return float(function(np.array([x], np.float32))[0])

    assert one(exp, 0.0) == one(exp, -0.0) == one(exp, 1e-45) == one(exp, -1e-45) == 1.0
    assert one(log, 1.0) == one(log1p, 0.0) == one(tanh, 0.0) == one(silu, 0.0) == one(gelu, 0.0) == 0.0
    assert one(sigmoid, 0.0) == 0.5
    assert one(softplus, 0.0) == pytest.approx(math.log(2), rel=2**-23)
    assert one(softplus, 100.0) == 100.0
    assert one(tanh, 100.0) == one(sigmoid, 100.0) == 1.0
    assert one(tanh, -100.0) == -1.0
    assert one(silu, 100.0) == one(gelu, 100.0) == one(normal_gelu, 100.0) == 100.0
    assert one(normal_gelu, 0.0) == one(normal_gelu, -100.0) == 0.0
    assert one(log1p, 1e-40) == pytest.approx(1e-40)


def test_exp_at_its_ends() -> None:
    x = np.array([-INF, -3.4e38, -1000, -87.00001, 88.723, 1000, 3.4e38, INF, NAN], np.float32)
    y = exp(x)
    assert y[:4].tolist() == [0.0] * 4
    assert y[4:8].tolist() == [math.inf] * 4
    assert math.isnan(y[8])
    last, first = np.float32(88.7228), np.float32(-87.0)
    assert exp(np.array([last]))[0] < INF
    assert exp(np.array([first]))[0] > 0
    assert exp(np.array([np.nextafter(first, -INF)]))[0] == 0


def test_exp2_at_its_ends() -> None:
    y = exp2(np.array([-INF, -3.4e38, -1000, np.nextafter(np.float32(-125), -INF), -125, -1, -0.0, 0.0], np.float32))
    assert y.tolist() == [0.0] * 4 + [2.0**-125, 0.5, 1.0, 1.0]


def test_expm1_at_its_ends() -> None:
    x = np.array([-INF, -3.4e38, -25.1, -0.0, 0.0, 88.723, 3.4e38, INF, NAN], np.float32)
    y = expm1(x)
    assert y[:8].tolist() == [-1.0] * 3 + [0.0] * 2 + [math.inf] * 3
    assert math.isnan(y[8])


def test_log_at_its_ends() -> None:
    x = np.array([0.0, -0.0, 1e-45, 1.17549e-38, 3.4028235e38, INF, NAN], np.float32)
    y = log(x)
    assert y[:4].tolist() == [-math.inf] * 4
    assert y[4] == pytest.approx(88.722839)
    assert y[5] == math.inf
    assert math.isnan(y[6])
    assert log1p(np.array([-1.0], np.float32))[0] == -math.inf


@pytest.mark.parametrize("function", [exp, exp2, expm1, log, log1p, sigmoid, silu, softplus, gelu, normal_gelu, tanh])
def test_nan_gives_nan(function: Callable[[Array], Array]) -> None:
    assert np.isnan(function(np.array([NAN, -NAN], np.float32))).all()


@pytest.mark.parametrize("function", [sigmoid, silu, softplus, gelu, normal_gelu, tanh])
def test_infinity_does_not_become_a_number(function: Callable[[Array], Array]) -> None:
    """Their limits are numbers, or may be."""
    assert not np.isfinite(function(np.array([-INF, INF], np.float32))).any()


@pytest.mark.parametrize("name", numerics.ACTIVATIONS)
def test_what_is_not_finite_passes_no_activation(name: str) -> None:
    """With limits below it, as gate or up, whatever the other one is."""
    of, (a, b, c, d) = numerics.ACTIVATIONS[name], np.array([7.0, 1.702, 0.5, 0.25], np.float32)

    @njit(error_model="numpy")
    def one(g, u):
        return of(g, u, a, b, c, d)

    for bad in (INF, -INF, NAN):
        for other in np.array([0.0, -0.0, 1.5, -20.0, 3e38, -3e38], np.float32):
            assert not math.isfinite(one(other, bad)), (bad, other)
            if KINDS[name][0]:
                assert not math.isfinite(one(bad, other)), (bad, other)


def test_a_sum_of_squares_that_overflows_gives_no_factor() -> None:
    factor = njit(lambda total: numerics.inverse_root(total, np.float32(64), np.float32(1e-6)))
    assert factor(np.float32(256.0)) == pytest.approx(0.5, rel=1e-6)
    assert factor(np.float32(3e38)) > 0
    assert np.isnan([factor(INF), factor(NAN)]).all()


def test_a_state_whose_decay_overflows_is_not_cleared() -> None:
    decay = njit(lambda x: numerics.decay_of(np.float32(-4.0), x))
    assert decay(np.float32(1e30)) == 0.0
    assert np.isnan([decay(INF), decay(-INF), decay(NAN)]).all()


@pytest.mark.parametrize(("kept", "least"), [(3, -6), (1, 0)])
@pytest.mark.parametrize("exponent", [100, 127, 255])
def test_rounding_to_few_bits_keeps_what_is_not_finite(kept: int, least: int, exponent: int) -> None:
    """Also a NaN whose bits are all ones, as GPUs make it: to round its mantissa carries into the sign."""
    rounded = njit(lambda x: numerics.round_to_bits(x, np.int32(exponent), np.int32(kept), np.int32(least)))
    bits = np.array([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000], np.int32)
    assert not np.isfinite([rounded(x) for x in bits.view(np.float32)]).any()


@pytest.mark.parametrize(
    ("function", "low", "high", "slack"),
    [
        (exp, 1e-6, 89.0, 1),
        (exp, -87.5, -1e-6, 1),
        (log, 1e-38, 3.4e38, 1),
        (tanh, 1e-6, 20.0, 2),
        (sigmoid, 1e-6, 90, 2),
        (softplus, 1e-6, 90, 3),
        (softplus, -87.0, -1e-6, 3),
    ],
)
def test_no_step_down_larger_than_the_error(
    function: Callable[[Array], Array], low: float, high: float, slack: int
) -> None:
    """Increasing functions: from one sample to the next the result never decreases by more than its rounding."""
    x = np.sort(floats(low, high))
    y = function(x)
    down = np.maximum(y[:-1], y[1:]) != y[1:]
    fall = y[:-1][down].view(np.int32).astype(np.int64) - y[1:][down].view(np.int32)
    assert np.abs(fall).max(initial=0) <= slack


def test_results_stay_in_range() -> None:
    x = np.concatenate([floats(-1e-30, -3e38), floats(1e-30, 3e38)])
    assert 0 <= sigmoid(x).min() <= sigmoid(x).max() <= 1
    assert -1 <= tanh(x).min() <= tanh(x).max() <= 1
    assert exp(x).min() >= 0


def test_tanh_is_odd_where_it_is_a_polynomial() -> None:
    x = floats(1e-30, 0.6249)
    assert np.array_equal(tanh(-x), -tanh(x))


# --- bits ------------------------------------------------------------------------------------------------------


def test_what_is_stored_as_float16_is_finite_or_nan() -> None:
    x = np.concatenate([floats(1e-9, 3e38), floats(-1e-9, -3e38), np.array([0.0, -0.0, INF, -INF, NAN], np.float32)])
    stored, plain = stored_half(x), float_to_half(x)
    fits = (plain & 0x7FFF) < 0x7C00
    assert np.array_equal(stored[fits], plain[fits])
    assert (stored[~fits] == 0x7E00).all() and 0 < fits.sum() < x.size


def test_half_to_float_is_exact_for_every_pattern() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    ours, expected = half_to_float(bits), bits.view(np.float16).astype(np.float32)
    number = ~np.isnan(expected)
    assert np.array_equal(ours[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.isnan(ours[~number]).all()


def test_float_to_half_rounds_like_numpy() -> None:
    """Every half, the midpoints between neighbours and their neighbours, both signs, and a spread of all floats."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = np.append(halves, np.float32(65536.0))  # what would follow 65504: from its midpoint on it is inf
    middle = ((halves[:-1].astype(np.float64) + halves[1:]) / 2).astype(np.float32)
    near = [
        halves,
        middle,
        np.nextafter(middle, INF),
        np.nextafter(middle, -INF),
        floats(1e-45, 3.4e38),
        np.array([INF]),
    ]
    x = np.concatenate(near).astype(np.float32)
    x = np.concatenate([x, -x])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    assert np.array_equal(float_to_half(x), expected)
    assert np.isnan(float_to_half(np.array([NAN])).view(np.float16)).all()


def test_bit_casts() -> None:
    x = np.array([0.0, -0.0, 1.0, -2.5, INF, 1e-45], np.float32)
    assert [int(bits_of(v)) for v in x] == x.view(np.int32).tolist()
    assert [np.float32(float_of(b)) for b in x.view(np.int32)] == x.tolist()


@njit
def bits_of(x):
    return numerics.float_bits(x)


@njit
def float_of(bits):
    return numerics.bits_float(bits)


@njit
def fused(a, b, c):
    return numerics.fma(a, b, c)


finite = st.floats(-(2.0**40), 2.0**40, width=32, allow_subnormal=False)


def round_to_float32(exact: Fraction) -> np.float32:
    """The float32 nearest to a rational number within its normal range, ties to even."""
    if exact == 0:
        return np.float32(0)
    exponent = math.floor(math.log2(abs(exact))) if abs(exact) < 2**900 else 900
    while Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(exact):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    return np.float32(float(round(exact / unit) * unit))


@given(finite, finite, finite)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0 or abs(exact) >= Fraction(2) ** -126:
        assert fused(np.float32(a), np.float32(b), np.float32(c)) == round_to_float32(exact)


def test_fma_is_not_two_roundings() -> None:
    a = np.float32(1 + 2**-12)
    assert fused(a, a, np.float32(-(1 + 2**-11))) == 2.0**-24


small = st.floats(-2047, 2047, width=32)


@given(small, small)
def test_round_product_is_exact(x: float, y: float) -> None:
    """Python rounds a Fraction to the nearest integer, ties to even."""
    assert numerics.round_product(np.float32(x), np.float32(y)) == round(Fraction(x) * Fraction(y))


def test_round_product_at_ties() -> None:
    for k in range(-2000, 2000):
        tie = np.float32(k + 0.5)
        assert numerics.round_product(tie, np.float32(1)) == round(Fraction(2 * k + 1, 2))
        for other in (np.nextafter(tie, INF), np.nextafter(tie, -INF)):
            assert numerics.round_product(other, np.float32(1)) == round(Fraction(float(other)))
    limit = np.float32(2**22 - 1)
    assert numerics.round_product(limit, np.float32(1)) == 2**22 - 1
    assert numerics.round_product(limit, np.float32(-1)) == -(2**22) + 1


# --- noise -----------------------------------------------------------------------------------------------------

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(z: int) -> int:
    """SplitMix64's finalizer in Python's integers, from the paper."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_mix64_gives_the_published_sequence() -> None:
    """The first outputs of SplitMix64 from seed 0: the finalizer of multiples of the golden ratio."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [int(numerics.mix64(np.uint64(i * GOLDEN & MASK))) for i in (1, 2, 3)] == published


@given(st.integers(0, MASK), st.integers(0, 2**62), st.integers(0, 2**31 - 1))
def test_uniform_equals_integer_arithmetic(seed: int, position: int, token: int) -> None:
    key = mix64((seed + (position + 1) * GOLDEN) & MASK)
    bits = (mix64((key + (token + 1) * GOLDEN) & MASK) >> 32) | 1
    expected = min(round_to_float32(Fraction(bits, 2**32)), np.float32(1 - 2**-24))
    assert numerics.uniform(np.uint64(seed), position, token) == expected


@njit
def noise(function, seed, positions, tokens):
    y = np.empty((positions, tokens), np.float32)
    for i in range(positions):
        for j in range(tokens):
            y[i, j] = function(seed, i, j)
    return y


def kolmogorov_smirnov(sample: Array, cdf: Callable[[Array], Array]) -> float:
    """sqrt(n) times the largest distance of the empirical distribution from ``cdf``."""
    p = cdf(np.sort(sample.astype(np.float64)))
    i = np.arange(sample.size)
    return math.sqrt(sample.size) * float(np.maximum(p - i / sample.size, (i + 1) / sample.size - p).max())


# The statistic exceeds this with probability 2 exp(-2 * 2.2**2) = 1.3e-4 (Kolmogorov 1933); the counters are fixed.
KS_BOUND = 2.2


@pytest.mark.parametrize("seed", [0, 1, 2**63 + 5])
def test_noise_is_uniform_and_gumbel(seed: int) -> None:
    """Over tokens at one position, over positions for one token, and over both."""
    u = noise(numerics.uniform, np.uint64(seed), 500, 500)
    g = noise(numerics.gumbel, np.uint64(seed), 500, 500)
    assert u.min() >= 2**-32 and u.max() <= 1 - 2**-24
    for part in (np.s_[:], np.s_[0], np.s_[499], np.s_[:, 0], np.s_[:, 499]):
        assert kolmogorov_smirnov(u[part].ravel(), lambda x: x) < KS_BOUND
        assert kolmogorov_smirnov(g[part].ravel(), lambda x: np.exp(-np.exp(-x))) < KS_BOUND


def test_noise_of_neighbours_is_uncorrelated() -> None:
    """Correlations of n pairs have a standard deviation of 1 / sqrt(n)."""
    u = noise(numerics.uniform, np.uint64(7), 500, 500).astype(np.float64)
    other = noise(numerics.uniform, np.uint64(8), 500, 500).astype(np.float64)
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u, u.T), (u, other), (u[1:, 1:], u[:-1, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4.5 / math.sqrt(a.size)


def test_gumbel_equals_its_formula() -> None:
    u = noise(numerics.uniform, np.uint64(3), 500, 500).astype(np.float64)
    g = noise(numerics.gumbel, np.uint64(3), 500, 500)
    exact = -np.log(-np.log1p(-u))
    # 2.5 ulp of log1p are a relative error of 2.5 * 2**-23 at most, which is an absolute one after the outer logarithm.
    assert np.abs(g - exact).max() < 2.5 * 2**-23 + 1.5 * 2**-23 * np.abs(exact).max()
