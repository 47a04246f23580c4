"""The contract in code: every scalar function that both backends compute with.

A function here is plain ``@njit`` source that Numba compiles both for the CPU and for the GPU, so there is one source
for one arithmetic.  The rules that make its bits equal everywhere:

* only ``+ - * /``, ``sqrt``, :func:`fma`, integer operations and bit casts: no libm, no libdevice;
* every product that feeds a sum is an explicit :func:`fma`, so no compiler can choose to contract it;
* ``exp``, ``exp2``, ``log`` and ``softcap`` end in a bit cast or an fma, so a caller may add to them; ``log1p`` and
  ``softplus`` end in a product and must not be added to;
* the bits of a NaN are not specified, but what is not finite stays so: a function whose limit at infinity is finite gives
  NaN there (:func:`unless_overflow`), except for ``exp`` and ``exp2`` at -inf, which stands for what is hidden.

All values are float32 unless a docstring says otherwise.  Errors are given in units in the last place (ulp)
against a float64 reference and are checked in ``tests/test_numerics.py``.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

import engine.compile.numba_cache  # noqa: F401  before the first function is declared

f32 = np.float32
i32 = np.int32
u32 = np.uint32
u64 = np.uint64

# --- atoms: operations on which the two compilers would not agree by themselves -------------------------------


@intrinsic
def fma(typingctx, a, b, c):
    """``a * b + c`` with a single rounding (IEEE 754 fusedMultiplyAdd, float32)."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda context, builder, sig, args: builder.fma(*args)


