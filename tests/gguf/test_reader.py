"""Threads that read parts of files: every byte arrives, buffers are bounded, and every error ends all threads."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from engine.errors import GGUFError
from engine.gguf import reader
from engine.gguf.pages import MappedFile, file_of
from engine.gguf.reader import FilePiece, HostBuffer, HostBuffers, Reader, read_runs
from engine.hub.resolve import resolve

RNG = np.random.default_rng(0)


def mapped(path: Path, n_bytes: int) -> tuple[np.ndarray, bytes]:
    """A new file of random bytes, mapped, and the bytes."""
    contents = RNG.bytes(n_bytes)
    path.write_bytes(contents)
    with path.open("rb") as file:
        return np.frombuffer(MappedFile(path, file.fileno(), n_bytes), np.uint8), contents


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    assert sys.getswitchinterval() == before
    deadline = time.monotonic() + 10
    while readers() and time.monotonic() < deadline:
        time.sleep(0.001)  # one that Ctrl-C has interrupted while it started
    assert not readers()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reader"]


def test_threads_take_turns_more_often_while_files_are_read() -> None:
    """Until the last of several readers has ended, in any order."""
    before = sys.getswitchinterval()
    first, second = Reader(1, HostBuffers()), Reader(1, HostBuffers())
    for each in (first, second):
        each.add([FilePiece([np.zeros(8, np.uint8)], lambda buffer, n: None)])
        assert sys.getswitchinterval() == pytest.approx(reader.SWITCH)
    first.finish()
    first.stop()
    assert sys.getswitchinterval() == pytest.approx(reader.SWITCH)
    second.stop()
    assert sys.getswitchinterval() == before


def test_where_arrays_lie(tmp_path: Path) -> None:
    array, contents = mapped(tmp_path / "file", 5000)
    found = file_of(array[100:4000].reshape(-1, 10)[3:7])
    assert found is not None and found[1] == 130 and found[0].path == tmp_path / "file"
    assert os.pread(found[0].descriptor, 5, 130) == contents[130:135]
    assert file_of(array.copy()) is None and file_of(np.zeros(3)) is None


def test_a_file_is_closed_with_the_last_view_of_it(tmp_path: Path) -> None:
    array, _ = mapped(tmp_path / "file", 100)
    part = array[3:5]
    found = file_of(array)
    assert found is not None
    descriptor = found[0].descriptor
    del found, array
    os.fstat(descriptor)
    del part
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_a_file_that_was_replaced_is_still_the_one_that_was_opened(tmp_path: Path) -> None:
    array, contents = mapped(tmp_path / "file", 3000)
    (tmp_path / "new").write_bytes(bytes(3000))
    os.replace(tmp_path / "new", tmp_path / "file")
    target = np.empty(3000, np.uint8)
    read_runs([array], target)
    assert target.tobytes() == contents


@given(cuts=st.lists(st.tuples(st.booleans(), st.integers(0, 9000), st.integers(0, 9000)), max_size=6))
def test_runs_of_files_and_of_memory(
    cuts: list[tuple[bool, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    array, contents = mapped(tmp_path_factory.mktemp("runs") / "file", 9000)
    copy = array.copy()
    runs = [(copy if in_memory else array)[a:b] for in_memory, a, b in cuts]
    expected = b"".join(contents[a:b] for _, a, b in cuts)
    target = np.full(len(expected) + 10, 7, np.uint8)
    read_runs(runs, target)
    assert target.tobytes() == expected + bytes([7] * 10)


@pytest.mark.parametrize("without", ["preadv", "posix_fadvise"])
def test_systems_without_a_call(without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, contents = mapped(tmp_path / "file", 3000)
    monkeypatch.delattr(os, without, raising=False)
    target = np.empty(2000, np.uint8)
    read_runs([array[1000:]], target)
    assert target.tobytes() == contents[1000:]


def test_a_system_that_reads_less_than_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, contents = mapped(tmp_path / "file", 3000)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, parts, start: real(file, [parts[0][:700]], start))
    target = np.empty(2500, np.uint8)
    read_runs([array[500:]], target)
    assert target.tobytes() == contents[500:]


def pieces(array: np.ndarray, step: int, use: Callable[[HostBuffer, int], None]) -> list[FilePiece[HostBuffer]]:
    return [FilePiece([array[at : at + step]], use) for at in range(0, array.size, step)]


@pytest.mark.parametrize("n_threads", [1, 2, 5])
def test_every_piece_is_read_once(n_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In buffers that are used again, no more of them than threads; also pieces that are larger than buffers."""
    monkeypatch.setattr(reader, "PIECE", 1 << 12)
    array, contents = mapped(tmp_path / "file", 100_000)
    target, buffers = np.zeros(2 * array.size, np.uint8), set[int]()

    def place(at: int, buffer: HostBuffer, n_bytes: int) -> None:
        buffers.add(id(buffer))
        assert buffer.data.size == max(1 << 12, n_bytes) or n_bytes < 5000
        target[at : at + n_bytes] = buffer.data[:n_bytes]

    reading, reports = Reader(n_threads, HostBuffers()), list[tuple[int, int]]()
    for first, step in ((0, 1000), (array.size, 5000)):
        for at in range(0, array.size, step):
            reading.add([FilePiece([array[at : at + step]], partial(place, first + at))])
    reading.finish(lambda *report: reports.append(report))
    assert target.tobytes() == 2 * contents
    assert reading.done == reading.added == target.size and len(buffers) <= n_threads
    assert all(0 <= done <= added == target.size for done, added in reports) and reports == sorted(reports)


