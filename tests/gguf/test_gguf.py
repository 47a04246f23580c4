"""The loader against ``gguf``'s own reader and writer, and one test for each thing it must refuse."""

import gc
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

import engine.gguf.file as loader
from engine.errors import GGUFError
from engine.gguf import header as gguf_header
from engine.gguf.file import GGUF, read_gguf
from tests import ggufs
from tests.conftest import REPOSITORY, shared_model
from tests.ggufs import SMALL, KeyValue, Spec, refused, small_writer

BUNDLED = sorted((REPOSITORY / "engine" / "data").glob("*.gguf"))
SHARED = [
    "pycoder-hybrid-mtp-Q4_K_M.gguf",
    "pycoder-moe-mtp-Q4_K_M.gguf",
    "pycoder-gemma4-Q4_K_M.gguf",
    "pycoder-gemma4-assistant-Q4_K_M.gguf",
]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[bytes], GGUF]:
    def open_bytes(data: bytes, **options: Any) -> GGUF:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return read_gguf(path, **options)

    return open_bytes


def assert_equal_to_reference(model: GGUF, path: Path) -> None:
    """Compares with ``gguf.GGUFReader``, for files that are known to be good."""
    reference = gguf.GGUFReader(path)
    fields = {key: value for key, value in reference.fields.items() if not key.startswith("GGUF.")}
    assert list(model.metadata) == list(fields)
    for key, value in fields.items():
        contents, found = value.contents(), model.metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == contents
        kind = value.types[-1].name.lower().replace("uint", "u").replace("int", "i").replace("float", "f")
        assert model.kinds[key] == kind.replace("string", "str") + "[]" * (len(value.types) - 1)
    assert list(model.tensors) == [tensor.name for tensor in reference.tensors]
    for expected in reference.tensors:
        tensor = model.tensors[expected.name]
        assert tensor.type == expected.tensor_type
        assert tensor.shape == tuple(int(n) for n in reversed(expected.shape))
        assert (tensor.offset, tensor.nbytes) == (expected.data_offset, expected.n_bytes)
        assert tensor.data.shape == (tensor.nbytes,)
        assert tensor.data.tobytes() == expected.data.tobytes()
    assert model.alignment == reference.alignment
    assert model.n_bytes == sum(int(tensor.n_bytes) for tensor in reference.tensors)


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.name)
def test_bundled_models_equal_the_reference_reader(path: Path) -> None:
    assert_equal_to_reference(read_gguf(path, check_tensors=True), path)


@pytest.mark.parametrize("name", SHARED)
def test_shared_models_equal_the_reference_reader(name: str) -> None:
    path = shared_model(name)
    assert_equal_to_reference(read_gguf(path, check_tensors=True), path)


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_equal_the_reference_reader(version: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(ggufs.patch(SMALL, "version", version))
    model = read_gguf(str(path))
    assert model.version == version
    assert_equal_to_reference(model, path)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_declared_alignment(alignment: int, tmp_path: Path) -> None:
    writer = small_writer()
    writer.add_custom_alignment(alignment)
    path = tmp_path / "model.gguf"
    path.write_bytes(ggufs.written(writer)[0])
    assert_equal_to_reference(read_gguf(path), path)


def test_order_of_tensors_in_the_data_is_free(opened: Callable[[bytes], GGUF]) -> None:
    specs = [Spec("second", (8,), offset=32), Spec("first", (8,), offset=0)]
    model = opened(ggufs.build((), specs))
    assert [tensor.offset % 64 for tensor in model.tensors.values()] == [model.tensors["first"].offset % 64 ^ 32] + [
        model.tensors["first"].offset % 64
    ]


# rule 1: size, magic, version


@pytest.mark.parametrize("size", range(1, 24))
def test_file_shorter_than_a_header(size: int, tmp_path: Path) -> None:
    error = refused(SMALL[:size], tmp_path)
    assert error.field == ("magic" if size < 4 else "header")


@pytest.mark.parametrize(
    ("begin", "advice"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"PK\x03\x04" + bytes(40), "PyTorch"),
        (b"tjgg" + bytes(40), "GGJT"),
        (b"\x1b[2J" + bytes(40), r"\x1b[2J"),
    ],
)
def test_other_file_formats_are_recognized(begin: bytes, advice: str, tmp_path: Path) -> None:
    assert advice in refused(begin, tmp_path).problem


@pytest.mark.parametrize("version", [2, 3])
def test_byte_swapped_file(version: int, tmp_path: Path) -> None:
    error = refused(b"GGUF" + version.to_bytes(4, "big") + bytes(32), tmp_path)
    assert (error.field, error.offset) == ("version", 4)
    assert "big-endian" in error.problem


# rule 2: counts before loops and allocations