@intrinsic
def float_bits(typingctx, x):
    """The 32 bits of a float32 as int32."""
    return types.int32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def bits_float(typingctx, i):
    """The float32 that has these 32 bits."""
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def half_to_float(typingctx, h):
    """Convert float16, given as its 16 bits (uint16), to float32, exactly."""

    def codegen(context, builder, sig, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_half(typingctx, x):
    """Convert float32 to float16 bits (uint16), rounding to nearest, ties to even."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


# --- what has overflowed ---------------------------------------------------------------------------------------

_NOTHING = f32(0.0)
_LEAST_SQUARE = f32(1e-5)


@njit(cache=True, error_model="numpy")
def unless_overflow(x, y):
    """y, or NaN where x is infinite or NaN.  y keeps its bits, unless it is -0 and x is 0 or positive."""
    return fma(x, _NOTHING, y)


@njit(cache=True, error_model="numpy")
def finite(x):
    """x, or NaN where it is infinite."""
    return fma(x, _NOTHING, x)


@njit(cache=True, error_model="numpy")
def inverse_root(total, n, eps):
    """1 / sqrt(total / n + eps), the factor of a row with this sum of squares; NaN, not 0, where the sum has overflowed."""
    return unless_overflow(total, f32(1.0) / f32(math.sqrt(f32(total / n + eps))))


@njit(cache=True, error_model="numpy")
def magnitude_ratio(wanted, own, n):
    """The factor that gives n numbers with the sum of squares ``own`` the root mean square of numbers with the sum of squares
    ``wanted``; a mean square below 1e-5 counts as 1e-5.  NaN, not 0, where ``own`` has overflowed."""
    mean = own / n
    mean = mean if mean > _LEAST_SQUARE else _LEAST_SQUARE
    return unless_overflow(own, f32(math.sqrt(f32(wanted / n))) / f32(math.sqrt(mean)))


@njit(cache=True, error_model="numpy")
def gaussian_cutoff(mean, squares, n, multiplier):
    """The mean of n numbers plus ``multiplier`` standard deviations; squares: the sum of the squares of their distances from
    the mean."""
    return fma(f32(math.sqrt(f32(squares / n))), multiplier, mean)


HALF_END = f32(65520.0)
"""The magnitude from which on numbers are rounded to an infinite float16: halfway from the largest one, 65504, to 65536."""
_HALF_NAN = np.uint16(0x7E00)


@njit(cache=True, error_model="numpy")
def stored_half(x):
    """The float16 of x as its bits (uint16), to be stored in a cache: NaN where x is NaN or too large.

    A score of an infinite key may be -inf, whose weight is 0: nothing would show that the key has been lost."""
    return float_to_half(x) if abs(x) < HALF_END else _HALF_NAN


# --- rounding --------------------------------------------------------------------------------------------------

# 1.5 * 2**23: adding it to |x| < 2**22 leaves the nearest integer (ties to even) in the low mantissa bits.
_ROUND = f32(12582912.0)
_ROUND_BITS = i32(0x4B400000)


@njit(cache=True, error_model="numpy")
def round_product(x, y):
    """``x * y`` rounded once to the nearest integer, ties to even, as int32; needs ``|x * y| < 2**22``."""
    return i32(float_bits(fma(x, y, _ROUND)) - _ROUND_BITS)


# --- floats of few bits ----------------------------------------------------------------------------------------

_MAGNITUDE = i32(0x7FFFFFFF)
_SIGN = i32(-0x80000000)
_MANTISSA = i32(0x7FFFFF)


@njit(cache=True, error_model="numpy")
def scale_exponent(most, largest):
    """The biased exponent (of float32) of the smallest power of two s for which ``most`` <= s * ``largest``: both positive
    and normal, and the result, too."""
    a, b = float_bits(most), float_bits(largest)
    above = i32(1) if (a & _MANTISSA) > (b & _MANTISSA) else i32(0)
    return i32((a >> i32(23)) - (b >> i32(23)) + above + i32(127))


@njit(cache=True, error_model="numpy")
def round_to_bits(x, exponent, kept, least):
    """x rounded to the nearest s * v, ties to even: v a float with ``kept`` bits of mantissa whose smallest normal magnitude
    is 2**``least``, s the power of two with this biased ``exponent``.

    Numbers of the float's range only, and NaN where x is not finite.  (4 bits: E2M1 with kept 1, least 0; 8 bits: E4M3 with
    kept 3, least -6.)
    """
    u = float_bits(x) & _MAGNITUDE
    if (u >> i32(23)) >= exponent + least:
        drop = i32(23 - kept)
        half = i32((i32(1) << i32(drop - i32(1))) - i32(1))
        u = i32((u + half + ((u >> drop) & i32(1))) & ~i32((i32(1) << drop) - i32(1)))
        return unless_overflow(x, bits_float(i32(u | (float_bits(x) & _SIGN))))
    # Multiples of s 2**(least - kept): those of the spacing of floats near this number.
    spaced = bits_float(i32((exponent + least - kept + i32(23)) << i32(23)))
    y = (bits_float(u) + spaced) - spaced
    return unless_overflow(x, bits_float(i32(float_bits(y) | (float_bits(x) & _SIGN))))


# --- exp, log --------------------------------------------------------------------------------------------------

_LOG2E = f32(1.4426950408889634)
# ln 2 split so that n * LN2_HI is exact for |n| < 2**9 (Cody and Waite, Software Manual, 1980).
_LN2_HI = f32(0.693359375)
_LN2_LO = f32(-2.12194440e-4)
_EXP_MAX = f32(88.72283)
_EXP_MIN = f32(-87.0)
_INF = f32(np.inf)
_ZERO = f32(0.0)
_ONE = f32(1.0)
_HALF = f32(0.5)


@njit(cache=True, error_model="numpy")
def exp(x):
    """e**x, error below 1.1 ulp; 0 for x < -87 (no subnormal results), inf above 88.7228; exp(0) is exactly 1.

    x = n ln 2 + r with |r| <= ln 2 / 2, then a degree-7 Taylor-like polynomial in r (Cephes ``expf``
    coefficients), then n is added to the exponent bits.
    """
    t = fma(x, _LOG2E, _ROUND)
    n = t - _ROUND
    r = fma(n, -_LN2_HI, x)
    r = fma(n, -_LN2_LO, r)
    p = f32(1.9875691500e-4)
    p = fma(p, r, f32(1.3981999507e-3))
    p = fma(p, r, f32(8.3334519073e-3))
    p = fma(p, r, f32(4.1665795894e-2))
    p = fma(p, r, f32(1.6666665459e-1))
    p = fma(p, r, f32(5.0000001201e-1))
    p = fma(p, r * r, r) + _ONE
    y = bits_float(i32(float_bits(p) + ((float_bits(t) - _ROUND_BITS) << i32(23))))
    if x < _EXP_MIN:
        y = _ZERO
    if x > _EXP_MAX:
        y = _INF
    if x != x:
        y = x
    return y


_EXP2_MIN = f32(-125.0)
_ONE_BITS = i32(0x3F800000)
_MINUS_ZERO = f32(-0.0)


@njit(cache=True, error_model="numpy")
def exp2(x):
    """2**x for x <= 0, error below 2 ulp; 0 for x < -125 (no subnormal results); exp2(0) is exactly 1.

    x = n + r with |r| <= 1/2, then a polynomial in r that minimizes the relative error, times 2**n: an exact product which,
    unlike a sum of bits, keeps a NaN.  A third fewer operations than :func:`exp`.
    """
    t = x + _ROUND
    r = x - (t - _ROUND)
    p = f32(1.3269534102e-3)
    p = fma(p, r, f32(9.6712922677e-3))
    p = fma(p, r, f32(5.5507108569e-2))
    p = fma(p, r, f32(2.4022246897e-1))
    p = fma(p, r, f32(6.9314700365e-1))
    p = fma(p, r, _ONE)
    # The low bits of t are n, and what precedes them is shifted out.
    power = bits_float(i32((float_bits(t) << i32(23)) + _ONE_BITS))
    y = fma(p, power, _MINUS_ZERO)
    return _ZERO if x < _EXP2_MIN else y


@njit(cache=True, error_model="numpy")
def log(x):
    """Natural logarithm of a positive, normal x, error below 1.5 ulp; -inf at 0 and below 2**-126; log(1) is 0.

    x = 2**e m with sqrt(1/2) <= m < sqrt(2), then the Cephes ``logf`` polynomial in m - 1.
    """
    bits = float_bits(x)
    e = i32((bits >> i32(23)) - i32(126))
    m = bits_float(i32((bits & i32(0x007FFFFF)) | i32(0x3F000000)))
    if m < f32(0.70710678118654752440):
        e = i32(e - i32(1))
        m = m + m
    s = m - _ONE
    n = f32(e)
    z = s * s
    p = f32(7.0376836292e-2)
    p = fma(p, s, f32(-1.1514610310e-1))
    p = fma(p, s, f32(1.1676998740e-1))
    p = fma(p, s, f32(-1.2420140846e-1))
    p = fma(p, s, f32(1.4249322787e-1))
    p = fma(p, s, f32(-1.6668057665e-1))
    p = fma(p, s, f32(2.0000714765e-1))
    p = fma(p, s, f32(-2.4999993993e-1))
    p = fma(p, s, f32(3.3333331174e-1))
    p = p * s
    p = fma(p, z, n * _LN2_LO)
    p = fma(z, -_HALF, p)
    y = fma(n, _LN2_HI, s + p)
    if x < f32(1.17549435e-38):
        y = -_INF
    if x == _INF:
        y = _INF
    if x != x:
        y = x
    return y


@njit(cache=True, error_model="numpy")
def log1p(x):
    """log(1 + x) for finite x > -1, error below 2.5 ulp, even for small x: log(u) x / (u - 1) with u = 1 + x (Kahan)."""
    u = _ONE + x
    if u == _ONE:
        return x
    return log(u) * (x / (u - _ONE))


# --- activations -----------------------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def sigmoid(x):
    """1 / (1 + e**-x); NaN where x is infinite."""
    return _ONE / (unless_overflow(x, _ONE) + exp(-x))


@njit(cache=True, error_model="numpy")
def silu(x):
    """x sigmoid(x) (Elfwing et al. 2017), error below 2.5 ulp; inf at inf, NaN at -inf."""
    return x / (_ONE + exp(-x))


@njit(cache=True, error_model="numpy")
def softplus(x):
    """log(1 + e**x), x itself above 20, NaN at -inf, error below 3 ulp; like :func:`log1p`, it must not be added to."""
    if x > f32(20.0):
        return x
    return log1p(unless_overflow(x, exp(x)))


@njit(cache=True, error_model="numpy")
def decay_of(a, x):
    """e**(a softplus(x)), the factor by which the state of a gated delta net decays; NaN where the exponent is not finite."""
    z = a * softplus(x)
    return unless_overflow(z, exp(z))


@njit(cache=True, error_model="numpy")
def gelu(x):
    """The tanh form of GELU (Hendrycks and Gimpel 2016): 0.5 x (1 + tanh u) = x sigmoid(2u),
    u = sqrt(2/pi) (x + 0.044715 x**3); inf at inf, NaN at -inf."""
    two_u = f32(1.5957691216057308) * x * fma(f32(0.044715) * x, x, _ONE)
    return x / (_ONE + exp(-two_u))


@njit(cache=True, error_model="numpy")
def normal_gelu(x):
    """GELU itself, x Phi(x) = 0.5 x (1 + erf(x / sqrt(2))), error below 6.5 ulp for x > -13; NaN where x is infinite.

    Phi(-t) = e**(-t**2 / 2) u p(u) with u = 1 / (1 + 0.35 t), p a polynomial of degree 8 that minimizes the relative error,
    below 3.2e-8.  The rounding of t**2, which the exponential would enlarge, is made good.
    """
    t = abs(x)
    if t > f32(16.0):  # Phi(-t) is 0 there
        t = f32(16.0)
    square = t * t
    rest = fma(t, t, -square)
    u = _ONE / fma(f32(0.35), t, _ONE)
    p = f32(-2.9125872012e-02)
    p = fma(p, u, f32(1.4387226740e-01))
    p = fma(p, u, f32(-2.5550462957e-01))
    p = fma(p, u, f32(1.5892936414e-01))
    p = fma(p, u, f32(-2.2937188405e-02))
    p = fma(p, u, f32(1.0543295778e-01))
    p = fma(p, u, f32(1.1985243201e-01))
    p = fma(p, u, f32(1.3985908301e-01))
    p = fma(p, u, f32(1.3962156977e-01))
    tail = exp(-_HALF * square) * (p * u)
    tail = fma(tail, -_HALF * rest, tail)
    return x * tail if x < _ZERO else fma(-x, tail, x)


@njit(cache=True, error_model="numpy")
def tanh(x):
    """Hyperbolic tangent, odd, error below 1.5 ulp: 1 - 2 / (1 + e**2|x|) with the sign of x away from 0, an odd
    polynomial (Cephes ``tanhf``) for |x| < 0.625; NaN where x is infinite."""
    magnitude = abs(x)
    if magnitude < f32(0.625):
        z = x * x
        p = f32(-5.70498872745e-3)
        p = fma(p, z, f32(2.06390887954e-2))
        p = fma(p, z, f32(-5.37397155531e-2))
        p = fma(p, z, f32(1.33314422036e-1))
        p = fma(p, z, f32(-3.33332819422e-1))
        return fma(p * z, x, x)
    y = _ONE - f32(2.0) / (unless_overflow(x, _ONE) + exp(magnitude + magnitude))
    return -y if x < _ZERO else y


@njit(cache=True, error_model="numpy")
def softcap(x, cap):
    """cap tanh(x / cap): Gemma's bound on logits and on scores of attention; NaN where x is infinite; may be added to."""
    return fma(cap, tanh(x / cap), f32(-0.0))


