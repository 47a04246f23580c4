"""The choice of experts: logits of a float32 router on normalized rows, the largest of them, and their weights.

Formula: ``engine/cpu/products/experts.py`` (``route``), ``engine/cpu/products/router.py`` for other laws of the choice,
    ``engine/cpu/rms_norm.py``, ``engine/cpu/products/dense.py``.
Shapes: x float32 [rows, n]; router float32 [n_rows, n]; logits float32 [rows, n_rows], of which the first n_expert are
    experts; ids int32, weights float32 [rows, n_used]; scales, router_bias, selection_bias float32 [n_expert], table int32
    [n_vocab, n_used], tokens int32 [rows], where models have them.
Who owns what: ``rms_norm_router``: blocks of 256 threads; one for each run of 256 positions quantizes it, the others own one
    router row per warp, and each computes the norm again.  ``route``: a warp per row, expert e belongs to lane e % 32.
Reduction order: the norm as in ``engine/cuda/rms_norm.py``; logits: one fma per k in rising k in each of 32 chains, then the
    tree of ``fold32``; exponentials: a lane's experts in rising order, then that tree; p summed from the first to the last.
Bytes moved: the router once per row, from memory for the first row; loaded before the kernel waits for its inputs.
"""

import math

import numpy as np
from numba import cuda, njit

from engine.cpu.rms_norm import NORM_CHAINS, norm_width
from engine.cpu.sample import order_key
from engine.cuda.fold import fold32, fold256
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp,
    finite,
    fma,
    inverse_root,
    lane_from,
    lanes_max,
    let_next_begin,
    pointer,
    sigmoid,
    softplus,
    unless_overflow,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED, RUN, WARPS, make_store
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U16P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.ops.experts import Routing

f32 = np.float32
I = np.int32  # noqa: E741

MOST_COLUMNS = 8192
"""The longest row that a block normalizes in shared memory."""

HELD = 64
"""Weights of a router row that a lane holds when its inputs arrive."""

LOWEST = -(2**31)
"""A key below that of every number."""

USUAL = Routing()
"""The law of most models: a softmax over the chosen experts."""


@njit
def sqrt_softplus(x):
    """sqrt(log(1 + e**x))."""
    return f32(math.sqrt(softplus(x)))


_PROBABILITIES = {"sigmoid": sigmoid, "sqrt_softplus": sqrt_softplus}

EXPENSIVE = ("sqrt_softplus",)
"""Laws of probabilities that take too long for every block of a product to choose its experts itself."""


