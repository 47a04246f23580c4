"""The one tree in which partial sums are added.

Formula: the sum of ``lanes[:width]``, width a power of two.
Reduction order: ((l_0 + l_(w/2)), (l_1 + l_(w/2 + 1)), ...), then the same over half as many, down to one.
A GPU adds in this order with exchanges between lanes that are w / 2, w / 4, ..., 1 apart.  If a lane there owns four
neighbours, it adds them first: (l_0 + l_2) + (l_1 + l_3).
"""

from numba import njit


@njit(forceinline=True, error_model="numpy")
def fold(lanes, width):
    """The sum of the first ``width`` float32 lanes, which are overwritten."""
    half = width // 2
    while half > 0:
        for j in range(half):
            lanes[j] = lanes[j] + lanes[j + half]
        half //= 2
    return lanes[0]


@njit(forceinline=True, error_model="numpy")
def fold_fours(lanes, width):
    """The sum of the first ``width`` float32 lanes, which are overwritten: each four neighbours first, then the tree."""
    for g in range(width // 4):
        lanes[g] = (lanes[4 * g] + lanes[4 * g + 2]) + (lanes[4 * g + 1] + lanes[4 * g + 3])
    return fold(lanes, width // 4)
