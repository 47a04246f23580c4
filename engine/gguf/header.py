"""The header of one GGUF file: untrusted bytes -> checked metadata and tensor entries.

Layout (all little-endian): magic ``GGUF``, version u32, n_tensors u64, n_kv u64; n_kv times (key, type u32, value);
n_tensors times (name, n_dims u32, dims u64[n_dims] innermost first, type u32, offset u64); padding to the alignment;
tensor data. A string is a u64 byte count and UTF-8; an array is an element type u32, a u64 count and the elements.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

A file is hostile until checked. Every read is bounded by the file at the read itself, every count is compared with the
bytes that are left before anything is allocated for it, and every size is a Python int, which cannot overflow.
"""

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.checks import shown
from engine.errors import GGUFError

MetadataValue = int | float | bool | str | list[str] | np.ndarray[Any, np.dtype[Any]]

HEADER_BYTES = 24
MIN_KV_BYTES = 8 + 1 + 4 + 1  # key length, a key of one byte, type, a value of one byte
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, a name of one byte, n_dims, one dimension, type, offset
MAX_RECORDS = 65_536  # metadata keys, and tensors, of one file
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 63
MAX_VALUE_BYTES = 64 << 20  # one string, or one array of numbers
MAX_STRINGS = 1 << 21  # elements of all string arrays of one file together; each costs a Python object
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

DAMAGED = "the file is damaged or incomplete: download or convert it again"

# id of a value type -> its name; ids 8 (str) and 9 (array) have no fixed size
VALUE_KINDS = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "array", "u64", "i64", "f64")
NUMBERS = {
    "u8": "<u1",
    "i8": "<i1",
    "u16": "<u2",
    "i16": "<i2",
    "u32": "<u4",
    "i32": "<i4",
    "f32": "<f4",
    "bool": "<u1",
    "u64": "<u8",
    "i64": "<i8",
    "f64": "<f8",
}

REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
ACTIVATION_TYPES = (GGMLQuantizationType.Q8_1, GGMLQuantizationType.Q8_K)  # made while computing, never stored

# the first bytes of files that are not GGUF files, and what such a file is
OTHER_MAGICS = {
    b"version https://git-lfs": "it is a Git LFS pointer: fetch the real file with git lfs pull",
    b"<": "it looks like a web page: download the file itself instead of the page about it",
    b"PK\x03\x04": "it is a zip archive or a PyTorch checkpoint: convert it to GGUF first",
    b"tjgg": "it is a GGJT file, the predecessor of GGUF: convert the original model to GGUF",
}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's entry in the header. ``shape``: NumPy order, outermost first; ``offset``: from the start of the data."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    nbytes: int
    offset: int
    field_offset: int  # position of the entry's offset field in the header, for messages


@dataclass(slots=True)
class Header:
    """The checked header of one file.

    ``kinds`` gives every key's declared type (``"u32"``, ``"str"``, ``"f32[]"``, …) and ``offsets`` the byte position
    of its value; ``data_start`` is the position tensor offsets count from.
    """

    version: int
    alignment: int = DEFAULT_ALIGNMENT
    metadata: dict[str, MetadataValue] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    tensors: list[TensorEntry] = field(default_factory=list)
    data_start: int = 0


