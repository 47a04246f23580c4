"""Checks of what users give, and how error messages show it."""

import operator
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import UsageError

MOST_SHOWN = 40
"""The most characters of a value that an error message shows."""

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest float32, in which sampling computes."""


def described(value: object) -> str:
    """A value as an error message shows it: short values themselves, otherwise their type or size."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"a {'negative' if value < 0 else 'whole'} number of {value.bit_length()} bits"
    if isinstance(value, str) and len(value) > MOST_SHOWN:
        return f"a text of {len(value)} characters"
    if value is None or isinstance(value, (bool, int, float, str)) and len(repr(value)) <= MOST_SHOWN:
        return repr(value)
    if isinstance(value, (list, tuple)):
        kinds = sorted({type(item).__name__ for item in value})
        return f"a {type(value).__name__} of {' and '.join(kinds)}" if kinds else f"an empty {type(value).__name__}"
    return type(value).__name__


def shown(value: object, most: int = 80) -> str:
    """A value of a file or a request as messages, logs and reports show it: on one line, without characters that control a
    terminal or turn the direction of text, and cut after ``most`` characters."""
    text = value if isinstance(value, str) else str(value)
    safe = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:most])
    return safe + "…" if len(text) > most else safe


def require(holds: bool, name: str, allowed: str, value: object) -> None:
    """Raise UsageError, which says what is allowed, unless ``holds``."""
    if not holds:
        raise UsageError(f"{name} must be {allowed}, not {described(value)}.")


def whole(name: str, value: object) -> int:
    """``value`` as an integer. Raises UsageError if it is not a whole number."""
    try:
        return _not_bool(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {described(value)}.") from None


_SIZE = re.compile(r"([0-9]{1,7}(?:\.[0-9]{1,3})?) ?([KMGT])(?:i?B)?", re.IGNORECASE)


def memory_size(name: str, value: object) -> int:
    """A size of memory in bytes: a whole number of bytes, or a text such as "12G" or "800M". K, M, G and T are powers of
    1024. Raises UsageError for anything else."""
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        size = int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2].upper()))) if found else 0
    else:
        size = value if isinstance(value, int) and not isinstance(value, bool) else 0
    require(size > 0, name, "a size such as 12G or 800M", value)
    return size


def folder_path(name: str, value: object) -> Path:
    """A path in which ``~`` stands for the user's folder. Raises UsageError if it is none."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "\0" in text:
        raise UsageError(f"{name} must be the path of a folder, not {described(text)}.")
    return Path(os.path.expanduser(text))


def number(name: str, value: Any) -> float:
    """``value`` as a number that float32 can represent. Raises UsageError if it is none."""
    if isinstance(value, (bool, str, bytes)):
        raise UsageError(f"{name} must be a number, not {described(value)}.")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name} must be a number, not {described(value)}.") from None
    require(abs(found) <= LARGEST, name, "a finite number", value)
    return found


def function(name: str, value: object) -> None:
    """Raise UsageError unless ``value`` is a function or None."""
    require(value is None or callable(value), name, "a function", value)


def token_ids(
    prompt: object, wanted: str = "a prompt must be a text or a sequence of token ids (whole numbers)"
) -> list[int]:
    """Token ids as plain integers. Raises UsageError, which says what was ``wanted``, for anything else."""
    if type(prompt) is list and set(map(type, prompt)) == {int}:
        return prompt.copy()  # there may be a million of them
    if not isinstance(prompt, (bytes, bytearray, Mapping)):
        try:
            # True is 1 to operator.index, but not to people.
            return [_not_bool(i) for i in prompt]  # type: ignore[attr-defined]
        except TypeError:
            pass
    raise UsageError(f"{wanted}, not {described(prompt)}.")


def _not_bool(value: object) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]
