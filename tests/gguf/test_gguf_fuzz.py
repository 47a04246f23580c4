"""Whatever the bytes, the loader answers within two seconds with a checked model or one GGUFError, and allocates little.

Three sources of files: valid ones (most of them by ``gguf.GGUFWriter``) with header fields overwritten, removed,
repeated or inserted and with bytes flipped, cut or added; files put together from good and bad pieces of the format;
and one damaged part of a split model. A fourth test draws valid files only and wants every value back.
"""

import time
import tracemalloc
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T
from hypothesis import HealthCheck, event, given
from hypothesis import strategies as st

from engine.errors import GGUFError
from engine.gguf.file import GGUF, read_gguf
from tests import ggufs
from tests.gguf.test_gguf_corpus import GOOD
from tests.ggufs import SMALL, KeyValue, Spec, key_value, small_writer
from tests.tiers import examples

SECONDS = 2.0
# memory that may be allocated for a file of n bytes: buffers, messages and Python's own modules, and per byte the worst
# that a valid file causes, strings of two bytes that become objects of 51
BASE_BYTES, BYTES_PER_BYTE = 256 << 10, 32

SPLIT = ggufs.written(small_writer(split_max_tensors=2))
VALID = [SMALL, ggufs.patch(SMALL, "version", 2), SPLIT[0], *GOOD.values()]
FIELDS = [ggufs.fields(data) for data in VALID]
INTERESTING = [0, 1, 2, 3, 4, 8, 9, 12, 13, 31, 32, 33, 63, 64, 255, 256, 65_535, 65_536]
INTERESTING += [2**bits + d for bits in (20, 24, 26, 31, 32, 40, 48, 60, 61, 62, 63, 64) for d in (-1, 0, 1)]

