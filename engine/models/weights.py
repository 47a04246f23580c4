"""A weight matrix as the model sees it: packed rows and their format."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGMLQuantizationType

from engine.errors import ModelError
from engine.gguf.file import GGUF, Tensor
from engine.gguf.quants import FORMATS, Format, format_of
from engine.models.config import ModelConfig


@dataclass(frozen=True)
class Weight:
    """Packed rows of one tensor.

    ``data``: uint8 [n, row bytes], usually a view of the mapped file; ``columns``: weights per row.  If ``pitch`` is not 0,
    the matrix consists of only ``count`` rows of every ``pitch``, from row ``first`` on.  ``stack``: the number of matrices
    that the rows consist of, those of a mixture's experts.
    """

    name: str
    format: Format
    columns: int
    data: np.ndarray
    first: int = 0
    count: int = 0
    pitch: int = 0
    stack: int = 1

    @property
    def rows(self) -> int:
        """The number of output values."""
        n = int(self.data.shape[0])
        return n // self.pitch * self.count if self.pitch else n

    def part(self, first: int, last: int) -> np.ndarray:
        """Rows [first, last), contiguous: uint8 [last - first, row bytes]."""
        if not self.pitch:
            return self.data[first:last]
        i = np.arange(first, min(last, self.rows))
        return self.data[i // self.count * self.pitch + self.first + i % self.count]

    def halves(self, pitch: int) -> "tuple[Weight, Weight]":
        """Two matrices: the first and the second half of every ``pitch`` rows."""
        n = pitch // 2
        return replace(self, count=n, pitch=pitch), replace(self, first=n, count=n, pitch=pitch)


def load_weight(gguf: GGUF, name: str, rows: int, columns: int, count: int = 0) -> Weight:
    """The matrix ``name`` of a file as a Weight of [rows, columns], or ``count`` such matrices stacked.  Raises ModelError if
    it is missing or has another shape."""
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{gguf.path}: tensor {name} is missing; the file is incomplete or of another architecture.")
    users = [] if tensor.type in FORMATS else [t.name for t in gguf.tensors.values() if t.type == tensor.type]
    entry = format_of(tensor.type, *users)
    shape = (count, rows, columns) if count else (rows, columns)
    if tensor.shape != shape:
        raise ModelError(
            f"{gguf.path}: tensor {name} has shape {list(tensor.shape)} where the metadata requires {list(shape)}; "
            "the file is inconsistent."
        )
    return Weight(name, entry, columns, tensor.data.reshape(-1, entry.row_bytes(columns)), stack=count or 1)


def load_vector(gguf: GGUF, name: str, *shape: int) -> np.ndarray:
    """The tensor ``name`` as float32 of this shape: norms, biases, rotary factors, convolutions, routers.

    Raises ModelError if it is missing, has another shape, or is neither F32 nor F16.
    """
    weight_tensor = gguf.tensors.get(name)
    if weight_tensor is None:
        raise ModelError(f"{gguf.path}: tensor {name} is missing; the file is incomplete or of another architecture.")
    if weight_tensor.shape != shape:
        raise ModelError(
            f"{gguf.path}: tensor {name} has shape {list(weight_tensor.shape)} where the metadata requires {list(shape)}; "
            "the file is inconsistent."
        )
    kind = weight_tensor.type.name
    dtype = {"F32": np.float32, "F16": np.float16}.get(kind)
    if dtype is None:
        raise ModelError(f"{gguf.path}: tensor {name} is {kind} where F32 or F16 is expected.")
    return weight_tensor.data.view(dtype).astype(np.float32).reshape(shape)


def stacked(name: str, *weights: Weight) -> Weight:
    """The rows of several matrices of one format and width, stacked."""
    first = weights[0]
    data = np.concatenate([weight.data for weight in weights])
    data.flags.writeable = False  # like mapped rows, so that the same compiled kernels serve both
    return Weight(name, first.format, first.columns, data)


def bytes_read(tensors: Iterable[Tensor], config: ModelConfig) -> int:
    """Bytes of some tensors that one token reads; of a stack of experts it reads only those that it uses."""
    used = config.experts.n_used / config.experts.n_expert if config.experts is not None else 1.0
    return sum(int(tensor.nbytes * (used if "_exps." in tensor.name else 1.0)) for tensor in tensors)


def join_rows(name: str, *parts: np.ndarray) -> Weight:
    """A float32 matrix of the rows of several arrays, each [n, columns] or [columns]."""
    rows = np.vstack([np.atleast_2d(part) for part in parts]).astype("<f4")
    return Weight(name, FORMATS[GGMLQuantizationType.F32], rows.shape[1], rows.view(np.uint8))
