"""Values in files: what is damaged, cut off or written with another key is noticed, and folders stay within their limit."""

import errno
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.disk import KEY_FILE, SUFFIX, ValueFolder, open_folder
from engine.cache.recurrent import Snapshot
from engine.cache.values import packed, packed_bytes, unpacked
from engine.errors import UsageError
from engine.machine import records, trust
from tests.tiers import examples

KEY, OTHER = bytes(32), bytes([1] * 32)
NAME = records.name_of(b"a page", b"1")
VALUE = np.random.default_rng(1).integers(0, 256, 5000).astype(np.uint8)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "record"
    with path.open("wb") as file:
        assert records.write(file, NAME, VALUE, KEY) == records.HEAD + VALUE.size
    return path


def test_what_was_written_is_read(record: Path) -> None:
    found = records.read(records.RecordPlace(record, 0, NAME), KEY)
    assert found.ours and found.contents.tobytes() == VALUE.tobytes()
    assert not records.read(records.RecordPlace(record, 0, NAME), OTHER).ours


def test_every_changed_byte_is_noticed(record: Path) -> None:
    """Of the head each byte, of the contents some; a changed MAC only makes it another installation's."""
    data = record.read_bytes()
    for at in [*range(records.HEAD), records.HEAD + 7, len(data) - 1]:
        record.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
        if records.HEAD - 32 <= at < records.HEAD:
            assert not records.read(records.RecordPlace(record, 0, NAME), KEY).ours
        else:
            with pytest.raises(records.Damaged):
                records.read(records.RecordPlace(record, 0, NAME), KEY)
    for length in (0, 1, records.HEAD - 1, records.HEAD, len(data) - 1):
        record.write_bytes(data[:length])
        with pytest.raises(records.Damaged):
            records.read(records.RecordPlace(record, 0, NAME), KEY)
    record.unlink()
    with pytest.raises(records.Damaged):
        records.read(records.RecordPlace(record, 0, NAME), KEY)


def test_records_of_a_file_are_read_in_their_order(tmp_path: Path) -> None:
    path, places = tmp_path / "records", list[records.RecordPlace]()
    with path.open("wb") as file:
        for i in range(40):
            places.append(records.RecordPlace(path, file.tell(), records.name_of(bytes([i]))))
            records.write(file, places[-1].name, VALUE[: 100 * i], KEY)
    wrong = places[7]._replace(name=NAME)
    found = list(records.read_all([*places, wrong], KEY))
    assert found[-1] is records.Unread.DAMAGED
    assert [each.contents.size for each in found if isinstance(each, records.ReadRecord)] == [
        100 * i for i in range(40)
    ]


def test_names_say_where_parts_end() -> None:
    assert len({records.name_of(b"ab", b"c"), records.name_of(b"a", b"bc"), records.name_of(b"abc")}) == 3


def test_a_key_is_private_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "key"
    key = trust.secret(path)
    assert len(key) == 32 and trust.secret(path) == key != trust.secret(tmp_path / "other")
    if trust.CHECKED:
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o640)  # somebody may have read it
        assert trust.secret(path) != key


# --- snapshots ---------------------------------------------------------------------------------------------------------