@kernel(F32P, F32P, F32P, f32_t, F32P, i32, U32P, F32P, U16P, F32P, threads=RUN, blocks=2)
def rms_norm_router(unit: int, n: int) -> KernelCode:
    """Normalized x as int8 with one scale per ``unit`` values, and products of normalized x with the rows of a router.  There
    are two weight vectors, that of the former and that of the router's input, which may be the same.

    n: a multiple of 32, at most :data:`MOST_COLUMNS`.  Grid: (ceil(n / 256) + ceil(n_rows / 8), rows).
    """
    store = make_store(unit)
    width = norm_width.py_func(n)
    n_x, runs = -(-n // width), -(-n // RUN)
    exact = n % width == 0 and width == NORM_CHAINS
    held = min(n // 32, HELD)
    rest = 32 * held

    @cuda.jit
    def rms_norm_router(x, weight, router_weight, eps, router, n_rows, q, d, sums, logits):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        normed = pointer(cuda.shared.array(n, np.float32))
        own = cuda.local.array(n_x, np.float32)
        factor = cuda.local.array(n_x, np.float32)
        weights = cuda.local.array(held, np.float32)
        thread = I(cuda.threadIdx.x)
        lane = I(thread & 31)
        t, part = I(cuda.blockIdx.y), I(cuda.blockIdx.x)
        x = advance(x, t * n)
        quantizes = part < runs
        at = I(part * RUN + thread) if quantizes else thread
        r = I(I(part - runs) * WARPS + (thread >> 5))
        row = advance(router, np.int64(min(r, I(n_rows - 1))) * n + lane) if not quantizes else router
        if quantizes:
            factor[0] = weight[at] if at < n else f32(0.0)
        else:
            for k in range(held):
                weights[k] = row[32 * k]
            for k in range(n_x):
                factor[k] = f32(0.0)
                if exact or (thread < width and thread + k * width < n):
                    factor[k] = router_weight[thread + k * width]
        wait_for_inputs()
        for k in range(n_x):
            own[k] = f32(0.0)
            if exact or (thread < width and thread + k * width < n):
                own[k] = x[thread + k * width]
        value = f32(0.0)
        if quantizes and at < n:
            value = x[at]
        total = f32(0.0)
        for k in range(n_x):
            total = fma(own[k], own[k], total)
        scale = inverse_root(fold256(total, chains), f32(n), eps)
        if quantizes:
            store(value * scale * factor[0], at < n, t, part, n, tops, q, d, sums)
        else:
            for k in range(n_x):
                if exact or (thread < width and thread + k * width < n):
                    normed[thread + k * width] = own[k] * scale * factor[k]
            cuda.syncthreads()
            total = f32(0.0)
            for k in range(held):
                total = fma(weights[k], normed[32 * k + lane], total)
            for k in range(rest, n, 32):
                total = fma(row[k], normed[k + lane], total)
            total = fold32(total)
            if lane == 0 and r < n_rows:
                logits[t * n_rows + r] = total

    return rms_norm_router


@njit
def value_of_order(key):
    """The float32 from which ``order_key`` made a key; +0 for -0."""
    return bits_float(I(key ^ I(I(key >> I(31)) & I(0x7FFFFFFF))))


def make_route(
    n_expert: int, n_used: int, scaled: bool, routing: Routing = USUAL
) -> tuple[DeviceFunction, DeviceFunction]:
    """Two device functions for a warp: choose(logits, biases, n) gives lane s < n the s-th expert and its p; share(p, expert,
    scales) turns the p of all n_used into weights, times the experts' scales if ``scaled``.

    biases: those of the logits and of the selection, the table of experts and the row's token, as pointers.
    """
    n_own = -(-n_expert // 32)
    gating, biased, selected, normalized, least, times, n_group, n_group_used, tabled, group_best = routing
    floor, factor, rescaled = f32(least), f32(times), times != 1.0
    chosen_only, softmax, by_probability = gating == "chosen", gating == "softmax", selected or n_group > 1
    group_size = n_expert // n_group
    probability = _PROBABILITIES.get(gating, sigmoid)

    @device
    def logit(logits, biases, e):
        # NaN is above all numbers: a row with such a logit has it in the sum of its weights.
        return finite(logits[e]) + biases[0][e] if biased else finite(logits[e])

    @device
    def softmax_of(logits, biases):
        """The largest logit, and the sum of the exponentials of all."""
        lane = I(cuda.threadIdx.x & 31)
        best = I(LOWEST)
        for k in range(n_own):
            if n_expert % 32 == 0 or lane + 32 * k < n_expert:
                best = max(best, order_key(logit(logits, biases, lane + 32 * k)))
        most = value_of_order(lanes_max(best))
        chain = f32(0.0)
        for k in range(n_own):
            if n_expert % 32 == 0 or lane + 32 * k < n_expert:
                chain = chain + exp(logit(logits, biases, lane + 32 * k) - most)
        return most, fold32(chain)

    @device
    def probability_of(z, most, total):
        return exp(z - most) / total if softmax else probability(z)

    @device
    def leave_groups(keys):
        """Set the keys of all experts to the lowest but for those of the best groups."""
        lane = I(cuda.threadIdx.x & 31)
        own = I(LOWEST)
        for g in range(n_group):
            best, second, place = I(LOWEST), I(LOWEST), I(0)
            for k in range(n_own):
                if (lane + 32 * k) // group_size == g:
                    if keys[k] > best:
                        second, best, place = best, keys[k], I(lane + 32 * k)
                    elif keys[k] > second:
                        second = keys[k]
            top = lanes_max(best)
            first = I(-lanes_max(I(-place) if best == top else I(LOWEST)))
            value = value_of_order(top)
            if group_size > 1 and group_best > 1:
                value = value + value_of_order(lanes_max(second if place == first and best == top else best))
            if lane == g:
                own = order_key(value)
        left = I(0)
        for _ in range(n_group_used):
            top = lanes_max(own)
            g = I(-lanes_max(I(-lane) if own == top else I(LOWEST)))
            left = I(left | I(I(1) << g))
            if lane == g:
                own = I(LOWEST)
        for k in range(n_own):
            if I(left >> min(I((lane + 32 * k) // group_size), I(31))) & 1 == 0:
                keys[k] = I(LOWEST)

    @device
    def choose(logits, biases, n):
        lane = I(cuda.threadIdx.x & 31)
        keys = cuda.local.array(n_own, np.int32)
        largest, total = f32(0.0), f32(1.0)
        if softmax:
            largest, total = softmax_of(logits, biases)
        mine, own, most = I(0), f32(0.0), f32(0.0)
        if tabled:
            if lane < n_used:
                mine = I(biases[2][biases[3][0] * n_used + lane])
        else:
            for k in range(n_own):
                keys[k] = I(LOWEST)
                if n_expert % 32 == 0 or lane + 32 * k < n_expert:
                    value = logit(logits, biases, lane + 32 * k)
                    if by_probability:
                        value = probability_of(value, largest, total)
                    if selected:
                        value = value + biases[1][lane + 32 * k]
                    keys[k] = order_key(value)
            if n_group > 1:
                leave_groups(keys)
            s = I(0)
            while s < n:
                best, place = I(LOWEST), I(0)
                for k in range(n_own):
                    if keys[k] > best:
                        best, place = keys[k], I(lane + 32 * k)
                top = lanes_max(best)
                # Among equals the lowest: the largest of their numbers counted down.
                chosen = I(-lanes_max(I(-place) if best == top else I(LOWEST)))
                for k in range(n_own):
                    if lane + 32 * k == chosen:
                        keys[k] = I(LOWEST)
                value = value_of_order(top)
                if s == 0:
                    most = value
                if lane == s:
                    mine, own = chosen, value
                s = I(s + 1)
        if chosen_only:
            return mine, exp(own - most)
        p = probability_of(logit(logits, biases, mine), largest, total)
        # A bias may be damaged, too.
        return mine, unless_overflow(own, p) if by_probability and not tabled else p

    @device
    def share(p, expert, scales):
        weight = p
        if normalized:
            total = f32(0.0)
            for s in range(n_used):
                total = total + lane_from(p, I(s))
            if not chosen_only:
                total = total if total > floor else floor
            weight = p / total
        if rescaled:
            weight = weight * factor
        return weight * scales[expert] if scaled else weight

    return choose, share


@kernel(F32P, i32, F32P, F32P, I32P, I32P, F32P, I32P, F32P, threads=32)
def route(n_expert: int, n_used: int, scaled: bool = False, routing: Routing = USUAL) -> KernelCode:
    """The experts of each row of logits, one row every ``stride``, and their weights.  Grid: rows, one warp each."""
    choose, share = make_route(n_expert, n_used, scaled, routing)
    tabled = routing.tabled

    @cuda.jit
    def route(logits, stride, router_bias, selection_bias, table, tokens, scales, ids, weights):
        let_next_begin()
        lane, t = I(cuda.threadIdx.x), I(cuda.blockIdx.x)
        wait_for_inputs()
        if tabled:
            tokens = advance(tokens, t)
        biases = router_bias, selection_bias, table, tokens
        mine, p = choose(advance(logits, t * stride), biases, I(n_used))
        p = share(p, mine, scales)
        if lane < n_used:
            ids[t * n_used + lane] = mine
            weights[t * n_used + lane] = p

    return route
