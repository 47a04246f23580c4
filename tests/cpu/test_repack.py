"""Records of eight rows against their definition, byte by byte."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cpu.products import repack as module
from engine.cpu.products.repack import empty_records, fields_of, make_records, pieces_of, repack
from engine.cpu.products.unpack import UNPACK
from engine.gguf.pages import MappedFile
from engine.gguf.quants import FORMATS, Format
from engine.gguf.reader import HostBuffers, Reader
from engine.ops.weight import Weight
from tests.cpu.blocks import QUANTIZED, run
from tests.tiers import examples

EACH = pytest.mark.parametrize("entry", QUANTIZED, ids=lambda f: f.name)


def rows_of(entry: Format, rows: int, units: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, units * entry.block_bytes), dtype=np.uint8)


def record(entry: Format, blocks: np.ndarray) -> bytes:
    """The records of the units of eight blocks uint8 [8, bytes]."""
    found = b""
    for part in range(entry.parts):
        for field in entry.fields:
            length = field.length // entry.parts
            size = {"factors": min(2, length), "scales": 1}.get(field.name, 4)
            start = field.start + part * length
            for at in range(start, start + length, size):
                for block in blocks:
                    piece = block[at : at + size].tobytes()
                    if field.bits:
                        bits = np.unpackbits(np.frombuffer(piece, np.uint8), bitorder="little")
                        # Bit 4 q + c, of weight 4 q + c, becomes bit q of byte c.
                        piece = np.packbits(bits.reshape(8, 4).T, bitorder="little").tobytes()
                    found += piece
    return found


def expected(entry: Format, data: np.ndarray) -> np.ndarray:
    """The records of a matrix, uint8 [groups, bytes]."""
    padded = np.concatenate([data, np.zeros((-len(data) % 8, data.shape[1]), np.uint8)])
    groups = padded.reshape(-1, 8, data.shape[1] // entry.block_bytes, entry.block_bytes)
    records = [b"".join(record(entry, group[:, u]) for u in range(groups.shape[2])) for group in groups]
    return np.frombuffer(b"".join(records), np.uint8).reshape(len(groups), -1)


def test_every_format_has_records() -> None:
    assert set(UNPACK) == {entry.name for entry in QUANTIZED}


@EACH
def test_fields_cover_a_block(entry: Format) -> None:
    """Every byte of a block is in one field, and each unit has the same share of it."""
    covered = [byte for f in entry.fields for byte in range(f.start, f.start + f.length)]
    assert sorted(covered) == list(range(entry.block_bytes))
    assert all(f.length % entry.parts == 0 for f in entry.fields)
    assert all(f.length % 4 == 0 for f in entry.fields if f.bits)
    assert UNPACK[entry.name].record_bytes == 8 * entry.unit_bytes


@EACH
@given(rows=st.integers(1, 20), units=st.integers(1, 3), seed=st.integers(0, 9))
@examples(10, 3)
def test_records(entry: Format, rows: int, units: int, seed: int) -> None:
    data = rows_of(entry, rows, units, seed)
    records = make_records(Weight("w", entry, units * entry.block, data), 1, run)
    assert (records.name, records.format, records.rows, records.columns, records.count) == (
        "w", entry, rows, units * entry.block, 1,
    )  # fmt: skip
    assert np.array_equal(records.data[0], expected(entry, data))


Q4_K = next(entry for entry in FORMATS.values() if entry.name == "Q4_K")


@given(count=st.integers(1, 3), rows=st.integers(1, 9))
@examples(20)
def test_stacked_matrices_are_padded_alone(count: int, rows: int) -> None:
    data = rows_of(Q4_K, count * rows, 2)
    records = make_records(Weight("w", Q4_K, 512, data), count, run)
    assert records.rows == rows
    for e in range(count):
        assert np.array_equal(records.data[e], expected(Q4_K, data[e * rows : (e + 1) * rows]))


@given(count=st.integers(1, 3), half=st.integers(1, 9))
@examples(20)
def test_halves_of_stacked_matrices(count: int, half: int) -> None:
    """The gate and up matrices of experts that a file stores together."""
    data = rows_of(Q4_K, count * 2 * half, 1)
    for part in Weight("w", Q4_K, 256, data).halves(2 * half):
        records = make_records(part, count, run)
        own = part.part(0, part.rows)
        assert records.rows == half
        for e in range(count):
            assert np.array_equal(records.data[e], expected(Q4_K, own[e * half : (e + 1) * half]))
        plain = make_records(replace(part, data=own, first=0, count=0, pitch=0), count, run)
        assert np.array_equal(plain.data, records.data)


@given(cuts=st.lists(st.integers(0, 6), max_size=3))
@examples(20)
def test_ranges_of_groups(cuts: list[int]) -> None:
    """Each range writes its own groups, and all of their bytes."""
    data = rows_of(Q4_K, 2 * 19, 2)
    whole = make_records(Weight("w", Q4_K, 512, data), 2, run).data
    parts = np.full(whole.shape, 255, np.uint8)
    ends = [0, *sorted(cuts), 6]
    for first, last in zip(ends, ends[1:], strict=False):
        before = parts.copy().reshape(6, -1)
        repack(data, fields_of(Q4_K), Q4_K.block_bytes, 0, 19, 19, parts, first, last)
        after = parts.reshape(6, -1)
        assert np.array_equal(after[:first], before[:first])
        assert np.array_equal(after[last:], before[last:])
    assert np.array_equal(parts, whole)


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 40)),
    half=st.sampled_from([0, 1, 2]),
    mapped=st.booleans(),
    piece=st.integers(1, 3),
    n_threads=st.integers(1, 3),
)
@examples(30, 6)
def test_records_that_threads_fill(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: tuple[int, int],
    half: int,
    mapped: bool,
    piece: int,
    n_threads: int,
) -> None:
    """FilePiece by piece, from a file or from memory: those of the whole matrix."""
    count, rows = sizes
    data = rows_of(Q4_K, 2 * count * rows, 2)
    source = data
    if mapped:
        path = tmp_path_factory.mktemp("rows") / "file"
        path.write_bytes(data.tobytes())
        with path.open("rb") as file:
            source = np.frombuffer(MappedFile(path, file.fileno(), data.nbytes), np.uint8).reshape(data.shape)
    weight = Weight("w", Q4_K, 512, source, stack=count)
    if half < 2:
        weight = weight.halves(2 * rows)[half]
    records = empty_records(weight, count)
    records.data[:] = 0xEE
    reader = Reader(n_threads, HostBuffers())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece * 8 * data.shape[1] + 5)
        reader.add(pieces_of(weight, records))
    reader.finish()
    chosen = data.reshape(count, 2, rows, -1)[:, half : half + 1] if half < 2 else data
    for found, matrix in zip(records.data, chosen.reshape(count, -1, data.shape[1]), strict=True):
        assert np.array_equal(found, expected(Q4_K, matrix))


@given(count=st.integers(1, 4), half=st.sampled_from([0, 1, 2]), first=st.integers(0, 50), n=st.integers(0, 50))
def test_stretches_of_rows(count: int, half: int, first: int, n: int) -> None:
    """The rows of a part, without copies, and as few arrays as there are runs of adjacent rows."""
    data = rows_of(Q4_K, 10 * count, 1)
    weight = Weight("w", Q4_K, 256, data, stack=count)
    if half < 2:
        weight = weight.halves(10)[half]
    found = weight.stretches(first, first + n)
    assert np.array_equal(np.concatenate([*found, data[:0]]), weight.part(first, first + n))
    assert all(np.shares_memory(stretch, data) for stretch in found if stretch.size)
    assert len(found) <= (1 if half == 2 else n // 5 + 2)
