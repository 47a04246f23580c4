"""The digest of a model's files: that of its definition, whatever the threads, and of every byte."""

import hashlib
import os
import random
from pathlib import Path

import pytest

from engine.errors import GGUFError
from engine.gguf import digest
from engine.gguf.digest import FileDigest, model_digest
from engine.gguf.file import GGUF, read_gguf
from engine.gguf.pages import MappedFile
from engine.gguf.reader import HostBuffers, Reader
from engine.hub.resolve import resolve
from tests.gguf.test_gguf_split import split


def expected(*contents: bytes) -> str:
    """The definition, in one thread."""
    text = b""
    for each in contents:
        text += len(each).to_bytes(8, "little")
        text += b"".join(hashlib.sha256(each[i : i + digest.LEAF]).digest() for i in range(0, len(each), digest.LEAF))
    return hashlib.sha256(text).hexdigest()


def opened(*paths: Path) -> GGUF:
    """Files with these bytes, as if they were the parts of a model."""
    files = []
    for path in paths:
        with path.open("rb") as file:
            files.append(MappedFile(path, file.fileno(), path.stat().st_size))
    return GGUF(paths[0], 3, 32, {}, {}, {}, {}, tuple(files))


def test_the_bundled_model() -> None:
    path, reports = resolve("pycoder-draft"), list[tuple[str, int, int]]()
    found = model_digest(read_gguf(path), 2, lambda *report: reports.append(report))
    assert found == expected(path.read_bytes())
    assert {report[0] for report in reports} <= {"digest"}


@pytest.mark.parametrize("n_threads", [0, 1, 3])
@pytest.mark.parametrize("sizes", [(1,), (63, 64, 65), (640, 1, 1000), (64,)])
def test_parts(n_threads: int, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "LEAF", 64)
    contents = [random.Random(size).randbytes(size) for size in sizes]
    paths = [tmp_path / str(i) for i in range(len(sizes))]
    for path, each in zip(paths, contents, strict=True):
        path.write_bytes(each)
    found = model_digest(opened(*paths), n_threads)
    assert found == expected(*contents)
    # Where one file ends and the next begins is part of it, and so is each byte.
    (tmp_path / "all").write_bytes(b"".join(contents))
    assert len(sizes) == 1 or model_digest(opened(tmp_path / "all")) != found
    last = bytearray(contents[-1])
    last[-1] ^= 1
    paths[-1].write_bytes(last)
    assert model_digest(opened(*paths)) != found


def test_leaves_beside_other_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of a reader that reads more."""
    monkeypatch.setattr(digest, "LEAF", 64)
    (tmp_path / "file").write_bytes(contents := random.Random(0).randbytes(1000))
    two = [FileDigest(opened(tmp_path / "file").files) for _ in range(2)]
    reader = Reader(2, HostBuffers())
    for each in two:
        reader.add(each.pieces())
    reader.finish()
    assert reader.done == 2000
    assert [each.hexdigest() for each in two] == 2 * [expected(contents)]


def test_a_file_that_has_shrunk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    gguf = opened(tmp_path / "file")
    os.truncate(tmp_path / "file", 999)
    with pytest.raises(GGUFError, match="at byte 999: it ends here"):
        model_digest(gguf)


def test_all_parts_of_a_split_model_are_read(tmp_path: Path) -> None:
    """Whichever part is named, and the first one, which has no tensors."""
    paths = split(tmp_path, split_max_tensors=3, small_first_shard=True)
    assert len(paths) > 1
    found = expected(*(path.read_bytes() for path in paths))
    assert {model_digest(read_gguf(path)) for path in paths} == {found}
