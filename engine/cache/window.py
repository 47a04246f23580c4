"""The window of a layer as one number, which is how kernels get it.

- n > 0: a row sees the n latest positions, its own included.
- 0: a row sees all positions up to its own.
- ``NOT_FIRST``: a row sees all positions up to its own, but not position 0.
- -n < ``NOT_FIRST``: a row sees the positions of its own frame up to its own; frames of n positions, a power of two,
  begin at multiples of n, and the frame of position p begins at p & -n.

``first_visible`` of ``engine/cpu/attention.py`` computes the first position that a row sees.
"""

NOT_FIRST = -1
"""The window of a layer whose rows see all positions up to their own, but not position 0."""


def frames(size: int) -> int:
    """The window of a layer whose rows see frames of ``size`` positions, a power of two."""
    assert size > 0 and size & (size - 1) == 0
    return -size if size > 1 else 1


def longest(window: int) -> int:
    """The maximum number of positions that a row sees; 0: there is no maximum."""
    if window < NOT_FIRST:
        return -window
    return max(window, 0)
