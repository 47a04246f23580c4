"""GGUF files: untrusted bytes -> validated metadata and tensors that stay mapped.

``read_gguf`` opens a file, or all parts of a split one, checks everything in the header (``engine.gguf.header``) and
returns metadata with typed getters and tensors whose bytes are views over read-only mappings: opening a file of many
gigabytes reads its header only.
"""

import math
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast, overload

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

from engine.checks import shown
from engine.errors import GGUFError
from engine.gguf.header import DAMAGED, Header, MetadataValue, read_header
from engine.gguf.pages import MappedFile

__all__ = ["GGUF", "MetadataValue", "GGUFTensor", "read_gguf"]

IntKind = Literal["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "int"]
FloatKind = Literal["f32", "f64"]
ArrayKind = Literal[
    "u8[]", "i8[]", "u16[]", "i16[]", "u32[]", "i32[]", "u64[]", "i64[]", "int[]", "f32[]", "f64[]", "bool[]"
]
Array = np.ndarray[Any, np.dtype[Any]]
Number = int | float
Default = TypeVar("Default")

_INTS = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")
_ALIASES = {"int": _INTS, "int[]": tuple(f"{kind}[]" for kind in _INTS)}


@dataclass(frozen=True, eq=False, slots=True)
class GGUFTensor:
    """One tensor of a file.

    ``shape`` is in NumPy order, outermost first (the reverse of the file's). ``data`` is a read-only uint8 view of
    shape [nbytes] over the mapping, which lives as long as any such view; it starts at byte ``offset`` of ``path`` and
    is aligned only as far as the file's alignment guarantees.
    """

    name: str
    type: T
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path
    data: np.ndarray[Any, np.dtype[np.uint8]] = field(repr=False)


@dataclass(frozen=True, eq=False, slots=True)
class GGUF:
    """A checked GGUF file.

    Scalars in ``metadata`` are int, float, bool or str; arrays of numbers are read-only NumPy arrays, arrays of
    strings lists. ``kinds`` gives each key's declared type (``"u32"``, ``"str[]"``, …). For a split file ``path`` and
    ``metadata`` are the first part's, ``tensors`` those of all parts, ``files`` the mapped parts in order, and
    ``n_bytes`` the bytes of all tensors.
    """

    path: Path
    version: int
    alignment: int
    metadata: dict[str, MetadataValue]
    kinds: dict[str, str]
    offsets: dict[str, int] = field(repr=False)
    tensors: dict[str, GGUFTensor] = field(repr=False)
    files: tuple[MappedFile, ...] = field(default=(), repr=False)

    @property
    def n_bytes(self) -> int:
        """Bytes of weights, padding not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raises the GGUFError of metadata ``key``, with its byte position in the file."""
        raise GGUFError(self.path, shown(key), self.offsets.get(key), problem)

    @overload
    def require(self, key: str, kind: IntKind, lo: Number = ..., hi: Number = ...) -> int: ...
    @overload
    def require(self, key: str, kind: FloatKind, lo: Number = ..., hi: Number = ...) -> float: ...
    @overload
    def require(self, key: str, kind: Literal["bool"]) -> bool: ...
    @overload
    def require(self, key: str, kind: Literal["str"]) -> str: ...
    @overload
    def require(self, key: str, kind: Literal["str[]"], *, n: int | None = ...) -> list[str]: ...
    @overload
    def require(
        self, key: str, kind: ArrayKind, lo: Number = ..., hi: Number = ..., *, n: int | None = ...
    ) -> Array: ...

    def require(
        self, key: str, kind: str, lo: Number = -math.inf, hi: Number = math.inf, *, n: int | None = None
    ) -> MetadataValue:
        """The value of ``key``, which must exist and be declared exactly as ``kind``; raises GGUFError.

        ``kind`` is a GGUF type (``"u32"``, ``"f32"``, ``"bool"``, ``"str"``, …), such a type with ``[]`` for an array,
        or ``"int"`` / ``"int[]"`` for any integer type. Numbers, or every element of an array of numbers, must lie in
        lo..hi, both included; a float scalar must be finite. ``n`` is the number of elements an array must have.
        """
        if key not in self.metadata:
            self.refuse(key, "the key is missing: the file is not a complete model, convert it again")
        value, actual = self.metadata[key], self.kinds[key]
        if actual not in _ALIASES.get(kind, (kind,)):
            self.refuse(key, f"is of type {actual} instead of {kind}: convert the model again")
        if isinstance(value, (list, np.ndarray)) and n is not None and len(value) != n:
            self.refuse(key, f"has {len(value)} elements instead of {n}: convert the model again")
        if isinstance(value, float) and not math.isfinite(value):
            self.refuse(key, f"is {value}, not a finite number: convert the model again")
        if isinstance(value, (int, float)) and not lo <= value <= hi:
            self.refuse(key, f"is {value}, outside {lo} to {hi}: convert the model again")
        if isinstance(value, np.ndarray) and (lo > -math.inf or hi < math.inf):
            bad = np.flatnonzero(~((value >= lo) & (value <= hi)))
            if bad.size:
                index = int(bad[0])
                self.refuse(key, f"element {index} is {value[index]}, outside {lo} to {hi}: convert the model again")
        return value

    @overload
    def get(self, key: str, kind: IntKind, default: Default, lo: Number = ..., hi: Number = ...) -> int | Default: ...
    @overload
    def get(
        self, key: str, kind: FloatKind, default: Default, lo: Number = ..., hi: Number = ...
    ) -> float | Default: ...
    @overload
    def get(self, key: str, kind: Literal["bool"], default: Default) -> bool | Default: ...
    @overload
    def get(self, key: str, kind: Literal["str"], default: Default) -> str | Default: ...
    @overload
    def get(
        self, key: str, kind: Literal["str[]"], default: Default, *, n: int | None = ...
    ) -> list[str] | Default: ...
    @overload
    def get(
        self, key: str, kind: ArrayKind, default: Default, lo: Number = ..., hi: Number = ..., *, n: int | None = ...
    ) -> Array | Default: ...

    def get(
        self,
        key: str,
        kind: str,
        default: Default,
        lo: Number = -math.inf,
        hi: Number = math.inf,
        *,
        n: int | None = None,
    ) -> MetadataValue | Default:
        """The value of ``key``, checked like ``require`` does, or ``default`` (unchecked) when the file does not have it.

        Raises GGUFError when the key exists but its type, length or range is wrong.
        """
        if key not in self.metadata:
            return default
        return self.require(cast(Any, key), cast(Any, kind), lo, hi, n=n)


def read_gguf(path: str | os.PathLike[str], *, check_tensors: bool = False) -> GGUF:
    """Opens the GGUF file at ``path``; if that is one part of a split file, opens all parts.

    ``check_tensors`` also reads every weight once and refuses block scales that are not finite or absurdly large.
    Raises GGUFError. The mapping shows later changes of the file: do not overwrite a model while it is in use.
    """
    given = Path(path)
    header, mapping = _open(given)
    parts = [(given, header, mapping)]
    count = _split_value(given, header, "split.count", "u16", 0)
    if count > 1:
        paths = _part_paths(given, header, count)
        parts = [parts[0] if part == given else (part, *_open(part)) for part in paths]
        _check_parts(parts, count)
    tensors: dict[str, GGUFTensor] = {}
    for part, header, mapping in parts:
        contents = np.frombuffer(mapping, np.uint8)
        for entry in header.tensors:
            if entry.name in tensors:
                problem = f"is also in {tensors[entry.name].path.name}: fetch the parts of one and the same model"
                raise GGUFError(part, f"tensor '{shown(entry.name)}'", entry.field_offset, problem)
            start = header.data_start + entry.offset
            data = contents[start : start + entry.nbytes]
            tensor = GGUFTensor(entry.name, entry.type, entry.shape, start, entry.nbytes, part, data)
            tensors[entry.name] = tensor
            if check_tensors:
                _check_scales(tensor)
        if mapping.size() != len(mapping):
            raise GGUFError(part, "file", None, "its size changed while it was read: wait until it is complete")
    first, header, _ = parts[0]
    files = tuple(mapping for _, _, mapping in parts)
    return GGUF(first, header.version, header.alignment, header.metadata, header.kinds, header.offsets, tensors, files)


def _open(path: Path) -> tuple[Header, MappedFile]:
    """Maps the file at ``path`` and reads its header."""
    try:
        # before open(), which would wait for a writer on a named pipe
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise GGUFError(path, "file", None, "it is a directory: give the path of a .gguf file in it")
        if not stat.S_ISREG(mode):
            raise GGUFError(path, "file", None, "it is a device or a pipe: give the path of a .gguf file on disk")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise GGUFError(path, "file", None, "it is empty: download it again")
            mapping = MappedFile(path, file.fileno(), size)
    except FileNotFoundError:
        raise GGUFError(path, "file", None, "it does not exist: check the path") from None
    except PermissionError:
        raise GGUFError(path, "file", None, "it may not be read: check its permissions") from None
    except (OSError, ValueError, OverflowError) as error:
        raise GGUFError(path, "file", None, f"it cannot be opened ({error}): check the path") from None
    return read_header(path, mapping), mapping


_PART_NAME = re.compile(r"(?is)(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.gguf)")


def _split_value(path: Path, header: Header, key: str, kind: str, default: int | None) -> int:
    """The value of a ``split.`` key, a count that must not be negative."""
    if key not in header.metadata and default is not None:
        return default
    value = header.metadata.get(key)
    if header.kinds.get(key) != kind or not isinstance(value, int) or value < 0:
        found = f"is {shown(value)} of type {header.kinds[key]}" if key in header.metadata else "is missing"
        problem = f"{found}, not a count of type {kind}: split the model again"
        raise GGUFError(path, key, header.offsets.get(key), problem)
    return value


def _part_paths(path: Path, header: Header, count: int) -> list[Path]:
    """The paths of all parts, derived from the name of one; only the number of parts comes from the file."""
    number = _split_value(path, header, "split.no", "u16", None) + 1
    expected = f"-{number:05d}-of-{count:05d}.gguf"
    match = _PART_NAME.fullmatch(path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number, count):
        problem = (
            f"this is part {number} of {count}, whose name must end in {expected}: give all parts their names back"
        )
        raise GGUFError(path, "split.no", header.offsets["split.no"], problem)
    names = [f"{match['stem']}-{i + 1:05d}-of-{count:05d}{match['suffix']}" for i in range(count)]
    for name in names:
        if not os.path.lexists(path.with_name(name)):
            problem = f"the model has {count} parts and {name} is not beside this one: download all parts"
            raise GGUFError(path, "split.count", header.offsets["split.count"], problem)
    return [path.with_name(name) for name in names]


def _check_parts(parts: list[tuple[Path, Header, MappedFile]], count: int) -> None:
    """The parts agree: their numbers, and every key of a later part with the first part's."""
    first_path, first, _ = parts[0]
    total = _split_value(first_path, first, "split.tensors.count", "i32", None)
    for index, (path, header, _) in enumerate(parts):
        for key, kind, expected in (("split.no", "u16", index), ("split.count", "u16", count)):
            found = _split_value(path, header, key, kind, None)
            if found != expected:
                problem = f"is {found} instead of {expected}: fetch the parts of one and the same model"
                raise GGUFError(path, key, header.offsets[key], problem)
        for key in header.metadata.keys() - {"split.no"}:
            same_kind = header.kinds[key] == first.kinds.get(key)
            if not same_kind or not _same(header.metadata[key], first.metadata[key]):
                problem = "differs from the first part: fetch the parts of one and the same model"
                raise GGUFError(path, shown(key), header.offsets[key], problem)
    n_tensors = sum(len(header.tensors) for _, header, _ in parts)
    if n_tensors != total:
        problem = f"is {total} but the parts hold {n_tensors} tensors: fetch the parts of one and the same model"
        raise GGUFError(first_path, "split.tensors.count", first.offsets["split.tensors.count"], problem)


def _same(a: MetadataValue, b: MetadataValue) -> bool:
    """Equal values of the same declared type; NaN, which no model needs, differs from itself."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return a == b


class _Scale(NamedTuple):
    """A float inside a block, compared by its bits: without the sign, larger bits are larger values, then inf, NaN."""

    name: str
    offset: int  # in the block, bytes
    dtype: str  # an unsigned integer as wide as the float
    inf: int  # bits of infinity; all above are NaN
    limit: int  # bits of the largest value accepted


MAX_SCALE = 2**14  # no weight of a real model comes near it


def _half(name: str, offset: int) -> _Scale:
    return _Scale(name, offset, "<u2", 0x7C00, 0x7400)  # limit: 2^14


def _element(dtype: str, inf: int) -> tuple[_Scale, ...]:
    return (_Scale("value", 0, dtype, inf, inf - 1),)


_D = (_half("d", 0),)
SCALES: dict[T, tuple[_Scale, ...]] = {
    **dict.fromkeys((T.Q4_0, T.Q5_0, T.Q8_0, T.IQ4_NL, T.IQ4_XS, T.IQ1_S, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S), _D),
    **dict.fromkeys((T.IQ3_XXS, T.IQ3_S, T.Q1_0), _D),
    **dict.fromkeys((T.Q4_1, T.Q5_1), (_half("d", 0), _half("m", 2))),
    **dict.fromkeys((T.Q4_K, T.Q5_K), (_half("d", 0), _half("dmin", 2))),
    T.Q2_K: (_half("d", 80), _half("dmin", 82)),
    T.Q3_K: (_half("d", 108),),
    T.Q6_K: (_half("d", 208),),
    T.TQ1_0: (_half("d", 52),),
    T.TQ2_0: (_half("d", 64),),
    T.IQ1_M: (_half("d", 48),),  # in the high nibbles of four u16
    T.MXFP4: (_Scale("e", 0, "u1", 0xFF, 142),),  # 2^(e - 128), 0xFF is NaN
    T.F16: _element("<u2", 0x7C00),
    T.BF16: _element("<u2", 0x7F80),
    T.F32: _element("<u4", 0x7F80_0000),
    T.F64: _element("<u8", 0x7FF0_0000_0000_0000),
}
_CHUNK = 1 << 18  # blocks checked together: bounds the temporary arrays to a few MiB


def _check_scales(tensor: GGUFTensor) -> None:
    """Refuses floats that are not finite, and block scales above MAX_SCALE (NVFP4 and integers cannot have either)."""
    _, block_bytes = GGML_QUANT_SIZES[tensor.type]
    blocks = tensor.data.reshape(-1, block_bytes)
    for scale in SCALES.get(tensor.type, ()):
        width = np.dtype(scale.dtype).itemsize
        sign = 0 if width == 1 else 1 << (8 * width - 1)
        for start in range(0, len(blocks), _CHUNK):
            chunk = blocks[start : start + _CHUNK]
            if tensor.type == T.IQ1_M:
                s = np.ascontiguousarray(chunk[:, 48:56]).view("<u2")
                bits = s[:, 0] >> 12 | s[:, 1] >> 8 & 0xF0 | s[:, 2] >> 4 & 0xF00 | s[:, 3] & 0xF000
            else:
                bits = np.ascontiguousarray(chunk[:, scale.offset : scale.offset + width]).view(scale.dtype)[:, 0]
            magnitude = bits & np.array(~sign & (1 << 8 * width) - 1, scale.dtype)
            bad = np.flatnonzero(magnitude > scale.limit)
            if bad.size:
                index = int(bad[0])
                what = f"larger than {MAX_SCALE}" if magnitude[index] < scale.inf else "not a finite number"
                label = f"tensor '{shown(tensor.name)}' block {start + index} {scale.name}"
                at = tensor.offset + (start + index) * block_bytes + scale.offset
                raise GGUFError(tensor.path, label, at, f"is {what}; {DAMAGED}")