@pytest.mark.parametrize("name", ["n_kv", "n_tensors"])
@pytest.mark.parametrize("count", [100, 65_536, 65_537, 2**32, 2**63, 2**64 - 1])
def test_counts_that_the_file_cannot_hold(name: str, count: int, tmp_path: Path) -> None:
    error = refused(ggufs.patch(ggufs.build((), ()), name, count), tmp_path)
    assert (error.field, error.offset) == (name, ggufs.fields(SMALL)[name].pos)


# rule 3: every read bounded


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = ggufs.build([("a", "str", "text"), ("b", "u32[]", [1, 2]), ("c", "str[]", ["x", "yz"])], [Spec("t", (8,))])
    for size in range(len(data)):
        if size:
            refused(data[:size], tmp_path)


# rule 4: keys and values


@pytest.mark.parametrize(
    ("record", "field", "words"),
    [
        (("k" * 65_536, "u8", 1), "key 0", "the limit is 65535"),
        ((b"\xff\xfe", "u8", 1), "key 0", "is not UTF-8"),
        (("text", "str", b"a\xc3"), "text", "is not UTF-8"),
        (("texts", "str[]", ["fine", b"\xed\xa0\x80"]), "texts[1]", "is not UTF-8"),
        (("flag", "bool", 2), "flag[0]", "a bool of 2"),
        (("flags", "bool[]", [0, 1, 255]), "flags[2]", "a bool of 255"),
        (("\x1b[31mred", "bool", 2), r"\x1b[31mred[0]", "a bool of 2"),
    ],
)
def test_bad_keys_and_values(record: KeyValue, field: str, words: str, tmp_path: Path) -> None:
    error = refused(ggufs.build([record]), tmp_path)
    assert error.field == field
    assert words in error.problem
    assert error.offset is not None


ARRAY = ggufs.build([("list", "u32[]", [1, 2, 3]), ("words", "str[]", ["one", "two"])])


@pytest.mark.parametrize(
    ("name", "value", "field", "words"),
    [
        ("kv 0 element type", 9, "list", "array of arrays"),
        ("kv 0 element type", 13, "list", "value type 13"),
        ("kv 0 count", 2**62, "list", "declares 4611686018427387904 elements"),
        ("kv 1 count", 2**63, "words", "declares 9223372036854775808 elements"),
        ("kv 1 value[1] length", 2**40, "words[1]", "the limit is 67108864"),
        ("kv 1 value[1] length", 2**20, "words[1]", "needs 1048576 bytes"),
    ],
)
def test_bad_arrays(name: str, value: int, field: str, words: str, tmp_path: Path) -> None:
    error = refused(ggufs.patch(ARRAY, name, value), tmp_path)
    assert error.field == field
    assert words in error.problem


def test_limits_on_large_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_VALUE_BYTES", 8)
    assert "9 bytes, the limit is 8" in refused(ggufs.build([("s", "str", "123456789")]), tmp_path).problem
    assert "12 bytes, the limit is 8" in refused(ARRAY, tmp_path).problem
    assert "the limit is 8" in refused(ggufs.build([("s", "str[]", ["", "123456789"])]), tmp_path).problem
    monkeypatch.setattr(gguf_header, "MAX_STRINGS", 3)
    error = refused(ggufs.build([("a", "str[]", ["1", "2"]), ("b", "str[]", ["3", "4"])]), tmp_path)
    assert (error.field, "more than 3" in error.problem) == ("b", True)


# rule 5: alignment


@pytest.mark.parametrize(
    ("kind", "value"), [("u32", 0), ("u32", 48), ("u32", 1 << 21), ("u32", 1 << 31), ("u64", 32), ("str", "32")]
)
def test_bad_alignment(kind: str, value: Any, tmp_path: Path) -> None:
    error = refused(ggufs.build([("general.alignment", kind, value)]), tmp_path)
    assert error.field == "general.alignment"


# rule 6: tensors


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        (Spec("", (8,)), "tensor 0 name", "is empty"),
        (Spec("n" * 64, (8,)), "tensor 0 name", "the limit is 63"),
        (Spec(b"\xff", (8,)), "tensor 0 name", "is not UTF-8"),
        (Spec("t", ()), "tensor 't' n_dims", "is 0, not 1 to 4"),
        (Spec("t", (1,) * 5), "tensor 't' n_dims", "is 5, not 1 to 4"),
        (Spec("t", (8, 0), data=b""), "tensor 't' dims[1]", "is 0"),
        (Spec("t", (2**63,), data=b""), "tensor 't' dims[0]", "not 1 to 2^63 - 1"),
        (Spec("t", (2**32, 2**31), data=b""), "tensor 't' dims[1]", "9223372036854775808 elements large"),
        (Spec("t", (48,), T.Q8_0), "tensor 't' dims[0]", "48 elements, not a multiple of 32, the block of Q8_0"),
        (Spec("t", (255, 256), T.Q4_K), "tensor 't' dims[0]", "255 elements, not a multiple of 256"),
        (Spec("t", (32,), T.Q8_1), "tensor 't' type", "Q8_1 (type 9) is not a format that files store"),
    ],
)
def test_bad_tensors(spec: Spec, field: str, words: str, tmp_path: Path) -> None:
    error = refused(ggufs.build((), [spec]), tmp_path)
    assert error.field == field
    assert words in error.problem
    assert error.offset is not None