def test_threads_read_at_the_same_time(tmp_path: Path) -> None:
    """Three pieces are in use at once: each waits for the others."""
    array, _ = mapped(tmp_path / "file", 3000)
    meeting = threading.Barrier(3, timeout=60)
    reading = Reader(3, HostBuffers())
    reading.add(pieces(array, 1000, lambda buffer, n: (meeting.wait(), None)[1]))
    reading.finish()
    assert reading.done == 3000


def test_progress_is_reported_while_pieces_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "INTERVAL", 0.001)
    array, _ = mapped(tmp_path / "file", 3000)
    seen = threading.Event()
    reading = Reader(1, HostBuffers())
    reading.add(pieces(array, 1000, lambda buffer, n: (seen.wait(60), None)[1]))
    reading.finish(lambda done, added: seen.set() if (done, added) == (0, 3000) else None)
    assert seen.is_set()


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    array, _ = mapped(tmp_path / "file", 10_000)
    os.truncate(tmp_path / "file", 4500)
    reading = Reader(2, HostBuffers())
    reading.add(pieces(array, 1000, lambda buffer, n: None))
    with pytest.raises(GGUFError, match=r"file: file at byte \d{4}: it ends here: .*, fetch it again$") as caught:
        reading.finish()
    assert caught.value.offset is not None and caught.value.offset >= 4500
    with pytest.raises(GGUFError, match="it ends here"):
        reading.add(pieces(array, 1000, lambda buffer, n: None))


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, _ = mapped(tmp_path / "file", 3000)

    def broken(*given: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken, raising=False)
    reading = Reader(2, HostBuffers())
    reading.add(pieces(array, 1000, lambda buffer, n: None))
    with pytest.raises(GGUFError, match=r"it cannot be read \(Input/output error\): check the disk"):
        reading.finish()


def test_an_error_of_a_use_ends_all(tmp_path: Path) -> None:
    """What follows is not read, and every buffer is put back."""
    array, _ = mapped(tmp_path / "file", 100_000)
    used: list[int] = []

    def use(buffer: HostBuffer, n_bytes: int) -> None:
        used.append(n_bytes)
        if len(used) == 5:
            raise MemoryError("full")

    class Counting(HostBuffers):
        out = 0

        def take(self, n_bytes: int) -> HostBuffer:
            self.out += 1
            return super().take(n_bytes)

        def give(self, buffer: HostBuffer) -> None:
            self.out -= 1
            super().give(buffer)

    ring = Counting()
    reading = Reader(1, ring)
    reading.add(pieces(array, 100, use))
    with pytest.raises(MemoryError, match="full"):
        reading.finish()
    assert len(used) == 5 and ring.out == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent to this process")
def test_ctrl_c(tmp_path: Path) -> None:
    array, _ = mapped(tmp_path / "file", 3000)
    stopped = threading.Event()

    def interrupt(buffer: HostBuffer, n_bytes: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        stopped.wait(0.2)

    reading = Reader(1, HostBuffers())

    def load() -> None:
        reading.add(pieces(array, 1000, interrupt))
        reading.finish()

    with pytest.raises(KeyboardInterrupt):
        load()
    reading.stop()
    assert reading.done < 3000


def test_stopping_without_finishing(tmp_path: Path) -> None:
    """Threads that wait for pieces end, too."""
    array, _ = mapped(tmp_path / "file", 3000)
    reading = Reader(3, HostBuffers())
    reading.add(pieces(array, 1000, lambda buffer, n: None))
    reading.stop()
    reading.stop()


def test_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, _ = mapped(tmp_path / "file", 3000)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reading = Reader(3, HostBuffers())
    with pytest.raises(Exception, match="the system allows no thread that reads the model; close other programs"):
        reading.add(pieces(array, 1000, lambda buffer, n: None))
    reading.stop()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_model_whose_loading_fails(error: type[BaseException] | None, tmp_path: Path) -> None:
    """The file is cut off when its weights are about to be read, or Ctrl-C is pressed.  It can be loaded afterwards."""
    path = tmp_path / "model.gguf"
    contents = resolve("pycoder-draft").read_bytes()
    path.write_bytes(contents)

    def fail(stage: str, done: int, total: int) -> None:
        if stage == "load":
            if error is not None:
                raise error
            os.truncate(path, len(contents) // 2)

    with pytest.raises(error or GGUFError, match=None if error else r"model\.gguf: file at byte \d+: it ends here"):
        engine.load(path, device="cpu", n_ctx=64, n_threads=2, progress=fail)
    path.write_bytes(contents)
    texts = set()
    for model in (path, "pycoder-draft"):
        with engine.load(model, device="cpu", n_ctx=64, n_threads=2) as llm:
            texts.add(llm.complete("def", max_tokens=3, temperature=0).text)
    assert len(texts) == 1
