"""Elements of caches of float32 or float16, read and written as float32; NaN is stored for what they cannot represent."""

from engine.cuda.intrinsics import finite, half_to_float, halves, stored_half
from engine.cuda.products.unpack import device
from engine.cuda.runtime.kinds import DeviceFunction


@device
def get_half(p, i):
    """Element i of an array of float16."""
    return half_to_float(halves(p)[i])


@device
def get_float(p, i):
    """Element i of an array of float32."""
    return p[i]


@device
def set_half(p, i, x):
    """Store x as element i of an array of float16."""
    halves(p)[i] = stored_half(x)


@device
def set_float(p, i, x):
    """Store x as element i of an array of float32."""
    p[i] = finite(x)


def getter(half: bool) -> DeviceFunction:
    """The device function ``get(p, i)`` for an array of float16 or of float32."""
    return get_half if half else get_float


def setter(half: bool) -> DeviceFunction:
    """The device function ``set(p, i, x)`` for an array of float16 or of float32."""
    return set_half if half else set_float
