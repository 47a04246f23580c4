"""The sampling parameters that a file recommends: its keys ``general.sampling.*``, as llama.cpp's converter writes them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.checks import described
from engine.errors import UsageError
from engine.gguf.file import GGUF
from engine.sampling.chain import ORDER, ORDERS
from engine.sampling.params import SamplerParams

PREFIX = "general.sampling."

FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
}
"""The fields of :class:`SamplerParams` that a file can set, by the names of their keys."""

INTEGERS = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
FLOATS = ("f32", "f64")


def sampling_defaults(gguf: GGUF) -> tuple[dict[str, Any], list[str]]:
    """The values of a file under the names of the fields of :class:`SamplerParams`, and warnings about its other keys: those
    of a wrong type or out of range, and those that would change the text and that no sampler obeys."""
    found: dict[str, Any] = {}
    warnings = []
    for name, field in FIELDS.items():
        if PREFIX + name in gguf.metadata:
            try:
                found[field] = _value(gguf, PREFIX + name, field)
            except UsageError as error:
                warnings.append(f"{error}: the key is ignored")
    return found, warnings + _unsupported(gguf)


def filled(given: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of :class:`SamplerParams` without those that are None although a file can set them, and with what the file says
    about these."""
    optional = FIELDS.values()
    return {**sampling, **{name: value for name, value in given.items() if value is not None or name not in optional}}


def _value(gguf: GGUF, key: str, field: str) -> int | float:
    """The value of a key.  Raises UsageError, without a full stop, if the field cannot have it."""
    value: Any = gguf.metadata[key]
    kind = gguf.kinds[key]
    whole = isinstance(getattr(SamplerParams, field), int)
    if kind not in (INTEGERS if whole else INTEGERS + FLOATS):
        raise UsageError(f"{key} is of type {kind} instead of a {'whole ' if whole else ''}number")
    if kind == "f32":
        # The decimal number that was meant: 0.95, not 0.949999988079071, so that the text is that of the flag --top-p 0.95.
        value = float(str(np.float32(value)))
    try:
        checked = getattr(SamplerParams(**{field: value}), field)
    except UsageError as error:
        raise UsageError(str(error).replace(field, key, 1).removesuffix(".")) from None
    if field == "temperature" and checked < 0:
        raise UsageError(f"{key} must be 0 or more, not {described(value)}")
    return max(checked, 0) if field == "top_k" else checked


def _unsupported(gguf: GGUF) -> list[str]:
    """Warnings about keys that would change the text and that no sampler obeys."""
    warnings = []
    mirostat, sequence = f"{PREFIX}mirostat", f"{PREFIX}sequence"
    # mirostat_tau and mirostat_eta mean nothing without it.
    if mirostat in gguf.metadata and not (gguf.kinds[mirostat] in INTEGERS and gguf.metadata[mirostat] == 0):
        warnings.append(f"{mirostat} asks for a sampler that is not supported: the key is ignored")
    order = gguf.metadata.get(sequence, ORDER)
    if not isinstance(order, str) or order not in ORDERS:
        warnings.append(f"{sequence} asks for another order of samplers than {ORDER}: the key is ignored")
    return warnings