@examples(30)
@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=4), st.integers(0, 10**6))
def test_a_snapshot_is_a_value(shapes: list[list[int]], length: int) -> None:
    random = np.random.default_rng(length)
    arrays = [random.standard_normal(shape, np.float32) for shape in shapes]
    arrays += [np.arange(5, dtype=np.uint16)]
    value = packed(Snapshot(length, arrays))
    assert packed_bytes(Snapshot(length, arrays)) == value.nbytes
    found = unpacked(value)
    assert found.length == length
    for array, again in zip(arrays, found.arrays, strict=True):
        assert (array.dtype, array.shape, array.tobytes()) == (again.dtype, again.shape, again.tobytes())


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\n",
        b"[1]\n",
        b"5\n",
        b'[1, [["<f4", 2]]]\n1234',
        b'[1, [["O", 1]]]\n12345678',
        b'["x", []]\n',
        b"[1, 5]\n",
    ]
    + [b'[1, [["<f4", -1]]]\n', b"[1, [[[], 1]]]\n", b"[" * 5000 + b"\n", b'[1, [["nonsense", 1]]]\n'],
    ids=range(12),
)
def test_other_bytes_are_no_snapshot(value: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpacked(np.frombuffer(value, np.uint8))


# --- folders -----------------------------------------------------------------------------------------------------------


def names(*numbers: int) -> list[bytes]:
    return [records.name_of(b"n", bytes([i])) for i in numbers]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def test_a_folder_keeps_what_was_used_last(tmp_path: Path) -> None:
    size = records.HEAD + VALUE.size
    values = ValueFolder(tmp_path, 4 * size)
    for name in names(*range(4)):
        values.write(name, VALUE)
    assert [each is not None for each in values.read(names(0, 9))] == [True, False]
    values.write(names(4)[0], VALUE)
    values.write(names(5)[0], VALUE[:10])
    # The third was the least recently used one but for the second, which made room for the fifth.
    assert [name in values for name in names(*range(6))] == [True, False, False, True, True, True]
    assert values.n_bytes == sum(path.stat().st_size for path in files(tmp_path)) <= values.limit
    values.write(names(6)[0], np.zeros(5 * size, np.uint8))  # never fits
    assert len(values) == len(files(tmp_path)) == 4


def test_a_folder_after_a_restart(tmp_path: Path) -> None:
    size = records.HEAD + VALUE.size
    values = ValueFolder(tmp_path, 10 * size)
    for i, name in enumerate(names(*range(4))):
        values.write(name, VALUE)
        path = tmp_path / f"{name.hex()}{SUFFIX}"
        os.utime(path, (100 + i, 100 + i))
    (tmp_path / ".0123456789ab").write_bytes(b"unfinished")
    (tmp_path / ".profile").write_bytes(b"somebody's")
    assert len(list(values.read(names(0)))) == 1  # now the latest
    del values
    again = ValueFolder(tmp_path, 2 * size)
    assert [name in again for name in names(*range(4))] == [True, False, False, True]
    assert not (tmp_path / ".0123456789ab").exists() and (tmp_path / ".profile").exists()


def test_files_of_another_key_are_left_alone(tmp_path: Path) -> None:
    values = ValueFolder(tmp_path, 10**6)
    values.write(NAME, VALUE)
    (path,), written = files(tmp_path), path_bytes(tmp_path)
    del values
    (tmp_path / KEY_FILE).unlink()
    values = ValueFolder(tmp_path, 10**6)
    assert NAME in values and list(values.read([NAME])) == [None] and NAME not in values
    assert path.read_bytes() == written and values.n_bytes == len(written)
    values.write(NAME, VALUE)
    assert NAME in values and path.read_bytes() != written and values.n_bytes == len(written)
    (found,) = values.read([NAME])
    assert found is not None and found.tobytes() == VALUE.tobytes()


def path_bytes(folder: Path) -> bytes:
    (path,) = files(folder)
    return path.read_bytes()


def test_a_damaged_file_is_removed(tmp_path: Path) -> None:
    values = ValueFolder(tmp_path, 10**6)
    values.write(NAME, VALUE)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    assert NAME in values and list(values.read([NAME])) == [None]
    assert NAME not in values and not path.exists() and values.n_bytes == 0


def test_a_folder_has_one_process(tmp_path: Path) -> None:
    values = open_folder(tmp_path, 100)
    assert open_folder(tmp_path, 200) is values and values.limit == 200
    pytest.importorskip("fcntl")
    with pytest.raises(UsageError, match=r"another process uses the cache on disk in .*: end it, or give"):
        ValueFolder(tmp_path, 100)


def test_a_folder_may_have_several_names(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder, target_is_directory=True)
    values = open_folder(folder, 100)
    assert open_folder(link, 200) is values
    assert open_folder(folder / ".." / "folder", 300) is values and values.limit == 300


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (BlockingIOError(errno.EWOULDBLOCK, "held"), "another process uses the cache on disk"),
        (
            OSError(errno.ENOLCK, "No locks available"),
            "cannot be stored in .*: No locks available; give another folder",
        ),
    ],
)
def test_a_lock_that_fails(error: OSError, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    files: list[Any] = []

    def fail(file: Any, operation: int) -> None:
        files.append(file)
        raise error

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(UsageError, match=sentence):
        ValueFolder(tmp_path, 100)
    assert [file.closed for file in files] == [True]


def test_a_folder_that_cannot_be_listed_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: ValueFolder) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(ValueFolder, "_scan", fail)
        with pytest.raises(UsageError, match="Input/output error"):
            ValueFolder(tmp_path, 100)
    ValueFolder(tmp_path, 100)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_file_that_cannot_be_read_is_kept(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise OSError(code, os.strerror(code))

    values = ValueFolder(tmp_path, 10**6)
    values.write(NAME, VALUE)
    with monkeypatch.context() as patch:
        patch.setattr(records, "open", fail, raising=False)
        assert list(values.read([NAME])) == [None]
    assert NAME in values and values.n_bytes == records.HEAD + VALUE.nbytes
    (found,) = values.read([NAME])
    assert found is not None and found.tobytes() == VALUE.tobytes()


def in_child(check: Any) -> None:
    """Run a check in a forked process."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def write_and_fork(folder: Path) -> None:
    """Write a value to a folder that a forked process cannot use."""
    values = open_folder(folder, 10**6)
    values.write(NAME, VALUE)

    def refused() -> None:
        assert NAME not in values
        values.write(NAME, VALUE[:1])
        with pytest.raises(UsageError, match="another process uses"):
            open_folder(folder, 10**6)

    in_child(refused)
    (found,) = values.read([NAME])
    assert found is not None and found.tobytes() == VALUE.tobytes()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_neither_the_folder_nor_its_lock(tmp_path: Path) -> None:
    write_and_fork(tmp_path)
    gc.collect()
    values = open_folder(tmp_path, 10**6)
    # A process that lives on after this one does not keep others from the folder.
    end, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(begin)
        os.read(end, 1)
        os._exit(0)
    os.close(end)
    del values
    gc.collect()
    try:
        assert NAME in open_folder(tmp_path, 10**6)
    finally:
        os.close(begin)
        os.waitpid(child, 0)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="cannot be stored in .*; give another folder"):
        ValueFolder(tmp_path / "file" / "folder", 100)
    if trust.CHECKED:
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        with pytest.raises(UsageError, match="others can write to"):
            ValueFolder(shared, 100)
