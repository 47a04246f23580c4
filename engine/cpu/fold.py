"""The one tree in which partial sums are added.

Formula: the sum of ``lanes[:width]``, width a power of two.
Reduction order: ((l_0 + l_(w/2)), (l_1 + l_(w/2 + 1)), ...), then the same over half as many, down to one.
A GPU adds in this order with exchanges between lanes that are w / 2, w / 4, ..., 1 apart.
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
