"""The hand-made bad files of llama.cpp's tests/test-gguf.cpp, by their names there, and their good twins."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import GGUFError
from engine.gguf.file import read_gguf
from tests import ggufs
from tests.ggufs import KeyValue, Spec

HUGE = 2**64 - 1
BIG_I8 = 0x7FFF_FFFF_FFFF_FFC0

VALUES = {"f32": 1.5, "f64": -2.25, "bool": 1, "str": "value"}
SCALARS: list[KeyValue] = [
    (f"my_key_{i}", kind, VALUES.get(kind, 7)) for i, kind in enumerate(ggufs.KINDS) if kind != "array"
]
ARRAYS: list[KeyValue] = [(f"{key!s}_array", f"{kind}[]", [value] * 5) for key, kind, value in SCALARS]
KV = SCALARS + ARRAYS


def _dims(index: int, kind: GGMLQuantizationType) -> tuple[int, ...]:
    outer = [(), (3,), (2, 3), (2, 1, 3)][index % 4]
    return (GGML_QUANT_SIZES[kind][0] * (1 + index % 3), *outer)


TENSORS = [Spec(f"my_tensor_{i}", _dims(i, kind), kind) for i, kind in enumerate(ggufs.STORED)]


def aligned(value: int, kind: str = "u32") -> list[KeyValue]:
    return [*KV, ("general.alignment", kind, value)]


BAD_ALIGNMENT = ("general.alignment", f"kv {len(KV)} value")


EMPTY = ggufs.build()
KV_ONLY = ggufs.build(KV)
FULL = ggufs.build(KV, TENSORS)
ALIGNED = ggufs.build(aligned(1), TENSORS, alignment=1)

GOOD = {
    "HEADER_EMPTY": EMPTY,
    "KV_SUCCESS": KV_ONLY,
    "KV_CUSTOM_ALIGN": ggufs.build(aligned(1), alignment=1),
    "TENSORS_SUCCESS": FULL,
    "TENSORS_CUSTOM_ALIGN": ALIGNED,
    "DATA_SUCCESS": FULL + b"trailing bytes",
    "DATA_CUSTOM_ALIGN": ggufs.build(aligned(1 << 12), TENSORS, alignment=1 << 12),
    "DATA_UNPADDED": ggufs.build(KV, TENSORS, pad_last=False),
}


@dataclass(frozen=True)
class Case:
    """A bad file: the field its message must name, the header field whose offset it must give, words of it.

    ``like`` is a valid file whose header is laid out as the bad one's, where that cannot be walked itself.
    """

    data: bytes
    field: str
    where: str
    words: str
    like: bytes | None = None


def patched(good: bytes, where: str, value: int, field: str, words: str) -> Case:
    return Case(ggufs.patch(good, where, value), field, where, words, good)


MISALIGNED = ("tensor 'my_tensor_1' offset", "tensor 1 offset", "not a multiple of the alignment 32")
TOO_LARGE = ("tensor 0 offset", "but the file at")
SQUARE = (1_533_681_985,) * 2  # as I64 more than 2^64 bytes
I8_PAIR = [
    Spec("a", (BIG_I8,), GGMLQuantizationType.I8, data=bytes(32)),
    Spec("b", (BIG_I8,), GGMLQuantizationType.I8, data=b"", offset=BIG_I8),
]
LAST = len(TENSORS) - 1

BAD = {
    "HEADER_BAD_MAGIC": Case(ggufs.build(magic=b"FUGG"), "magic", "magic", "begins with 'FUGG' instead of 'GGUF'"),
    "HEADER_BAD_VERSION_0": Case(ggufs.build(version=0), "version", "version", "no GGUF version 0"),
    "HEADER_BAD_VERSION_1": Case(ggufs.build(version=1), "version", "version", "version 1 is obsolete"),
    "HEADER_BAD_VERSION_FUTURE": Case(ggufs.build(version=4), "version", "version", "version 4 is newer"),
    "HEADER_BAD_N_TENSORS": patched(EMPTY, "n_tensors", HUGE, "n_tensors", f"is {HUGE}, the limit is 65536"),
    "HEADER_BAD_N_KV": patched(EMPTY, "n_kv", HUGE, "n_kv", f"is {HUGE}, the limit is 65536"),
    "KV_BAD_KEY_SIZE": patched(KV_ONLY, "kv 0 key length", HUGE, "key 0", f"{HUGE} bytes, the limit is 65535"),
    "KV_EMPTY_KEY": Case(ggufs.build([("", "u8", 1)]), "key 0", "kv 0 key length", "is empty"),
    "KV_BAD_TYPE": patched(KV_ONLY, "kv 0 type", 13, "my_key_0", "has value type 13"),
    "KV_DUPLICATE_KEY": Case(ggufs.build([*KV, KV[0]]), "my_key_0", f"kv {len(KV)} key length", "appears twice"),
    "KV_BAD_ALIGN": Case(ggufs.build(aligned(13)), *BAD_ALIGNMENT, "is 13, not a power of two"),
    "TENSORS_BAD_NAME_SIZE": Case(
        ggufs.build(KV, [Spec("x" * 64, (32,))]), "tensor 0 name", "tensor 0 name length", "64 bytes, the limit is 63"
    ),
    "TENSORS_BAD_N_DIMS": patched(FULL, "tensor 0 n_dims", 5, "tensor 'my_tensor_0' n_dims", "is 5, not 1 to 4"),
    "TENSORS_BAD_SHAPE": patched(FULL, "tensor 0 dims[0]", -1, "tensor 'my_tensor_0' dims[0]", f"is {HUGE}, not 1 to"),
    "TENSORS_NE_TOO_BIG": Case(
        ggufs.build(KV, [Spec("big", (4 * (2**31 - 1),) * 2, data=b"")]),
        "tensor 'big' dims[1]",
        "tensor 0 dims[1]",
        "elements large",
    ),
    "TENSORS_NBYTES_TOO_BIG": Case(
        ggufs.build(KV, [Spec("big", SQUARE, GGMLQuantizationType.I64, data=b"")]), "tensor 'big'", *TOO_LARGE
    ),
    "TENSORS_BAD_TYPE": patched(FULL, "tensor 0 type", 43, "tensor 'my_tensor_0' type", "type 43 is unknown"),
    "TENSORS_BAD_OFFSET": patched(
        FULL, "tensor 0 offset", HUGE, "tensor 'my_tensor_0' offset", f"is {HUGE}, not a multiple of the alignment 32"
    ),
    "TENSORS_DUPLICATE_NAME": Case(
        ggufs.build(KV, [TENSORS[0], TENSORS[0]]), "tensor 'my_tensor_0'", "tensor 1 name length", "appears twice"
    ),
    "TENSORS_BAD_ALIGN": Case(
        ggufs.build(aligned(13), TENSORS, alignment=13), *BAD_ALIGNMENT, "is 13, not a power of two"
    ),
    "TENSORS_INCONSISTENT_ALIGN": Case(ggufs.build(KV, TENSORS, alignment=1, with_data=False), *MISALIGNED),
    "DATA_NOT_ENOUGH_DATA": Case(
        ggufs.build(KV, TENSORS, pad_last=False)[:-1],
        f"tensor 'my_tensor_{LAST}'",
        f"tensor {LAST} offset",
        "damaged or incomplete: download",
    ),
    "DATA_BAD_ALIGN": Case(
        ggufs.build(aligned(1 << 31), TENSORS), *BAD_ALIGNMENT, f"is {1 << 31}, not a power of two from 1 to 1048576"
    ),
    "DATA_INCONSISTENT_ALIGN": Case(ggufs.build(KV, TENSORS, alignment=1), *MISALIGNED),
    "DATA_MEM_SIZE_OVERFLOW": Case(ggufs.build(KV, I8_PAIR), "tensor 'a'", *TOO_LARGE),
    # younger than the 25 names above
    "KV_WRONG_TYPE_ALIGN": Case(ggufs.build(aligned(32, "i32")), *BAD_ALIGNMENT, "is of type i32 instead of u32"),
    "TENSORS_ZERO_DIM": Case(
        ggufs.build(KV, [Spec("none", (32, 0), data=b"")]),
        "tensor 'none' dims[1]",
        "tensor 0 dims[1]",
        "is 0, not 1 to",
    ),
    "TENSORS_NBYTES_PAD_WRAP": Case(
        ggufs.build(KV, [Spec("wrap", (4, 2**30 - 1, 2**30 + 1), data=b"")]), "tensor 'wrap'", *TOO_LARGE
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_file_opens(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(GOOD[name])
    model = read_gguf(path)
    if not name.startswith("HEADER"):
        for key, kind, value in KV:
            found = model.metadata[str(key)]
            assert model.kinds[str(key)] == kind
            assert (list(found) if isinstance(found, (list, np.ndarray)) else found) == value
    if name.startswith(("TENSORS", "DATA")):
        assert list(model.tensors) == [spec.name for spec in TENSORS]
        for spec in TENSORS:
            tensor = model.tensors[str(spec.name)]
            assert (tensor.type, tensor.shape) == (spec.type, spec.dims[::-1])
            assert tensor.data.tobytes() == bytes(i % 256 for i in range(ggufs.n_bytes(spec)))


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_refused(name: str, tmp_path: Path) -> None:
    case = BAD[name]
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(case.data)
    with pytest.raises(GGUFError) as caught:
        read_gguf(path)
    error = caught.value
    assert (error.path, error.field) == (path, case.field)
    assert case.words in error.problem
    assert str(error) == f"{path}: {case.field} at byte {error.offset}: {error.problem}"
    assert error.offset == ggufs.fields(case.like or case.data)[case.where].pos
