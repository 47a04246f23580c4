"""Split files: any part opens the model, and parts that do not belong together are refused."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import GGUFError
from engine.gguf.file import read_gguf
from tests import ggufs
from tests.ggufs import SMALL, KeyValue, Spec, small_writer


def split(directory: Path, **options: Any) -> list[Path]:
    parts = ggufs.written(small_writer(**options))
    paths = [directory / f"model-{i + 1:05d}-of-{len(parts):05d}.gguf" for i in range(len(parts))]
    for path, data in zip(paths, parts, strict=True):
        path.write_bytes(data)
    return paths


@pytest.mark.parametrize("options", [{"split_max_tensors": 2}, {"split_max_tensors": 3, "small_first_shard": True}])
def test_split_file_by_any_part(options: dict[str, Any], tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(SMALL)
    expected = read_gguf(whole)
    paths = split(tmp_path, **options)
    assert len(paths) == 3
    for path in paths:
        model = read_gguf(path, check_tensors=True)
        assert model.path == paths[0]
        assert {key for key in model.metadata if not key.startswith("split.")} == set(expected.metadata)
        assert list(model.tensors) == list(expected.tensors)
        for name, tensor in model.tensors.items():
            other = expected.tensors[name]
            assert (tensor.type, tensor.shape) == (other.type, other.shape)
            assert tensor.data.tobytes() == other.data.tobytes()
            assert tensor.path.read_bytes()[tensor.offset :][: tensor.nbytes] == tensor.data.tobytes()
        assert model.n_bytes == expected.n_bytes


def test_split_file_by_links_beside_one_another(tmp_path: Path) -> None:
    """The layout of a Hugging Face cache: links with the names, to files that are named by their hashes."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for i, path in enumerate(split(blobs, split_max_tensors=2)):
        try:
            (snapshot / path.name).symlink_to(path.rename(blobs / f"{i}abc"))
        except OSError:
            pytest.skip("links need a permission here")
    assert len(read_gguf(snapshot / "model-00002-of-00003.gguf").tensors) == 6


def test_split_file_with_a_missing_part(tmp_path: Path) -> None:
    paths = split(tmp_path, split_max_tensors=2)
    paths[1].unlink()
    with pytest.raises(GGUFError, match="model-00002-of-00003.gguf is not beside this one: download all parts"):
        read_gguf(paths[0])


def test_split_file_under_another_name(tmp_path: Path) -> None:
    paths = split(tmp_path, split_max_tensors=2)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match="whose name must end in -00001-of-00003.gguf"):
        read_gguf(renamed)


def test_split_file_with_a_part_in_the_place_of_another(tmp_path: Path) -> None:
    paths = split(tmp_path, split_max_tensors=2)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(GGUFError, match=r"split.no at byte \d+: is 1 instead of 2"):
        read_gguf(paths[0])


def test_split_file_with_a_damaged_part(tmp_path: Path) -> None:
    paths = split(tmp_path, split_max_tensors=2)
    paths[2].write_bytes(paths[2].read_bytes()[:-100])
    with pytest.raises(GGUFError) as caught:
        read_gguf(paths[0])
    assert caught.value.path == paths[2]


def parts(directory: Path, first: list[KeyValue], second: list[KeyValue], names: str = "ab", total: int = 2) -> Path:
    """Two parts of one tensor each with extra keys."""
    for number, extra in enumerate((first, second)):
        kv = [("split.no", "u16", number), ("split.count", "u16", 2), ("split.tensors.count", "i32", total), *extra]
        data = ggufs.build(kv, [Spec(names[number], (8,))])
        (directory / f"m-0000{number + 1}-of-00002.gguf").write_bytes(data)
    return directory / "m-00001-of-00002.gguf"


def test_split_parts_may_repeat_equal_keys(tmp_path: Path) -> None:
    model = read_gguf(parts(tmp_path, [("x", "u32", 1), ("y", "f32[]", [2.0])], [("y", "f32[]", [2.0])]))
    assert list(model.tensors) == ["a", "b"]


@pytest.mark.parametrize(
    ("first", "second", "options", "field"),
    [
        ([("x", "u32", 1)], [("x", "u32", 2)], {}, "x"),
        ([("x", "u32", 1)], [("x", "i32", 1)], {}, "x"),
        ([("x", "i32[]", [1, 2])], [("x", "i32[]", [1])], {}, "x"),
        ([], [("x", "u32", 1)], {}, "x"),
        ([], [], {"names": "aa"}, "tensor 'a'"),
        ([], [], {"total": 3}, "split.tensors.count"),
        ([], [], {"total": -1}, "split.tensors.count"),
    ],
)
def test_split_parts_that_disagree(
    first: list[KeyValue], second: list[KeyValue], options: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with pytest.raises(GGUFError) as caught:
        read_gguf(parts(tmp_path, first, second, **options))
    assert caught.value.field == field
    assert caught.value.offset is not None


@pytest.mark.parametrize(
    ("kv", "field"),
    [
        ([("split.count", "str", "../../../etc")], "split.count"),
        ([("split.count", "u32", 3)], "split.count"),
        ([("split.count", "u16", 3)], "split.no"),
        ([("split.count", "u16", 3), ("split.no", "str", "/etc/passwd")], "split.no"),
        ([("split.count", "u16", 65_535), ("split.no", "u16", 0)], "split.no"),
        ([("split.count", "u16", 2), ("split.no", "u16", 0)], "split.count"),
    ],
)
def test_names_of_parts_do_not_come_from_the_file(kv: list[KeyValue], field: str, tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    path.write_bytes(ggufs.build(kv))
    with pytest.raises(GGUFError) as caught:
        read_gguf(path)
    assert caught.value.field == field


@pytest.mark.parametrize("count", [0, 1])
def test_file_merged_from_parts_is_whole(count: int, tmp_path: Path) -> None:
    kv: list[KeyValue] = [("split.no", "u16", 0), ("split.count", "u16", count), ("split.tensors.count", "i32", 2)]
    path = tmp_path / "model.gguf"
    path.write_bytes(ggufs.build(kv, [Spec("a", (8,)), Spec("b", (8,))]))
    assert list(read_gguf(path).tensors) == ["a", "b"]
