"""Spans: what a row sees of a text if its window reaches as far forward as back.

With a reach of h, the row at position p of a text whose last position is e sees the positions from max(0, p - h) to
min(p + h, e).  Kernels of attention take for each row the last position that it sees, from which a window of 2 h + 1
positions reaches back.  At the end of a text it would reach too far, so a span, one int32, also has the number of positions
by which the window is cut off there::

    span = last * 2^12 + cut,  last = min(p + h, e),  cut = p + h - last;  first = max(0, last + cut - 2 h)

In a text, a later row has a larger span.
"""

import numpy as np

CUT_BITS = 12
"""The bits of a span that hold the number of positions by which a window is cut off."""

MOST_CUT = (1 << CUT_BITS) - 1
"""The largest reach."""

MOST_LAST = (1 << 31 - CUT_BITS) - 1
"""The largest position."""

SPANS = 1 << 30
"""What is added to a window of 2 h + 1 positions where kernels of the CPU are to read spans."""


def spans(n: int, reach: int) -> np.ndarray:
    """The spans of the rows of a text of n tokens, int32 [n]; reach: at most ``MOST_CUT``."""
    reaches = np.arange(n, dtype=np.int32) + np.int32(reach)
    last = np.minimum(reaches, n - 1)
    return last << CUT_BITS | (reaches - last)