@njit(cache=True, error_model="numpy")
def expm1(x):
    """e**x - 1, error below 2 ulp, even for small x; -1 below -25, inf above 88.7228; may be added to.

    x = n ln 2 + r and the polynomial p = e**r - 1 as in :func:`exp`; then 2**n p + (2**n - 1), computed with half of 2**n,
    which does not overflow.
    """
    t = fma(x, _LOG2E, _ROUND)
    n = t - _ROUND
    r = fma(n, -_LN2_HI, x)
    r = fma(n, -_LN2_LO, r)
    p = f32(1.9875691500e-4)
    p = fma(p, r, f32(1.3981999507e-3))
    p = fma(p, r, f32(8.3334519073e-3))
    p = fma(p, r, f32(4.1665795894e-2))
    p = fma(p, r, f32(1.6666665459e-1))
    p = fma(p, r, f32(5.0000001201e-1))
    p = fma(p, r * r, r)
    half = bits_float(i32((float_bits(t) - _ROUND_BITS + i32(126)) << i32(23)))
    y = fma(half, p, half - _HALF)
    y = y + y
    if x < f32(-25.0):
        y = -_ONE
    if x > _EXP_MAX:
        y = _INF
    if x != x:
        y = x
    return y


# --- activations of feed-forward networks: of gate g and up u, with up to four parameters a, b, c, d -----------


