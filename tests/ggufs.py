"""Small GGUF files for tests: a writer that checks nothing, and a map of a valid file's header fields to corrupt."""

import contextlib
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import GGUFError
from engine.gguf.file import read_gguf

KINDS = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "array", "u64", "i64", "f64")
FORMATS = dict(zip(KINDS, ("B", "b", "H", "h", "I", "i", "f", "B", None, None, "Q", "q", "d"), strict=True))
NOT_STORED = (GGMLQuantizationType.Q8_1, GGMLQuantizationType.Q8_K)  # formats of activations
STORED = tuple(t for t in GGML_QUANT_SIZES if t not in NOT_STORED)

KeyValue = tuple[str | bytes, str, Any]


class Field(NamedTuple):
    pos: int
    size: int


@dataclass(frozen=True)
class Spec:
    """One tensor to write: ``dims`` as in the file, innermost first; ``offset`` None lets the writer place it."""

    name: str | bytes
    dims: tuple[int, ...]
    type: int = 0
    data: bytes | None = None
    offset: int | None = None


def pad(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def n_bytes(spec: Spec) -> int:
    n = 1
    for dim in spec.dims:
        n *= dim
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(spec.type)]
    return n // block * size


def text(value: str | bytes) -> bytes:
    encoded = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value_bytes(kind: str, value: Any) -> bytes:
    """A value of ``kind`` without its type id; bytes are written unchanged, whatever the kind."""
    if kind == "str":
        return text(value)
    if isinstance(value, bytes):
        return value
    return struct.pack("<" + str(FORMATS[kind]), value)


def key_value(key: str | bytes, kind: str, value: Any) -> bytes:
    """A metadata record; an array's kind ends in ``[]`` and its value is a sequence."""
    if not kind.endswith("[]"):
        return text(key) + struct.pack("<I", KINDS.index(kind)) + value_bytes(kind, value)
    kind = kind[:-2]
    body = b"".join(value_bytes(kind, item) for item in value)
    return text(key) + struct.pack("<IIQ", KINDS.index("array"), KINDS.index(kind), len(value)) + body


def build(
    kv: Sequence[KeyValue] = (),
    tensors: Sequence[Spec] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    with_data: bool = True,
    pad_last: bool = True,
) -> bytes:
    """A whole file. ``alignment`` determines the offsets of tensors; add ``general.alignment`` to ``kv`` to declare it."""
    out = bytearray(magic + struct.pack("<IQQ", version, len(tensors), len(kv)))
    for record in kv:
        out += key_value(*record)
    data = bytearray()
    placed = 0
    for spec in tensors:
        offset = placed if spec.offset is None else spec.offset
        placed = pad(offset + n_bytes(spec), alignment)
        out += text(spec.name) + struct.pack("<I", len(spec.dims))
        out += b"".join(struct.pack("<Q", dim % 2**64) for dim in spec.dims) + struct.pack(
            "<IQ", spec.type, offset % 2**64
        )
        if with_data:
            content = bytes(i % 256 for i in range(n_bytes(spec))) if spec.data is None else spec.data
            data += content.ljust(pad(len(content), alignment), b"\0")
    if tensors or with_data:
        out += bytes(pad(len(out), alignment) - len(out))
    if not pad_last and tensors:
        del data[len(data) - (pad(n_bytes(tensors[-1]), alignment) - n_bytes(tensors[-1])) :]
    return bytes(out + data)


