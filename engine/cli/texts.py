"""Texts that a user gives: in files, through a pipe, or as words with escapes."""

import re
import sys
from pathlib import Path

from engine.checks import shown
from engine.errors import UsageError


def read_text(name: str, what: str) -> str:
    """The text of a file, or of stdin if ``name`` is "-", without one line break at its end.

    what: what the text is, for messages.
    Raises UsageError if it cannot be read, or is not UTF-8.
    """
    try:
        data = sys.stdin.buffer.read() if name == "-" else _bytes(Path(name).expanduser(), what)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~name of an unknown user
        raise UsageError(
            f"the {what} cannot be read from {name}: {getattr(error, 'strerror', None) or error}"
        ) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the {what} in {name} is not UTF-8 text (byte {error.start} begins no character)") from error
    return text.removesuffix("\n")


def _bytes(path: Path, what: str) -> bytes:
    with path.open("rb") as file:
        begin = file.read(4)
        if begin == b"GGUF":  # it may be many gigabytes
            raise UsageError(f"{shown(path)} is a model, not the {what}: give a model with -m")
        return begin + file.read()


_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def unescape(text: str) -> str:
    """Text with its backslash escapes interpreted as in llama.cpp; an unknown escape stays as it is written."""

    def replace(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        return bytes.fromhex(escape[1:].decode()) if escape[:1] == b"x" else _ESCAPES[escape]

    data = re.sub(rb"\\(x[0-9a-fA-F]{2}|[nrt'\"\\])", replace, text.encode("utf-8", "surrogateescape"))
    return valid(data.decode("utf-8", "surrogateescape"))


def valid(text: str) -> str:
    """The text itself; raises UsageError if it is not Unicode (bytes of another encoding, or a cut ``\\xHH``)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"the text given is not UTF-8 (after {text[: error.start][-20:]!r})") from error
    return text
