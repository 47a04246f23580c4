"""The choice of experts by other laws than a softmax over the chosen (``route`` of ``engine/cpu/products/experts.py``).

Formula: z_e = l_e + b_e, l the logits, NaN where infinite, b the router's bias if it has one.  Probabilities, by gating:
    softmax: p_e = exp(z_e - m) / S, m the largest z, S = sum_e exp(z_e - m);  sigmoid: p_e = 1 / (1 + exp(-z_e));
    sqrt_softplus: p_e = sqrt(log(1 + exp(z_e)));  chosen: as softmax, with the chosen experts only.
    Scores: z_e if there are neither a bias c of the selection nor groups, else p_e (+ c_e).  Of n_group groups of consecutive
    experts the n_group_used with the largest sums of their two best scores (of the best one if group_best is 1) stay.  The
    n_used largest scores are chosen, the lower group and the lower expert first where they are equal; or the experts are
    those that a table has for the token, in its order.
    v_s = p of the s-th chosen; w_s = v_s / max(v_0 + ... + v_(n_used - 1), floor) if normalized, else v_s; "chosen":
    w_s = exp(z_s - z_0) / (exp(z_0 - z_0) + ...), without a floor; then w_s * weight_scale unless that is 1.
Shapes: logits float32 [rows, n_expert or more]; router_bias, selection_bias float32 [n_expert] or [0]; table int32 [n_vocab,
    n_used] or [0, 0], tokens int32 [rows]; ids int32, weights float32 [rows, n_used].
Who owns what: an item is a row.
Reduction order: S: chain c adds the experts c, c + 32, c + 64, ..., then the tree of ``engine/cpu/fold.py`` over 32 chains;
    v summed from the first to the last.
Bytes moved: 4 n_expert.
"""

import math

import numpy as np
from numba import njit

from engine.cpu.fold import fold
from engine.cpu.sample import order_key, pack, place_of
from engine.numerics import exp, finite, sigmoid, softplus, unless_overflow

f32 = np.float32
u64 = np.uint64

CHOSEN, SOFTMAX, SIGMOID = 0, 1, 2
"""Places in ``engine.ops.experts.GATINGS``."""


@njit(cache=True, error_model="numpy")
def probabilities(z, gating):
    """p float32 [n_expert] of the logits z."""
    p = np.empty_like(z)
    if gating == SOFTMAX:
        most = z[0]
        for e in range(z.size):
            if order_key(z[e]) > order_key(most):
                most = z[e]
        chains = np.zeros(32, np.float32)
        for e in range(z.size):
            p[e] = exp(z[e] - most)
            chains[e % 32] = chains[e % 32] + p[e]
        total = fold(chains, 32)
        for e in range(z.size):
            p[e] = p[e] / total
    else:
        for e in range(z.size):
            p[e] = sigmoid(z[e]) if gating == SIGMOID else f32(math.sqrt(softplus(z[e])))
    return p


@njit(cache=True, error_model="numpy")
def leave_groups(scores, keys, n_group, n_used, group_best):
    """Set the keys of all experts to 0 but for those of the n_used best groups."""
    size = scores.size // n_group
    best = np.empty(n_group, np.uint64)
    for g in range(n_group):
        first, second = u64(0), u64(0)
        for e in range(g * size, (g + 1) * size):
            if keys[e] > first:
                first, second = keys[e], first
            elif keys[e] > second:
                second = keys[e]
        value = scores[place_of(first)]
        if size > 1 and group_best > 1:
            value = value + scores[place_of(second)]
        best[g] = pack(value, g)
    for _ in range(n_used):
        top = 0
        for g in range(n_group):
            if best[g] > best[top]:
                top = g
        best[top] = u64(0)
    for g in range(n_group):
        if best[g] > u64(0):
            keys[g * size : (g + 1) * size] = u64(0)


@njit(cache=True, error_model="numpy")
def route_by(
    logits,
    n_expert,
    gating,
    router_bias,
    selection_bias,
    normalized,
    floor,
    weight_scale,
    n_group,
    n_group_used,
    group_best,
    table,
    tokens,
    ids,
    weights,
    first,
    last,
):
    """The experts of rows [first, last) and their weights."""
    n_used = ids.shape[1]
    keys = np.empty(n_expert, np.uint64)
    z = np.empty(n_expert, np.float32)
    for t in range(first, last):
        for e in range(n_expert):
            # NaN is above all numbers: a row with such a logit has it in the sum of its weights.
            z[e] = finite(logits[t, e])
        for e in range(router_bias.size):
            z[e] = z[e] + router_bias[e]
        p = z if gating == CHOSEN else probabilities(z, gating)
        by_probability = selection_bias.size > 0 or n_group > 1
        scores = p.copy() if by_probability else z
        for e in range(selection_bias.size):
            scores[e] = scores[e] + selection_bias[e]
        for e in range(n_expert):
            keys[e] = pack(scores[e], e)
        if n_group > 1:
            leave_groups(scores, keys, n_group, n_group_used, group_best)
        total = f32(0.0)
        for s in range(n_used):
            best = 0
            if table.size > 0:
                best = np.int64(table[tokens[t], s])
            else:
                for e in range(n_expert):
                    if keys[e] > keys[best]:
                        best = e
                keys[best] = u64(0)
            ids[t, s] = best
            weights[t, s] = exp(z[best] - z[ids[t, 0]]) if gating == CHOSEN else p[best]
            if by_probability and table.size == 0:
                # A bias may be damaged, too.
                weights[t, s] = unless_overflow(scores[best], weights[t, s])
            total = total + weights[t, s]
        if gating != CHOSEN:
            total = total if total > floor else floor
        for s in range(n_used):
            if normalized:
                weights[t, s] = weights[t, s] / total
            if weight_scale != f32(1.0):
                weights[t, s] = weights[t, s] * weight_scale
