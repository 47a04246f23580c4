"""What a receipt keeps of the logits that a token was chosen from."""

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.compile.jobs import Job, noted
from engine.cpu.digest import digest


class RowDigest(NamedTuple):
    """The digest of a row of logits, 32 hexadecimal digits, and its two largest logits: their tokens and their values, which
    are float32.  ``engine/cpu/digest.py`` defines it."""

    digest: str
    tokens: tuple[int, int]
    values: tuple[float, float]


PackedDigest = bytes
"""A row digest as a device writes it (``engine/cuda/digest.py``), 32 bytes."""

PACKED = 32
"""Bytes of a packed digest."""


def unpacked(packed: PackedDigest) -> RowDigest:
    """The digest that a device has written."""
    first, x, second, y = struct.unpack("<ifif", packed[16:])
    return RowDigest(packed[:16].hex(), (first, second), (x, y))


def row_digest(logits: npt.NDArray[np.float32]) -> RowDigest:
    """The digest of a row of logits, float32 [n_vocab] with n_vocab > 1."""
    low, high, first, second = digest(np.ascontiguousarray(logits))
    first, second = int(first), int(second)
    return RowDigest(hexadecimal(low, high), (first, second), (float(logits[first]), float(logits[second])))


def jobs(n_vocab: int) -> list[Job]:
    """A compile job for each kernel of a digest. Nothing is computed."""
    found: dict[Job, None] = {}
    with noted(found):
        digest(np.zeros(n_vocab, np.float32))
    return list(found)


def hexadecimal(low: int, high: int) -> str:
    """The two words of a digest in hexadecimal: their bytes, little-endian, the low word first."""
    return b"".join(int(word).to_bytes(8, "little") for word in (low, high)).hex()
