"""From the scores of a chunk to weights: what a (row, head) pair sees of it, exp(score - maximum), and their sum.

Formula: score_j = softcap(score_j, cap) if there is a cap;
    m = max of the visible scores, p_j = exp(score_j - m), l = sum of p_j (``engine/cpu/attention.py``).
Shapes: scores float32 [tasks / shared_by, 64, shared_by], in shared memory; ``combine.py`` reads m and l from weights [rows,
    n_head, partials, 2].
Who owns what: a warp at a time owns a pair, a lane positions ``lane`` and ``lane + 32``.
Reduction order: the halving tree of 64 for the sum; a maximum is exact in any order.
Bytes moved: 8 of shared memory per score, 8 per pair and chunk out.
"""

import numpy as np

from engine.cache.types import CHUNK
from engine.cuda.attention.sight import sight
from engine.cuda.fold import fold32
from engine.cuda.intrinsics import advance, bits_float, exp, float_bits, lanes_max, softcap
from engine.cuda.products.unpack import device
from engine.cuda.runtime.kinds import DeviceFunction

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32


@device
def warp_max(x):
    """The largest x of a warp, in every lane; computed on integers of the same order, for which there is an instruction."""
    bits = float_bits(x)
    most = lanes_max(I(bits ^ I((bits >> I(31)) & I(0x7FFFFFFF))))
    return bits_float(I(most ^ I((most >> I(31)) & I(0x7FFFFFFF))))


def make_weigh(
    group: int, tasks: int, shared_by: int, threads: int, single: bool, cap: float = 0.0, spans: bool = False
) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction, DeviceFunction]:
    """(row_of, head_of, weigh, note): the row and the head of a (row, head) pair; and from the scores of a chunk to weights,
    maxima and sums.  Constants as in ``attend_chunks``; scores float32 [tasks / shared_by, 64, shared_by]."""
    n_warps = threads // 32
    weigh_rounds = -(-tasks // n_warps)
    first_visible, _, visible = sight(spans)
    capped, most_score = cap > 0.0, F(cap)

    @device
    def row_of(task):
        return I(0) if single else I(U(task) // U(group))

    @device
    def head_of(task, n_head, head0):
        """The number of a (row, head) pair among all heads of all rows."""
        return I(head0 + task) if single else I(row_of(task) * n_head + head0 + I(U(task) % U(group)))

    @device
    def weigh(scores, places, tops, masses, thread, n, task0, window, chunk):
        """Turn scores into exp(score - maximum), in place, one task per warp at a time.  The maximum, and the lane's summand
        of the sum, go to tops and masses."""
        lane = I(thread & 31)
        for k in range(weigh_rounds):
            t = I((thread >> 5) + k * n_warps)
            if t < n:
                first, last = visible(places[row_of(I(task0 + t))], window, chunk)
                if first < last:
                    own = advance(scores, I(t // shared_by * (CHUNK * shared_by) + t % shared_by))
                    s, u = own[lane * shared_by], own[(lane + 32) * shared_by]
                    if capped:
                        s, u = softcap(s, most_score), softcap(u, most_score)
                    if lane < first or lane >= last:
                        s = F(-np.inf)
                    if lane + 32 < first or lane + 32 >= last:
                        u = F(-np.inf)
                    m = warp_max(max(s, u))
                    s = exp(s - m)
                    u = exp(u - m)
                    own[lane * shared_by] = s
                    own[(lane + 32) * shared_by] = u
                    tops[k] = m
                    masses[k] = s + u

    @device
    def note(places, tops, masses, weights, thread, n, task0, head0, n_head, partials, window, chunk):
        """Write maxima and sums to where ``combine`` reads them."""
        lane = I(thread & 31)
        for k in range(weigh_rounds):
            t = I((thread >> 5) + k * n_warps)
            if t < n:
                place = places[row_of(I(task0 + t))]
                first, last = visible(place, window, chunk)
                if first < last:
                    total = fold32(masses[k])
                    if lane == 0:
                        head = head_of(I(task0 + t), n_head, head0)
                        partial = I(chunk - (first_visible(place, window) >> 6))
                        at = advance(weights, (np.int64(head) * partials + partial) * 2)
                        at[0] = tops[k]
                        at[1] = total

    return row_of, head_of, weigh, note