@pytest.mark.parametrize(
    ("number", "words"),
    [(4, "Q4_2"), (31, "Q4_0_4_4"), (38, "IQ4_NL_8_8"), (42, "type 42"), (2**31, "type 2147483648")],
)
def test_unknown_and_removed_types_are_named(number: int, words: str, tmp_path: Path) -> None:
    error = refused(ggufs.patch(ggufs.build((), [Spec("t", (32,))]), "tensor 0 type", number), tmp_path)
    assert error.field == "tensor 't' type"
    assert words in error.problem


# rule 7: where the data lies

PAIR = (Spec("a", (8,)), Spec("b", (8,)))


@pytest.mark.parametrize(
    ("offset", "words"),
    [(33, "not a multiple"), (0, "overlaps tensor 'a'"), (64, "a gap of 32 bytes after tensor 'a'"), (96, "ends at")],
)
def test_bad_offsets(offset: int, words: str, tmp_path: Path) -> None:
    data = ggufs.patch(ggufs.build((), PAIR) + bytes(40), "tensor 1 offset", offset)
    error = refused(data, tmp_path)
    assert error.field.startswith("tensor 'b'")
    assert error.offset == ggufs.fields(data)["tensor 1 offset"].pos
    assert words in error.problem


def test_gap_before_the_first_tensor(tmp_path: Path) -> None:
    error = refused(ggufs.build((), [Spec("a", (8,), offset=32)]) + bytes(64), tmp_path)
    assert "a gap of 32 bytes after the header" in error.problem


# rule 8: typed getters

VALUES: list[KeyValue] = [
    ("n", "u32", 7),
    ("i", "i8", -3),
    ("x", "f32", 0.5),
    ("nan", "f32", float("nan")),
    ("inf", "f64", float("inf")),
    ("yes", "bool", 1),
    ("name", "str", "llama"),
    ("words", "str[]", ["a", "b"]),
    ("scores", "f32[]", [0.0, float("nan"), 2.0]),
    ("types", "i32[]", [1, 6, 3]),
]


def test_getters(opened: Callable[[bytes], GGUF]) -> None:
    model = opened(ggufs.build(VALUES))
    assert model.require("n", "u32", 1, 7) == 7
    assert model.require("i", "int", -3, 0) == -3
    assert model.require("x", "f32", 0, 1) == 0.5
    assert model.require("yes", "bool") is True
    assert model.require("name", "str") == "llama"
    assert model.require("words", "str[]", n=2) == ["a", "b"]
    assert model.require("types", "i32[]", 1, 6, n=3).dtype == np.int32
    assert model.require("types", "int[]").tolist() == [1, 6, 3]
    assert np.isnan(model.require("scores", "f32[]")[1])
    assert model.get("n", "u32", None) == 7
    assert model.get("absent", "u32", 5, 10, 20) == 5
    assert model.get("absent", "str[]", None) is None


@pytest.mark.parametrize(
    ("key", "kind", "options", "words"),
    [
        ("absent", "u32", {}, "is missing"),
        ("n", "i32", {}, "is of type u32 instead of i32"),
        ("n", "u32[]", {}, "is of type u32 instead of u32[]"),
        ("n", "f32", {}, "is of type u32 instead of f32"),
        ("yes", "u8", {}, "is of type bool instead of u8"),
        ("yes", "int", {}, "is of type bool instead of int"),
        ("types", "u8[]", {}, "is of type i32[] instead of u8[]"),
        ("scores", "int[]", {}, "is of type f32[] instead of int[]"),
        ("n", "u32", {"lo": 8}, "is 7, outside 8 to inf"),
        ("n", "u32", {"lo": 1, "hi": 6}, "is 7, outside 1 to 6"),
        ("nan", "f32", {}, "is nan, not a finite number"),
        ("inf", "f64", {}, "is inf, not a finite number"),
        ("words", "str[]", {"n": 3}, "has 2 elements instead of 3"),
        ("types", "i32[]", {"n": 2}, "has 3 elements instead of 2"),
        ("types", "i32[]", {"lo": 1, "hi": 5}, "element 1 is 6, outside 1 to 5"),
        ("scores", "f32[]", {"lo": 0}, "element 1 is nan"),
    ],
)
def test_getters_refuse(
    key: str, kind: Any, options: dict[str, Any], words: str, opened: Callable[[bytes], GGUF]
) -> None:
    data = ggufs.build(VALUES)
    model = opened(data)
    with pytest.raises(GGUFError) as caught:
        model.require(key, kind, **options)
    error = caught.value
    assert (error.field, error.path) == (key, model.path)
    assert words in error.problem
    index = [record[0] for record in VALUES].index(key) if key != "absent" else None
    if index is not None:
        names = [f"kv {index} value", f"kv {index} element type", f"kv {index} value length"]
        assert error.offset in [ggufs.fields(data)[name].pos for name in names if name in ggufs.fields(data)]
        with pytest.raises(GGUFError):
            model.get(key, kind, None, **options)