numbers = st.sampled_from(INTERESTING) | st.integers(0, 2**64 - 1) | st.integers(0, 300)
fuzzed = examples(500, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


def assert_sound(model: GGUF) -> None:
    """What must hold for every model that the loader accepts."""
    for key, value in model.metadata.items():
        assert key
        if isinstance(value, np.ndarray):
            assert value.flags.aligned
            assert not value.flags.writeable
            assert value.dtype.isnative
        elif isinstance(value, list):
            assert all(isinstance(item, str) for item in value)
    ends: dict[Path, list[tuple[int, int]]] = {}
    for name, tensor in model.tensors.items():
        assert 1 <= len(name.encode()) <= 63
        assert 1 <= len(tensor.shape) <= 4
        assert min(tensor.shape) >= 1
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        assert tensor.shape[-1] % block == 0
        *_, n = accumulate(tensor.shape, lambda a, b: a * b)
        assert tensor.nbytes == n // block * block_bytes
        assert tensor.data.shape == (tensor.nbytes,)
        assert tensor.offset % model.alignment == 0 or len({t.path for t in model.tensors.values()}) > 1
        assert tensor.data.tobytes() == tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        ends.setdefault(tensor.path, []).append((tensor.offset, tensor.offset + tensor.nbytes))
    for ranges in ends.values():
        ranges.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


def assert_answered(path: Path, n_bytes: int, check_tensors: bool) -> GGUF | None:
    """Opens ``path``; returns the model, or None if the error meant for users was raised."""
    model = None
    tracemalloc.start()
    begin = time.process_time()
    try:
        model = read_gguf(path, check_tensors=check_tensors)
    except GGUFError as error:
        assert "\n" not in str(error)
        assert error.field.isprintable()
        assert len(str(error)) < 1000
        assert error.offset is None or 0 <= error.offset <= n_bytes
        assert error.path.parent == path.parent
    finally:
        seconds = time.process_time() - begin
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert seconds < SECONDS
    assert peak < BASE_BYTES + BYTES_PER_BYTE * n_bytes
    event("refused" if model is None else "opened")
    if model is not None:
        assert_sound(model)
    return model


@st.composite
def mutations(draw: st.DrawFn, data: bytes, fields: dict[str, ggufs.Field]) -> bytes:
    """A valid file, damaged in its fields and then in its bytes."""
    names = list(fields)
    changed = bytearray(data)
    for name in draw(st.lists(st.sampled_from(names), max_size=3)):
        pos, size = fields[name]
        old = int.from_bytes(data[pos : pos + size], "little")
        new = draw(numbers | st.sampled_from([old + 1, old - 1, old * 2, old + 32, -old]))
        changed[pos : pos + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    header = max(pos + size for pos, size in fields.values())
    operations = ["flip", "cut", "add", "remove field", "repeat field", "insert record"]
    for operation in draw(st.lists(st.sampled_from(operations), max_size=3)):
        pos, size = fields[draw(st.sampled_from(names))]
        at = draw(st.integers(0, min(header + 64, len(changed))))
        if operation == "flip" and at < len(changed):
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif operation == "cut":
            del changed[at:]
        elif operation == "add":
            changed[at:at] = draw(st.binary(min_size=1, max_size=40))
        elif operation == "remove field":
            del changed[pos : pos + size]
        elif operation == "repeat field":
            changed[pos:pos] = data[pos : pos + size]
        elif operation == "insert record":
            changed[24:24] = draw(records.map(lambda record: key_value(*record)))
            changed[16:24] = ((int.from_bytes(changed[16:24], "little") + 1) % 2**64).to_bytes(8, "little")
    return bytes(changed) or b"G"


# pieces of the format, good and bad

RANGES = {kind: (0, 2**bits - 1) for kind, bits in (("u8", 8), ("u16", 16), ("u32", 32), ("u64", 64))}
RANGES |= {kind: (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for kind, bits in (("i8", 8), ("i16", 16), ("i32", 32))}
RANGES |= {"i64": (-(2**63), 2**63 - 1), "bool": (0, 1)}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars: dict[str, st.SearchStrategy[Any]] = {
    **{kind: st.integers(lo, hi) for kind, (lo, hi) in RANGES.items()},
    "f32": st.floats(width=32),
    "f64": st.floats(),
    "str": texts,
}
arrays: dict[str, st.SearchStrategy[Any]] = {f"{kind}[]": st.lists(s, max_size=6) for kind, s in scalars.items()}
typed = st.sampled_from([*scalars, *arrays]).flatmap(
    lambda kind: st.tuples(texts.map("key.{}".format), st.just(kind), {**scalars, **arrays}[kind])
)
bad_records = st.one_of(
    st.tuples(st.just(""), st.just("u8"), st.just(1)),
    st.tuples(st.binary(max_size=6), st.just("str"), st.binary(max_size=6)),
    st.tuples(texts, st.sampled_from(["bool", "array", "u32", "i64"]), st.binary(max_size=9)),
    st.tuples(st.just("words"), st.just("str[]"), st.lists(st.binary(max_size=4), max_size=4)),
    st.tuples(st.just("general.alignment"), st.just("u32"), numbers.map(lambda n: n % 2**32)),
    st.tuples(st.sampled_from(["split.count", "split.no"]), st.just("u16"), st.integers(0, 65_535)),
)
records: st.SearchStrategy[KeyValue] = typed | bad_records


@st.composite
def specs(draw: st.DrawFn, name: str | bytes) -> Spec:
    type_ = draw(st.sampled_from(ggufs.STORED))
    outer = draw(st.lists(st.integers(1, 3), max_size=3))
    spec = Spec(name, (GGML_QUANT_SIZES[type_][0] * draw(st.integers(1, 2)), *outer), type_)
    return Spec(name, spec.dims, type_, np.random.default_rng(0).bytes(ggufs.n_bytes(spec)))


bad_dims = st.lists(numbers.map(lambda n: n % 2**64), max_size=6).map(tuple)
bad_specs = st.builds(Spec, st.binary(max_size=70), bad_dims, st.sampled_from(list(T)), st.just(b"xyz"), numbers)


@given(data=st.data(), index=st.integers(0, len(VALID) - 1), check_tensors=st.booleans())
@fuzzed
def test_damaged_files(data: st.DataObject, index: int, check_tensors: bool, path: Path) -> None:
    contents = data.draw(mutations(VALID[index], FIELDS[index]))
    path.write_bytes(contents)
    assert_answered(path, len(contents), check_tensors)


@given(
    kv=st.lists(typed, max_size=3) | st.lists(records, max_size=5),
    tensors=st.lists(st.text(max_size=3).flatmap(specs) | bad_specs, max_size=4),
    version=st.sampled_from([0, 1, 2, 3, 3, 3, 4, 2**24 * 3]),
    alignment=st.sampled_from([1, 8, 32, 32, 32]),
    check_tensors=st.booleans(),
)
@fuzzed
def test_files_of_good_and_bad_pieces(
    kv: list[KeyValue], tensors: list[Spec], version: int, alignment: int, check_tensors: bool, path: Path
) -> None:
    contents = ggufs.build(kv, tensors, version=version, alignment=alignment)
    path.write_bytes(contents)
    assert_answered(path, len(contents), check_tensors)


@given(data=st.data(), number=st.integers(0, 2), given_part=st.integers(0, 2))
@fuzzed
def test_one_damaged_part(data: st.DataObject, number: int, given_part: int, path: Path) -> None:
    paths = [path.with_name(f"model-{i + 1:05d}-of-00003.gguf") for i in range(3)]
    contents = [*SPLIT]
    contents[number] = data.draw(mutations(SPLIT[number], ggufs.fields(SPLIT[number])))
    for part, part_contents in zip(paths, contents, strict=True):
        part.write_bytes(part_contents)
    assert_answered(paths[given_part], sum(map(len, contents)), check_tensors=False)


@given(
    kv=st.lists(typed, max_size=6, unique_by=lambda record: record[0]),
    tensors=st.lists(texts.filter(bool), max_size=4, unique=True).flatmap(lambda names: st.tuples(*map(specs, names))),
    alignment=st.sampled_from([1, 8, 32, 256]),
    version=st.sampled_from([2, 3]),
    pad_last=st.booleans(),
)
@fuzzed
def test_valid_files_come_back_as_written(
    kv: list[KeyValue], tensors: list[Spec], alignment: int, version: int, pad_last: bool, path: Path
) -> None:
    declared: list[KeyValue] = [*kv, ("general.alignment", "u32", alignment)]
    contents = ggufs.build(declared, tensors, alignment=alignment, version=version, pad_last=pad_last)
    path.write_bytes(contents)
    model = assert_answered(path, len(contents), check_tensors=False)
    assert model is not None
    assert (model.version, model.alignment) == (version, alignment)
    assert list(model.metadata) == [key for key, _, _ in declared]
    for key, kind, expected in declared:
        found = model.metadata[str(key)]
        assert model.kinds[str(key)] == kind
        np.testing.assert_array_equal(found, np.array(expected, found.dtype if isinstance(found, np.ndarray) else None))
    assert {name: tensor.data.tobytes() for name, tensor in model.tensors.items()} == {s.name: s.data for s in tensors}
    for spec in tensors:
        assert model.tensors[str(spec.name)].shape == spec.dims[::-1]


@given(contents=st.binary(min_size=1, max_size=200))
@fuzzed
def test_noise_after_a_good_beginning(contents: bytes, path: Path) -> None:
    contents = SMALL[:8] + contents
    path.write_bytes(contents)
    assert_answered(path, len(contents), check_tensors=False)