@njit(cache=True, error_model="numpy")
def at_most(x, limit):
    """The smaller one of x and limit > 0; NaN where x is not finite."""
    limit = unless_overflow(x, limit)
    return x if x < limit else limit


@njit(cache=True, error_model="numpy")
def clamp(x, limit):
    """The number of [-limit, limit], limit > 0, nearest to x; NaN where x is not finite."""
    x = at_most(x, limit)
    return -limit if x < -limit else x


@njit(cache=True, error_model="numpy")
def rectified(x):
    """max(x, 0); NaN where x is NaN or -inf."""
    return x if x > _ZERO else unless_overflow(x, _ZERO)


@njit(cache=True, error_model="numpy")
def swiglu(g, u, a, b, c, d):
    """silu(g) u (Shazeer 2020)."""
    return silu(g) * u


@njit(cache=True, error_model="numpy")
def geglu(g, u, a, b, c, d):
    """gelu(g) u, gelu in its tanh form (Shazeer 2020)."""
    return gelu(g) * u


@njit(cache=True, error_model="numpy")
def swiglu_oai(g, u, a, b, c, d):
    """x sigmoid(b x) (1 + clamp(u, a)), x = min(g, a): a limit and a slope (gpt-oss)."""
    x = at_most(g, a)
    return x / (_ONE + exp(-(b * x))) * (clamp(u, a) + _ONE)


