"""Ctrl-C while a kernel is loaded."""

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numba
import pytest
from numba.core import compiler

from engine.compile.interrupts import deferred
from engine.compile.numba_cache import KernelCache


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_is_handled_at_the_end() -> None:
    done = []

    def press() -> None:
        with deferred():
            for i in range(2):
                signal.raise_signal(signal.SIGINT)
                done.append(i)

    with pytest.raises(KeyboardInterrupt):
        press()
    assert done == [0, 1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # An error is not lost, and the next Ctrl-C comes at once.
    with pytest.raises(ZeroDivisionError), deferred():
        raise ZeroDivisionError
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_other_threads_and_ignored_signals_change_nothing() -> None:
    def check() -> None:
        before = signal.getsignal(signal.SIGINT)
        with deferred():
            assert signal.getsignal(signal.SIGINT) == before

    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    for disposition in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, disposition)
        check()


def test_a_kernel_is_loaded_as_a_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("BITMIRROR_CACHE", str(tmp_path))
    rebuild, loaded = compiler.CompileResult._rebuild, []

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        loaded.append(rebuild(*arguments))
        return loaded[-1]

    def double(x: int) -> int:
        return 2 * x

    kernel = numba.njit("int64(int64)")(double)
    (result,) = kernel.overloads.values()
    cache = KernelCache(double)
    monkeypatch.setattr(compiler.CompileResult, "_rebuild", interrupted)
    cache.save_overload(result.signature, result)
    with pytest.raises(KeyboardInterrupt):
        cache.load_overload(result.signature, kernel.targetctx)
    assert loaded[0].entry_point(21) == 42
