"""A weight matrix as the model sees it: packed rows and the format that explains them."""

from dataclasses import dataclass

import numpy as np

from engine.errors import ModelError
from engine.gguf import GGUF
from engine.quants import FORMATS, Format, format_of


@dataclass(frozen=True)
class Weight:
    """Packed rows of one tensor.

    ``data`` uint8 [rows, row bytes], usually a view of the mapped file; ``columns`` weights per row.
    """

    name: str
    format: Format
    columns: int
    data: np.ndarray

    @property
    def rows(self) -> int:
        """Number of output values."""
        return int(self.data.shape[0])


def load_weight(gguf: GGUF, name: str, rows: int, columns: int) -> Weight:
    """The matrix ``name`` of a file as a Weight of [rows, columns]; ModelError if it is absent or shaped otherwise."""
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{gguf.path}: tensor {name} is missing; the file is incomplete or of another architecture.")
    users = [] if tensor.type in FORMATS else [t.name for t in gguf.tensors.values() if t.type == tensor.type]
    entry = format_of(tensor.type, *users)
    if tensor.shape != (rows, columns):
        raise ModelError(
            f"{gguf.path}: tensor {name} has shape {list(tensor.shape)} where the metadata asks for {[rows, columns]}; "
            "the file is inconsistent."
        )
    return Weight(name, entry, columns, tensor.data.reshape(rows, entry.row_bytes(columns)))


def load_vector(gguf: GGUF, name: str, size: int) -> np.ndarray:
    """The one-dimensional tensor ``name`` as float32 [size]: norms, biases, rotary factors."""
    weight_tensor = gguf.tensors.get(name)
    if weight_tensor is None:
        raise ModelError(f"{gguf.path}: tensor {name} is missing; the file is incomplete or of another architecture.")
    if weight_tensor.shape != (size,):
        raise ModelError(
            f"{gguf.path}: tensor {name} has shape {list(weight_tensor.shape)} where the metadata asks for [{size}]; "
            "the file is inconsistent."
        )
    kind = weight_tensor.type.name
    dtype = {"F32": np.float32, "F16": np.float16}.get(kind)
    if dtype is None:
        raise ModelError(f"{gguf.path}: tensor {name} is {kind} where F32 or F16 is expected.")
    return weight_tensor.data.view(dtype).astype(np.float32)
