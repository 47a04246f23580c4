"""Loading of a file's tensors as weight matrices and arrays, with checks of their shapes."""

import re
from collections.abc import Iterable

import numpy as np
from gguf import GGMLQuantizationType

from engine.errors import ModelError
from engine.gguf.file import GGUF, GGUFTensor
from engine.gguf.quants import FORMATS, format_of
from engine.models.config import ModelConfig
from engine.ops.weight import Weight


def missing(gguf: GGUF, name: str) -> ModelError:
    """The error for a file without the tensor ``name``."""
    return ModelError(f"{gguf.path}: tensor {name} is missing; the file is incomplete or of another architecture.")


def _tensor(gguf: GGUF, name: str) -> GGUFTensor:
    if name not in gguf.tensors:
        raise missing(gguf, name)
    return gguf.tensors[name]


def load_weight(gguf: GGUF, name: str, rows: int, columns: int, count: int = 0) -> Weight:
    """The matrix ``name`` [rows, columns] of a file, or ``count`` such matrices stacked.

    Raises ModelError if the tensor is missing or has another shape.
    """
    tensor = _tensor(gguf, name)
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
    """The tensor ``name`` as float32 of this shape, for norms, biases, rotary factors, convolutions and routers.

    In the file, the tensor may be F32, F16 or BF16, because llama.cpp's conversion keeps the type of the original for some
    tensors.  It may also be a matrix with one row, as the conversion writes some vectors.

    Raises ModelError if the tensor is missing or has another shape or type.
    """
    weight_tensor = _tensor(gguf, name)
    if weight_tensor.shape not in (shape, (1, *shape)):
        raise ModelError(
            f"{gguf.path}: tensor {name} has shape {list(weight_tensor.shape)} where the metadata requires {list(shape)}; "
            "the file is inconsistent."
        )
    return _floats(gguf, weight_tensor).reshape(shape)


def _floats(gguf: GGUF, tensor: GGUFTensor) -> np.ndarray:
    """The values of a tensor of floats: float32 [n]."""
    if tensor.type == GGMLQuantizationType.F32:
        return tensor.data.view("<f4").astype(np.float32)
    if tensor.type == GGMLQuantizationType.F16:
        return tensor.data.view("<f2").astype(np.float32)
    if tensor.type == GGMLQuantizationType.BF16:
        # A BF16 number is the upper half of a float32.
        return (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    raise ModelError(f"{gguf.path}: tensor {tensor.name} is {tensor.type.name} where F32, F16 or BF16 is expected.")


def load_integers(gguf: GGUF, name: str, *shape: int, end: int) -> np.ndarray:
    """The tensor ``name``, a table of ids, as int32 of this shape.  The values are from 0 to ``end`` - 1, and differ within a
    row.

    Raises ModelError if the tensor is missing, has another shape or type, or contains other values.
    """
    tensor = _tensor(gguf, name)
    kinds = {GGMLQuantizationType.I32: "<i4", GGMLQuantizationType.I64: "<i8"}
    if tensor.shape != shape or tensor.type not in kinds:
        raise ModelError(
            f"{gguf.path}: tensor {name} is {tensor.type.name} {list(tensor.shape)} where the metadata requires I32 "
            f"{list(shape)}; the file is inconsistent."
        )
    values = tensor.data.view(kinds[tensor.type]).reshape(shape)
    if values.size and not 0 <= values.min() <= values.max() < end:
        raise ModelError(f"{gguf.path}: tensor {name} must hold numbers from 0 to {end - 1}; the file is damaged.")
    if np.any(np.diff(np.sort(values, axis=-1), axis=-1) == 0):
        raise ModelError(f"{gguf.path}: tensor {name} holds a number twice in one row; the file is damaged.")
    return values.astype(np.int32)


def stacked(name: str, *weights: Weight) -> Weight:
    """Stack several matrices with the same format and width."""
    first = weights[0]
    data = np.concatenate([weight.data for weight in weights])
    data.flags.writeable = False  # like mapped rows, so that the same compiled kernels accept both
    return Weight(name, first.format, first.columns, data)


_EXPERTS = re.compile(r"blk\.([0-9]{1,4})\.\w{1,32}_exps\.")


def bytes_read(tensors: Iterable[GGUFTensor], config: ModelConfig) -> int:
    """The number of bytes of ``tensors`` that one token reads.  Of a stack of experts, it reads only those that it uses."""

    def share(name: str) -> float:
        found = _EXPERTS.match(name)
        if found is None or int(found[1]) >= len(config.all_layers):
            return 1.0
        return config.all_layers[int(found[1])].network.share_read

    return sum(int(tensor.nbytes * share(tensor.name)) for tensor in tensors)


def join_rows(name: str, *parts: np.ndarray) -> Weight:
    """Stack several arrays, each [n, columns] or [columns], into one float32 matrix."""
    rows = np.vstack([np.atleast_2d(part) for part in parts]).astype("<f4")
    return Weight(name, FORMATS[GGMLQuantizationType.F32], rows.shape[1], rows.view(np.uint8))