class Cursor:
    """A position in a mapped file at which values are read; each read checks that its bytes exist."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.pos = 0
        self.strings_left = MAX_STRINGS

    def refuse(self, field: str, offset: int | None, problem: str) -> NoReturn:
        raise GGUFError(self.path, field, offset, problem)

    def take(self, n: int, field: str) -> int:
        """Steps over ``n`` bytes and returns the position of the first."""
        start = self.pos
        if n > self.size - start:
            self.refuse(field, start, f"needs {n} bytes but {self.size - start} are left; {DAMAGED}")
        self.pos = start + n
        return start

    def u32(self, field: str) -> int:
        value: int = _U32.unpack_from(self.buffer, self.take(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self.buffer, self.take(8, field))[0]
        return value

    def string(self, field: str, limit: int) -> str:
        at = self.pos
        n = self.u64(field)
        if n > limit:
            self.refuse(field, at, f"has a length of {n} bytes, the limit is {limit}; {DAMAGED}")
        start = self.take(n, field)
        try:
            return str(self.buffer[start : start + n], "utf-8")
        except UnicodeDecodeError:
            self.refuse(field, start, f"is not UTF-8 text; {DAMAGED}")

    def strings(self, n: int, field: str) -> list[str]:
        """``n`` strings. A vocabulary of 250 000 entries goes through this loop, so it avoids every call it can."""
        if n > self.strings_left:
            self.refuse(field, self.pos, f"brings the strings in arrays to more than {MAX_STRINGS}; {DAMAGED}")
        self.strings_left -= n
        values: list[str] = []
        append, unpack, buffer, size, start = values.append, _U64.unpack_from, self.buffer, self.size, self.pos
        try:
            for _ in range(n):
                text = start + 8
                if text > size:
                    break
                end = text + unpack(buffer, start)[0]
                if end > size or end - text > MAX_VALUE_BYTES:
                    break
                append(str(buffer[text:end], "utf-8"))
                start = end
        except UnicodeDecodeError:
            self.refuse(f"{field}[{len(values)}]", start, f"is not UTF-8 text; {DAMAGED}")
        self.pos = start
        if len(values) < n:  # read the string that did not fit again, for its error message
            self.string(f"{field}[{len(values)}]", MAX_VALUE_BYTES)
        return values

    def numbers(self, kind: str, n: int, field: str) -> np.ndarray[Any, np.dtype[Any]]:
        """``n`` numbers as a read-only array, copied out of the file so that it is aligned and cannot change."""
        dtype = np.dtype(NUMBERS[kind])
        start = self.take(n * dtype.itemsize, field)
        values = np.frombuffer(self.buffer, dtype, n, start).astype(dtype.newbyteorder("="), copy=True)
        if kind == "bool":
            bad = np.flatnonzero(values > 1)
            if bad.size:
                index = int(bad[0])
                value = int(values[index])
                self.refuse(f"{field}[{index}]", start + index, f"is a bool of {value}, not 0 or 1; {DAMAGED}")
            values = values.astype(np.bool_)
        values.flags.writeable = False
        return values

    def kind(self, field: str) -> str:
        at = self.pos
        index = self.u32(field)
        if index >= len(VALUE_KINDS):
            last = len(VALUE_KINDS) - 1
            self.refuse(field, at, f"has value type {index}, but types go from 0 to {last}; {DAMAGED}")
        return VALUE_KINDS[index]

    def value(self, key: str) -> tuple[str, int, MetadataValue]:
        """The declared type, the position and the value of metadata key ``key``."""
        field = shown(key)
        kind = self.kind(field)
        at = self.pos
        if kind == "str":
            return kind, at, self.string(field, MAX_VALUE_BYTES)
        if kind != "array":
            number = self.numbers(kind, 1, field)[0].item()
            return kind, at, number
        kind = self.kind(field)
        if kind == "array":
            self.refuse(field, at, f"is an array of arrays, which no GGUF reader accepts; {DAMAGED}")
        n = self.u64(field)
        itemsize = 8 if kind == "str" else np.dtype(NUMBERS[kind]).itemsize  # an empty string takes 8 bytes
        left = self.size - self.pos
        if n * itemsize > left:
            self.refuse(field, at, f"declares {n} elements of type {kind} but {left} bytes are left; {DAMAGED}")
        if kind == "str":
            return "str[]", at, self.strings(n, field)
        if n * itemsize > MAX_VALUE_BYTES:
            self.refuse(field, at, f"is an array of {n * itemsize} bytes, the limit is {MAX_VALUE_BYTES}; {DAMAGED}")
        return f"{kind}[]", at, self.numbers(kind, n, field)


def read_header(path: Path, buffer: mmap.mmap) -> Header:
    """Reads and checks the header in ``buffer``, the whole file mapped read-only; raises GGUFError."""
    cursor = Cursor(path, buffer)
    header = Header(_read_version(cursor))
    n_tensors = cursor.u64("n_tensors")
    n_kv = cursor.u64("n_kv")
    _check_counts(cursor, n_tensors, n_kv)
    for index in range(n_kv):
        at = cursor.pos
        key = cursor.string(f"key {index}", MAX_KEY_BYTES)
        if not key:
            cursor.refuse(f"key {index}", at, f"is empty; {DAMAGED}")
        if key in header.metadata:
            cursor.refuse(shown(key), at, f"appears twice; {DAMAGED}")
        header.kinds[key], header.offsets[key], header.metadata[key] = cursor.value(key)
    header.alignment = _check_alignment(cursor, header)
    _check_counts(cursor, n_tensors, 0)
    names: set[str] = set()
    for index in range(n_tensors):
        at = cursor.pos
        entry = _read_tensor(cursor, index, header.alignment)
        if entry.name in names:
            cursor.refuse(f"tensor '{shown(entry.name)}'", at, f"appears twice; {DAMAGED}")
        names.add(entry.name)
        header.tensors.append(entry)
    header.data_start = -(-cursor.pos // header.alignment) * header.alignment
    _check_layout(cursor, header)
    return header


def _read_version(cursor: Cursor) -> int:
    begin = cursor.buffer[: min(cursor.size, HEADER_BYTES)]
    if begin[:4] != b"GGUF":
        for magic, advice in OTHER_MAGICS.items():
            if begin.startswith(magic):
                cursor.refuse("magic", 0, f"this is not a GGUF file: {advice}")
        found = shown(begin[:4].decode("latin-1"))
        cursor.refuse(
            "magic", 0, f"this is not a GGUF file: it begins with '{found}' instead of 'GGUF'; give a .gguf file"
        )
    if cursor.size < HEADER_BYTES:
        cursor.refuse("header", 0, f"needs {HEADER_BYTES} bytes but the file has {cursor.size}; {DAMAGED}")
    cursor.take(4, "magic")
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    if version == 1:
        problem = "GGUF version 1 is obsolete: convert the model again with a current converter"
    elif version and version & 0xFFFF == 0:
        problem = "the file is big-endian: convert it to little-endian (gguf-convert-endian of the gguf package)"
    elif version == 0:
        problem = f"there is no GGUF version 0; {DAMAGED}"
    else:
        problem = f"GGUF version {version} is newer than the versions 2 and 3 known here: update this program"
    cursor.refuse("version", 4, problem)


def _check_counts(cursor: Cursor, n_tensors: int, n_kv: int) -> None:
    """Refuses counts that the rest of the file cannot hold, before a loop or an allocation relies on them."""
    for name, n, offset in (("n_tensors", n_tensors, 8), ("n_kv", n_kv, 16)):
        if n > MAX_RECORDS:
            cursor.refuse(name, offset, f"is {n}, the limit is {MAX_RECORDS}; {DAMAGED}")
    left = cursor.size - cursor.pos
    for name, need, offset in (("n_kv", n_kv * MIN_KV_BYTES, 16), ("n_tensors", n_tensors * MIN_TENSOR_BYTES, 8)):
        if need > left:
            cursor.refuse(name, offset, f"needs at least {need} bytes of header but {left} are left; {DAMAGED}")
        left -= need


def _check_alignment(cursor: Cursor, header: Header) -> int:
    key = "general.alignment"
    if key not in header.metadata:
        return DEFAULT_ALIGNMENT
    kind, value, offset = header.kinds[key], header.metadata[key], header.offsets[key]
    if kind != "u32" or not isinstance(value, int):
        cursor.refuse(key, offset, f"is of type {kind} instead of u32; {DAMAGED}")
    if value < 1 or value & (value - 1) or value > MAX_ALIGNMENT:
        cursor.refuse(key, offset, f"is {value}, not a power of two from 1 to {MAX_ALIGNMENT}; {DAMAGED}")
    return value


def _read_tensor(cursor: Cursor, index: int, alignment: int) -> TensorEntry:
    at = cursor.pos
    name = cursor.string(f"tensor {index} name", MAX_NAME_BYTES)
    if not name:
        cursor.refuse(f"tensor {index} name", at, f"is empty; {DAMAGED}")
    label = f"tensor '{shown(name)}'"
    at = cursor.pos
    n_dims = cursor.u32(f"{label} n_dims")
    if not 1 <= n_dims <= MAX_DIMS:
        cursor.refuse(f"{label} n_dims", at, f"is {n_dims}, not 1 to {MAX_DIMS}; {DAMAGED}")
    dims: list[int] = []
    n_elements = 1
    for axis in range(n_dims):
        at = cursor.pos
        dims.append(cursor.u64(f"{label} dims[{axis}]"))
        n_elements *= dims[axis]
        if not 1 <= dims[axis] < 1 << 63:
            cursor.refuse(f"{label} dims[{axis}]", at, f"is {dims[axis]}, not 1 to 2^63 - 1; {DAMAGED}")
        if n_elements >= 1 << 63:
            cursor.refuse(f"{label} dims[{axis}]", at, f"makes the tensor {n_elements} elements large; {DAMAGED}")
    type_ = _read_tensor_type(cursor, label)
    block, block_bytes = GGML_QUANT_SIZES[type_]
    if dims[0] % block:
        problem = f"has rows of {dims[0]} elements, not a multiple of {block}, the block of {type_.name}; {DAMAGED}"
        cursor.refuse(f"{label} dims[0]", cursor.pos - 4 - 8 * n_dims, problem)
    field_offset = cursor.pos
    offset = cursor.u64(f"{label} offset")
    if offset % alignment:
        cursor.refuse(
            f"{label} offset", field_offset, f"is {offset}, not a multiple of the alignment {alignment}; {DAMAGED}"
        )
    return TensorEntry(name, type_, tuple(reversed(dims)), n_elements // block * block_bytes, offset, field_offset)


def _read_tensor_type(cursor: Cursor, label: str) -> GGMLQuantizationType:
    at = cursor.pos
    index = cursor.u32(f"{label} type")
    if index in REMOVED_TYPES:
        problem = f"{REMOVED_TYPES[index]} (type {index}) was removed from the format: quantize the model again"
        cursor.refuse(f"{label} type", at, problem)
    try:
        type_ = GGMLQuantizationType(index)
    except ValueError:
        problem = f"type {index} is unknown: update this program, or quantize the model to a common type such as Q4_K_M"
        cursor.refuse(f"{label} type", at, problem)
    if type_ in ACTIVATION_TYPES or type_ not in GGML_QUANT_SIZES:
        problem = f"{type_.name} (type {index}) is not a format that files store weights in: quantize the model again"
        cursor.refuse(f"{label} type", at, problem)
    return type_


def _check_layout(cursor: Cursor, header: Header) -> None:
    """Checks that tensors follow one another in the file, in any order, with nothing but padding between them.

    The last one may lack its padding, and bytes may follow it: writers differ there and nothing depends on it.
    """
    available = max(cursor.size - header.data_start, 0)
    previous, expected = "the header", 0
    for entry in sorted(header.tensors, key=lambda entry: entry.offset):
        label = f"tensor '{shown(entry.name)}'"
        end = entry.offset + entry.nbytes
        if end > available:
            problem = f"ends at byte {header.data_start + end} but the file at {cursor.size}; {DAMAGED}"
            cursor.refuse(label, entry.field_offset, problem)
        if entry.offset < expected:
            cursor.refuse(label, entry.field_offset, f"overlaps {previous}; {DAMAGED}")
        if entry.offset > expected:
            gap = entry.offset - expected
            cursor.refuse(label, entry.field_offset, f"leaves a gap of {gap} bytes after {previous}; {DAMAGED}")
        previous, expected = label, -(-end // header.alignment) * header.alignment