# rule 11: the mapping


def test_weights_are_read_only(opened: Callable[[bytes], GGUF]) -> None:
    model = opened(SMALL)
    data = model.tensors["blk.0.weight"].data
    assert not data.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        data.flags.writeable = True
    scores = model.require("tokenizer.ggml.scores", "f32[]")
    assert scores.flags.aligned
    assert not scores.flags.writeable


def test_mapping_lives_as_long_as_a_view(opened: Callable[[bytes], GGUF]) -> None:
    model = opened(SMALL)
    view = model.tensors["quantized.weight"].data[34:68]
    expected = view.tobytes()
    del model
    gc.collect()
    assert view.tobytes() == expected


def test_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(path: Path, buffer: Any) -> gguf_header.Header:
        header = gguf_header.read_header(path, buffer)
        with path.open("ab") as file:
            file.write(b"more")
        return header

    monkeypatch.setattr(loader, "read_header", grow)
    assert "changed while it was read" in refused(SMALL, tmp_path).problem


@pytest.mark.skipif(sys.platform == "win32", reason="needs sparse files")
def test_opening_reads_the_header_only(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    n = 1 << 34  # elements: 64 GiB of float32, none of which is on the disk
    path.write_bytes(ggufs.build((), [Spec("large", (n,), data=b"")], alignment=4096))
    start = -(-path.stat().st_size // 32) * 32
    os.truncate(path, start + 4 * n)
    tracemalloc.start()
    try:
        model = read_gguf(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert model.n_bytes == 4 * n
    assert peak < 1 << 20


# rule 12: nothing but reading

AUDIT = """
import sys
import engine.gguf.file
seen = []
sys.addaudithook(lambda event, args: seen.append((event, *args[:2])))
engine.gguf.file.read_gguf(sys.argv[1], check_tensors=True)
for event in seen:
    print(*map(str, event))
"""


def test_reading_neither_executes_nor_connects_nor_writes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    command = [sys.executable, "-c", AUDIT, str(path)]
    events = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout.splitlines()
    opens = [event for event in events if event.split()[0] == "open"]
    assert opens == [f"open {path} r"]
    forbidden = ("exec", "compile", "import", "pickle", "marshal", "socket", "subprocess", "os.", "ctypes")
    assert [event for event in events if event.startswith(forbidden)] == []


# paths that are no readable file


def test_path_that_is_no_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty.gguf"
    empty.touch()
    for path, words in (
        (tmp_path, "it is a directory"),
        (tmp_path / "absent.gguf", "it does not exist"),
        (empty, "it is empty"),
        (tmp_path / "model\0.gguf", "it cannot be opened"),
        (tmp_path / ("n" * 5000), "it cannot be opened"),
        (empty / "below.gguf", "it cannot be opened" if sys.platform != "win32" else "it does not exist"),
    ):
        with pytest.raises(GGUFError) as caught:
            read_gguf(path)
        assert words in caught.value.problem
        assert ": " in caught.value.problem
        assert caught.value.field == "file"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_named_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    with pytest.raises(GGUFError, match="a device or a pipe"):
        read_gguf(path)


def test_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)

    def deny(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", deny)
    with pytest.raises(GGUFError, match="check its permissions"):
        read_gguf(path)


def test_large_vocabulary(tmp_path: Path) -> None:
    """250 000 tokens, scores, types and merges, read back exactly and without a second copy of the text."""
    tokens = [f"▁token{i}" for i in range(250_000)]
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(list(map(float, range(250_000))))
    writer.add_token_types([1] * 250_000)
    writer.add_token_merges([f"{i} {i + 1}" for i in range(250_000)])
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(ggufs.written(writer)[0])
    tracemalloc.start()
    try:
        model = read_gguf(path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert model.require("tokenizer.ggml.tokens", "str[]", n=250_000) == tokens
    assert model.require("tokenizer.ggml.merges", "str[]")[-1] == "249999 250000"
    assert model.require("tokenizer.ggml.scores", "f32[]", 0, 249_999, n=250_000)[249_999] == 249_999
    assert peak - kept < 4 << 20