@njit(cache=True, error_model="numpy")
def swiglu_clamped(g, u, a, b, c, d):
    """silu(min(g, a)) clamp(u, a): a limit before silu (DeepSeek-V4)."""
    return silu(at_most(g, a)) * clamp(u, a)


@njit(cache=True, error_model="numpy")
def swiglu_limited(g, u, a, b, c, d):
    """min(silu(g), a) clamp(u, a): a limit after silu (Step-3.5)."""
    return at_most(silu(g), a) * clamp(u, a)


@njit(cache=True, error_model="numpy")
def only_gelu(g, u, a, b, c, d):
    """gelu(u) in its tanh form, without a gate (GPT-2)."""
    return gelu(u)


@njit(cache=True, error_model="numpy")
def relu2(g, u, a, b, c, d):
    """max(u, 0)**2, without a gate (So et al. 2021)."""
    x = rectified(u)
    return x * x


@njit(cache=True, error_model="numpy")
def gelu_erf(g, u, a, b, c, d):
    """u Phi(u), GELU without a gate and not in its tanh form (Hendrycks and Gimpel 2016)."""
    return normal_gelu(u)


@njit(cache=True, error_model="numpy")
def xielu(g, u, a, b, c, d):
    """a u**2 + c u where u > 0, else b (expm1(min(u, d)) - u) + c u, without a gate (Huang and Schlag 2024)."""
    linear = c * u
    if u > _ZERO:
        return fma(a * u, u, linear)
    return fma(expm1(u if u < d else d) - u, b, linear)


ACTIVATIONS = {
    "swiglu": swiglu,
    "geglu": geglu,
    "swiglu_oai": swiglu_oai,
    "swiglu_clamped": swiglu_clamped,
    "swiglu_limited": swiglu_limited,
    "gelu": only_gelu,
    "relu2": relu2,
    "gelu_erf": gelu_erf,
    "xielu": xielu,
}
"""The activations by name (``engine/ops/activation.py``)."""


# --- counter-based noise ---------------------------------------------------------------------------------------


@njit(cache=True)
def mix64(z):
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits that diffuses them."""
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return z ^ (z >> u64(31))


@njit(cache=True)
def uniform(seed, position, token):
    """A float32 in [2**-32, 1 - 2**-24] that is a function of (seed uint64, position, token) and nothing else."""
    key = mix64(u64(seed) + (u64(position) + u64(1)) * u64(0x9E3779B97F4A7C15))
    bits = mix64(key + (u64(token) + u64(1)) * u64(0x9E3779B97F4A7C15)) >> u64(32)
    # float32(bits) may round to 2**32; the bound keeps the result below 1.
    v = f32(bits | u64(1)) * f32(2.3283064365386963e-10)
    return min(v, f32(0.99999994))


@njit(cache=True, error_model="numpy")
def gumbel(seed, position, token):
    """Standard Gumbel noise, -log E with E = -log(1 - v) exponential: argmax(logit / T + noise) is a sample of
    softmax(logit / T) (Gumbel 1954; Maddison et al. 2014), the same one on every device and path."""
    return -log(-log1p(-uniform(seed, position, token)))