def fields(data: bytes) -> dict[str, Field]:
    """The positions of the header fields of a valid file, in file order: ``magic``, ``n_kv``, ``kv 0 key length``, …"""
    found: dict[str, Field] = {}
    pos = 0

    def step(name: str, size: int) -> int:
        nonlocal pos
        found[name] = Field(pos, size)
        pos += size
        return int.from_bytes(data[pos - size : pos], "little")

    def string(name: str) -> bytes:
        n = step(f"{name} length", 8)
        step(f"{name} text", n)
        return data[pos - n : pos]

    step("magic", 4)
    step("version", 4)
    n_tensors, n_kv = step("n_tensors", 8), step("n_kv", 8)
    for i in range(n_kv):
        string(f"kv {i} key")
        kind, count, element = KINDS[step(f"kv {i} type", 4)], 1, ""
        if kind == "array":
            kind, element = KINDS[step(f"kv {i} element type", 4)], "[{}]"
            count = step(f"kv {i} count", 8)
        for j in range(count):
            name = f"kv {i} value" + element.format(j)
            if kind == "str":
                string(name)
            else:
                step(name, struct.calcsize("<" + str(FORMATS[kind])))
    for i in range(n_tensors):
        string(f"tensor {i} name")
        for axis in range(step(f"tensor {i} n_dims", 4)):
            step(f"tensor {i} dims[{axis}]", 8)
        step(f"tensor {i} type", 4)
        step(f"tensor {i} offset", 8)
    return found


def patch(data: bytes, name: str, value: int | bytes) -> bytes:
    """``data``, a valid file, with the header field ``name`` overwritten (an int modulo the field's width)."""
    field = fields(data)[name]
    if isinstance(value, int):
        value = (value % (1 << 8 * field.size)).to_bytes(field.size, "little")
    return data[: field.pos] + value + data[field.pos + field.size :]


def written(writer: gguf.GGUFWriter) -> list[bytes]:
    """The files that ``writer``, created without a path, would write: one, or the parts of a split model."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in writer.tensors]
        writer.fout = [*files]  # type: ignore[list-item]  # any binary file works
        writer.state = gguf.gguf_writer.WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        for file in files:
            file.seek(0)
        return [file.read() for file in files]


def small_writer(split_max_tensors: int = 0, small_first_shard: bool = False) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(
        None,
        "llama",
        split_max_tensors=split_max_tensors,
        small_first_shard=small_first_shard,
    )
    writer.add_name("a model – naïve ✓")
    writer.add_block_count(2)
    writer.add_rope_freq_base(1e4)
    writer.add_bool("some.flag", True)
    writer.add_uint64("some.big", 2**64 - 1)
    writer.add_int8("some.small", -128)
    writer.add_float64("some.double", 0.1)
    writer.add_token_list(["<s>", "", "ab", "é", "日本", "\0"])
    writer.add_token_scores([0.0, -1.0, -2.5, 3.0, 1e-9, 5.0])
    writer.add_token_types([3, 1, 1, 1, 1, 6])
    writer.add_array("some.flags", [True, False])
    rng = np.random.default_rng(7)
    for i in range(5):
        writer.add_tensor(f"blk.{i}.weight", rng.standard_normal((2, 3 + i), dtype=np.float32))
    q8 = gguf.quants.quantize(rng.standard_normal((4, 64), dtype=np.float32), GGMLQuantizationType.Q8_0)
    writer.add_tensor("quantized.weight", q8, raw_dtype=GGMLQuantizationType.Q8_0)
    return writer


SMALL = written(small_writer())[0]


def refused(data: bytes, directory: Path, **options: Any) -> GGUFError:
    """The error with which the loader refuses a file with the contents ``data``."""
    path = directory / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GGUFError) as caught:
        read_gguf(path, **options)
    assert caught.value.path == path
    assert "\n" not in str(caught.value)
    return caught.value


def damaged(source: Path, path: Path, name: str, place: int, value: float) -> Path:
    """A copy of a file in which a float32 tensor has another value at one place."""
    (tensor,) = (tensor for tensor in gguf.GGUFReader(source).tensors if tensor.name == name)
    assert tensor.tensor_type == GGMLQuantizationType.F32 and 0 <= place < tensor.n_elements
    data = bytearray(source.read_bytes())
    struct.pack_into("<f", data, int(tensor.data_offset) + 4 * place, value)
    path.write_bytes(data)
    return path
