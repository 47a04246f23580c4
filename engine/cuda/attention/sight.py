"""What a row of attention sees: the positions of a window or a frame that ends at its last position, or those of a span.

Formula: for a place p, the last position that the row sees: first = max(0, p - window + 1); with a number that is not
    positive (``engine/cache/window.py``) the beginning of a frame, 0 or 1.  For a span, first = max(0, p + cut - window + 1)
    (``engine/ops/spans.py``).
Shapes: a place or a span is int32.
Who owns what: a thread computes what it needs.
Reduction order: none.
Bytes moved: none.
"""

import numpy as np

from engine.cache.types import CHUNK
from engine.cache.window import NOT_FIRST
from engine.cuda.products.unpack import device
from engine.cuda.runtime.kinds import DeviceFunction
from engine.ops.spans import CUT_BITS, MOST_CUT

I = np.int32  # noqa: E741


@device
def first_visible(position, window):
    """The first position that the row at ``position`` sees."""
    if window > 0:
        return max(I(0), I(position - window + 1))
    # A frame, as the bits of its beginning; or no window, perhaps without position 0.
    return I(position & window) if window < NOT_FIRST else I(-window)


@device
def last_visible(position):
    """The last position that the row at ``position`` sees."""
    return position


@device
def visible(place, window, chunk):
    """Visible lanes [first, last) of a chunk for the row at position ``place``; none where last <= first."""
    low = first_visible(place, window)
    return max(I(low - chunk * CHUNK), I(0)), min(I(place - chunk * CHUNK + 1), I(CHUNK))


@device
def first_of_span(span, window):
    """The first position of a span."""
    return max(I(0), I((span >> CUT_BITS) + (span & MOST_CUT) - window + 1))


@device
def last_of_span(span):
    """The last position of a span."""
    return I(span >> CUT_BITS)


@device
def visible_of_span(span, window, chunk):
    """Visible lanes [first, last) of a chunk for a row with a span; none where last <= first."""
    low, high = first_of_span(span, window), last_of_span(span)
    return max(I(low - chunk * CHUNK), I(0)), min(I(high - chunk * CHUNK + 1), I(CHUNK))


def sight(spans: bool) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction]:
    """The functions ``first_visible(place, window)``, ``last_visible(place)`` and ``visible(place, window, chunk)``: for
    places, or for spans."""
    if spans:
        return first_of_span, last_of_span, visible_of_span
    return first_visible, last_visible, visible
