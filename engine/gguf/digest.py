"""The digest of the files of a model, which several threads can compute together.

Only one thread can compute the SHA-256 of a file, so files are divided into leaves of 4 MiB.  The digest of a model is the
SHA-256 of the following bytes for each of its files, in the order of the parts: the number of bytes of the file as a
little-endian integer of 8 bytes, then the SHA-256 of each leaf.  The last leaf of a file may be shorter.
"""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from engine.gguf.file import GGUF
from engine.gguf.pages import MappedFile
from engine.gguf.reader import FilePiece, HostBuffers, PieceBuffer, Reader
from engine.machine.cores import available_cores

LEAF = 4 << 20
"""Bytes of a leaf."""

SAMPLE = 64
"""Bytes of each tensor that count for :func:`sampled_digest`: fine-tuned models may differ in their weights only."""


class FileDigest:
    """The digest of some files, from leaves that are read and hashed in any order: by :func:`model_digest`, or by the threads
    that load a model, if ``pieces`` are added to their reader."""

    def __init__(self, files: tuple[MappedFile, ...]) -> None:
        #: The digests of the leaves of each file; empty where they are missing.
        self._leaves = [[b""] * -(-len(file) // LEAF) for file in files]
        self._files = files

    def pieces(self) -> list[FilePiece[Any]]:
        """The leaves, to be read by a :class:`~engine.gguf.reader.Reader` with any kind of buffer."""
        found: list[FilePiece[Any]] = []
        for file, leaves in zip(self._files, self._leaves, strict=True):
            contents = np.frombuffer(file, np.uint8)
            for i in range(len(leaves)):
                found.append(FilePiece([contents[i * LEAF : (i + 1) * LEAF]], partial(self._hash, leaves, i)))
        return found

    def _hash(self, leaves: list[bytes], i: int, buffer: PieceBuffer, n_bytes: int) -> None:
        leaves[i] = hashlib.sha256(buffer.data[:n_bytes].data).digest()

    def hexdigest(self) -> str:
        """The digest in hexadecimal.  To be called when all pieces are read."""
        assert all(leaf for leaves in self._leaves for leaf in leaves)
        digest = hashlib.sha256()
        for file, leaves in zip(self._files, self._leaves, strict=True):
            digest.update(len(file).to_bytes(8, "little") + b"".join(leaves))
        return digest.hexdigest()


def model_digest(gguf: GGUF, n_threads: int = 0, progress: Callable[[str, int, int], None] | None = None) -> str:
    """The digest of the files of a model, as 64 hexadecimal digits: it differs if any byte of a file does.

    Parameters
    ----------
    gguf : GGUF
        An open file, or all parts of one.
    n_threads : int
        Threads that read and hash; 0: one per core.  The digest does not depend on it.
    progress : callable, optional
        Called as ``progress("digest", done, total)`` with numbers of bytes.

    Raises
    ------
    GGUFError
        If a file cannot be read or has become shorter.
    """
    digest = FileDigest(gguf.files)
    reader = Reader(n_threads or available_cores(), HostBuffers())
    try:
        reader.add(digest.pieces())
        reader.finish(None if progress is None else partial(progress, "digest"))
    finally:
        reader.stop()
    return digest.hexdigest()


def sampled_digest(gguf: GGUF) -> str:
    """SHA-256, as hexadecimal digits, of the metadata of a model, the table of its tensors, and the first bytes of
    each.  Unlike :func:`model_digest`, it takes no time, and does not depend on how the model is split into files, but most
    weights do not count."""
    sha = hashlib.sha256()

    def add(*values: object) -> None:
        sha.update(json.dumps(values).encode() + b"\n")

    for key in sorted(key for key in gguf.metadata if not key.startswith("split.")):
        value = gguf.metadata[key]
        if isinstance(value, np.ndarray):
            add(key, gguf.kinds[key], value.size)
            sha.update(np.ascontiguousarray(value).tobytes())
        else:
            add(key, gguf.kinds[key], value)
    for name in sorted(gguf.tensors):
        tensor = gguf.tensors[name]
        add(name, int(tensor.type), tensor.shape, tensor.nbytes)
        sha.update(tensor.data[:SAMPLE].tobytes())
    return sha.hexdigest()
