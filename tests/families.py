"""The small random models of ``tests/oracle/families``, one for each architecture, as files of a quantized format."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np

from tests.oracle.families.family import Family
from tests.oracle.models import CASES, Case, write_gguf

FAMILIES = {name: case for name, case in CASES.items() if isinstance(case, Family)}

ONE_OF_EACH = {case.architecture: case for case in reversed(FAMILIES.values())}
"""The first case of each architecture."""


Tensors = dict[str, np.ndarray]

Packed = dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]
"""Tensors of a file as its bytes have them, each with its format."""


def _writer(reader: gguf.GGUFReader, path: Path, keys: Mapping[str, Any]) -> gguf.GGUFWriter:
    """A writer with the metadata of a file, but with other values for some ``keys``; None: without the key.  Keys that the
    file does not have are written as uint32, a text or a list of texts."""
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        value = keys.get(field.name, field.contents())
        if not field.name.startswith("GGUF.") and field.name != "general.architecture" and value is not None:
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, value, field.types[0], element)
    for name in keys.keys() - reader.fields.keys():
        write = {int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[type(keys[name])]
        write(name, keys[name])
    return writer


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def edited(
    source: Path, path: Path, keys: Mapping[str, Any] = MappingProxyType({}), change: Callable[[Packed], Packed] = dict
) -> Path:
    """Copy a file with other values for some ``keys`` (None: without the key), and with the tensors that ``change`` makes of
    its own."""
    reader = gguf.GGUFReader(source)
    writer = _writer(reader, path, keys)
    tensors = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    for name, (data, kind) in change(tensors).items():
        writer.add_tensor(name, data, raw_dtype=kind)
    return _written(writer, path)


def rewritten(source: Path, path: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Copy a file with other tensors: ``change`` turns those of the file into those of the copy, both in NumPy's order of
    dimensions.  The name of a quantized tensor, uint8 [..., row bytes], ends with a blank and its format."""
    reader = gguf.GGUFReader(source)
    writer = _writer(reader, path, {})
    for name, data in change({tensor.name: np.array(tensor.data) for tensor in reader.tensors}).items():
        plain, _, kind = name.partition(" ")
        writer.add_tensor(plain, data, raw_dtype=gguf.GGMLQuantizationType[kind] if kind else None)
    return _written(writer, path)


def in_bytes(paths: Iterable[Path], folder: Path) -> list[Path]:
    """Copies of GGUF files in Q8_0, whose products have a fraction of the threads of those in F32."""
    return [rewritten(path, folder / f"Q8_0-{path.name}", lambda tensors: quantized(tensors, "Q8_0")) for path in paths]


def write_quantized(case: Case | Family, path: Path, kind: str = "Q8_0") -> Path:
    """Write the model with every matrix in a block format of gguf-py whose rows consist of whole blocks; routers, norms and
    biases stay float32."""
    return rewritten(write_gguf(case, path.with_suffix(".f32")), path, lambda tensors: quantized(tensors, kind))


def quantized(tensors: Tensors, kind: str) -> Tensors:
    """The tensors of a file with every matrix in a block format whose rows consist of whole blocks, as ``rewritten`` takes
    them."""
    wanted, changed = gguf.GGMLQuantizationType[kind], {}
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    for name, data in tensors.items():
        whole = data.ndim > 1 and data.shape[-1] % block == 0 and name.endswith(".weight")
        if whole and not any(part in name for part in ("ffn_gate_inp", "conv1d", "ssm_norm", "_ape")):
            changed[f"{name} {kind}"] = gguf.quants.quantize(data, wanted)
        else:
            changed[name] = data
    return changed
