"""The team of threads: every tile is computed exactly once and in the order of the stages, whoever is absent; nothing hangs
and nothing keeps a core busy."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

import engine
from engine.cpu.backend import Backend
from engine.cpu.runtime import flags, walk
from engine.cpu.runtime.atomics import load, pause, store
from engine.cpu.runtime.flags import flag_jobs
from engine.cpu.runtime.program import Program
from engine.cpu.runtime.team import Team, team, team_jobs
from engine.errors import DeviceError
from tests.tiers import examples


@njit
def count(seen, first, last):
    """seen[i] += 1."""
    for i in range(first, last):
        seen[i] += 1


@njit
def sum_before(given, out, first, last):
    """out[i] = the sum of given + i: wrong unless all of ``given`` is written."""
    for i in range(first, last):
        total = 0
        for x in given:
            total += x
        out[i] = total % 1000003 + i


@njit
def slow(x, rounds, first, last):
    """Some ``rounds`` nanoseconds per item."""
    for i in range(first, last):
        t = x[i]
        for _ in range(rounds):
            t = t * np.float32(0.9999) + np.float32(0.5)
        x[i] = t


@njit
def fails(x, at, first, last):
    """Raise at item ``at``; x[i] = 1 for others."""
    for i in range(first, last):
        if i == at:
            raise MemoryError("at the item")
        x[i] = 1


def program(*operations: tuple[object, ...], grain: int = 1, joined: tuple[int, ...] = ()) -> Program:
    """A program of (kernel, arguments ..., items), with tiles of ``grain`` items."""
    made = Program()
    for k, (kernel, *arguments, items) in enumerate(operations):
        made.add(kernel, arguments, items, 6000.0 / grain, k in joined)  # type: ignore[arg-type]
    made.finish()
    return made


@given(
    items=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    joined=st.sets(st.integers(1, 11)),
    grain=st.integers(1, 7),
    threads=st.integers(1, 5),
)
@examples(60, 15)
def test_every_item_once(items: list[int], joined: set[int], grain: int, threads: int) -> None:
    seen = [np.zeros(n, np.int64) for n in items]
    made = program(*((count, x, x.size) for x in seen), grain=grain, joined=tuple(joined))
    for run in range(3):
        team().run(made, threads)
        assert all((x == run + 1).all() for x in seen)


def test_a_stage_begins_when_the_one_before_is_complete() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 1000, 24)] + [np.zeros(24, np.int64) for _ in range(300)]
    made = program(*((sum_before, a, b, 24) for a, b in zip(arrays, arrays[1:], strict=False)))
    expected = arrays[0]
    for _ in arrays[1:]:
        expected = expected.sum() % 1000003 + np.arange(24)
    for threads in (1, 2, 3, 9):
        for array in arrays[1:]:
            array[:] = -1
        team().run(made, threads)
        assert np.array_equal(arrays[-1], expected)


@njit
def meet(flags, patience, x, first, last):
    """x[i] = 1: item 0 when another thread has begun item 1, or late; item 1 when the next stage has begun, or late."""
    for i in range(first, last):
        store(flags, i, 1)
        for _ in range(patience):
            if load(flags, i + 1) == 1:
                break
            pause()
        x[i] = 1


@njit
def copy(flags, x, y, first, last):
    """y = x."""
    store(flags, 2, 1)
    for i in range(first, last):
        y[i] = x[i]


def test_a_stage_waits_for_its_slowest_tile() -> None:
    """Also if a tile takes much longer than a waiting thread spins or sleeps at a time."""
    for job in team_jobs():
        job.compile()  # here, because compiling makes the other thread late
    x, y, flags = np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(3, np.int64)
    made = program((meet, flags, 6_000_000, x, 2), (copy, flags, x, y, 2))
    for _ in range(2):
        x[:], y[:], flags[:] = 0, 0, 0
        team().run(made, 2)
        assert y.tolist() == [1, 1]


def test_an_absent_thread_is_not_missed() -> None:
    """With a thread that takes part in nothing, a pass ends all the same."""
    alone = Team()
    alone._threads = [threading.Thread()]  # never started
    alone._locks = [threading.Lock()]
    alone._locks[0].acquire()
    seen = np.zeros(100, np.int64)
    alone.run(program((count, seen, 100), (count, seen, 100)), 2)
    assert (seen == 2).all()


def test_a_late_thread_claims_nothing() -> None:
    """A thread that arrives in a pass that is over, while a longer or a shorter one is in flight, leaves at once."""
    own = Team()
    seen = np.zeros(10, np.int64)
    first, second = program((count, seen, 10), (count, seen, 10)), program((count, seen, 10))
    for made in (first, second):
        own.run(made, 1)
    late = 1 << 32 | 2 << walk.OPERATION_BITS | 2  # the number of the first pass
    assert walk.walk(own._words, own._left, own._undone, late, 0, 100, own._timeout) == 2
    # The next pass has begun, and its tiles are there to be claimed.
    order = own._order + 1
    number = order << 32 | 2 << walk.OPERATION_BITS | 1
    shared = own._words, own._left, own._undone
    walk.begin(*shared, number, second.table.ctypes.data, second.left, second.undone, own._woken[:1])
    assert walk.walk(*shared, late, 0, 100, own._timeout) == 2
    assert (seen == 3).all()
    assert walk.walk(*shared, number, 0, 100, own._timeout) == 1
    assert (seen == 4).all()


def test_a_thread_that_waits_returns_in_time() -> None:
    """So that an interrupt is seen while another thread computes a long tile."""
    own = Team()
    seen = np.zeros(2, np.int64)
    made = program((count, seen, 2), (count, seen, 2))
    number = 1 << 32 | 1 << walk.OPERATION_BITS | 2
    shared = own._words, own._left, own._undone
    walk.begin(*shared, number, made.table.ctypes.data, made.left, made.undone, own._woken[:1])
    own._left[0] -= 1  # the tile of the other thread
    ended: list[int] = []
    waiting = threading.Thread(target=lambda: ended.append(walk.walk(*shared, number, 0, 100, own._timeout)))
    waiting.start()
    waiting.join(20)
    returned = list(ended)
    own._undone[0] -= 1
    waiting.join()
    assert returned == [0] and seen.tolist() == [0, 1]


def test_a_pass_that_was_left_open_is_ended_before_the_next() -> None:
    """As after a second Ctrl-C, which interrupts the handling of the first."""
    own = Team()
    seen, other = np.zeros(10, np.int64), np.zeros(10, np.int64)
    left = program((count, seen, 10), (count, seen, 10))
    own._order = 1
    number = 1 << 32 | 1 << walk.OPERATION_BITS | 2
    shared = own._words, own._left, own._undone, number
    walk.begin(*shared, left.table.ctypes.data, left.left, left.undone, own._woken[:1])
    own._open = number, left
    own.run(program((count, other, 10)), 1)
    assert not seen.any()
    assert (other == 1).all()
    assert walk.walk(*shared, 0, 100, own._timeout) == 2


def test_a_failing_kernel_ends_the_pass_and_leaves_the_team_usable() -> None:
    x, after = np.zeros(50, np.int64), np.zeros(50, np.int64)
    made = program((fails, x, 17, 50), (count, after, 50))
    for threads in (1, 3):
        with pytest.raises(DeviceError, match="failed"):
            team().run(made, threads)
        # Tiles of later stages are not computed from incomplete results.
        assert not after.any()
    team().run(program((count, after, 50)), 3)
    assert (after == 1).all()


def exchanging(words: np.ndarray, rows: np.ndarray, gates: int, check: Callable[[], None] = lambda: None) -> Any:
    """A backend and, as its ``made``, a pass that waits for words[0], adds 1 to ``rows`` and sets words[1], and so on."""
    host: Any = Backend(1)

    def forward() -> None:
        one = np.ones_like(rows)
        for i in range(0, 2 * gates, 2):
            host.take(words, i, check)
            host.give(host.add(rows, one), rows, words, i + 1)

    host.made = host.record(forward)
    host.made.finish()
    return host


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_pass_waits_at_gates(threads: int) -> None:
    """For another thread, here, which waits for the pass in turn."""
    gates = 40
    words, rows = np.zeros(2 * gates, np.int64), np.zeros((3, 8), np.float32)
    made = exchanging(words, rows, gates).made

    def device() -> None:
        for i in range(0, 2 * gates, 2):
            if i == 10:
                time.sleep(0.05)
            rows[:] *= 2
            flags.put(words, i, 1)
            while not words[i + 1]:
                time.sleep(0)

    for job in (*team_jobs(), *flag_jobs()):
        job.compile()
    for _ in range(3):
        words[:], rows[:] = 0, 0.5
        other = threading.Thread(target=device)
        other.start()
        team().run(made, threads)
        other.join(10)
        expected = 0.5
        for _ in range(gates):
            expected = float(np.float32(2 * expected + 1))
        assert (rows == expected).all()
        assert made.waited_ns > 30e6


@pytest.mark.parametrize("threads", [1, 3])
def test_a_gate_that_stays_closed(threads: int) -> None:
    """The pass ends when a check of it fails, with nothing computed behind the gate, and the team is usable."""
    words, rows, checks = np.zeros(4, np.int64), np.zeros((3, 8), np.float32), []

    def check() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise DeviceError("it will not open")

    made = exchanging(words, rows, 2, check).made
    words[0] = 1
    with pytest.raises(DeviceError, match="it will not open"):
        team().run(made, threads)
    assert words.tolist() == [1, 1, 0, 0] and (rows == 1).all() and len(checks) == 3
    words[:] = 1
    team().run(made, threads)
    assert (rows == 3).all()


def test_a_gate_behind_a_kernel_that_fails() -> None:
    words, x = np.zeros(1, np.int64), np.zeros(50, np.int64)
    made = Program()
    made.add(fails, (x, 17), 50, 6000.0)
    made.add_gate(words, 0, lambda: None)
    made.finish()
    for threads in (1, 3):
        with pytest.raises(DeviceError, match="failed"):
            team().run(made, threads)


def test_passes_of_two_threads_take_turns() -> None:
    results = []

    def use(seed: int) -> None:
        arrays = [np.random.default_rng(seed).integers(0, 1000, 16)] + [np.zeros(16, np.int64) for _ in range(40)]
        made = program(*((sum_before, a, b, 16) for a, b in zip(arrays, arrays[1:], strict=False)))
        expected = arrays[0]
        for _ in arrays[1:]:
            expected = expected.sum() % 1000003 + np.arange(16)
        for threads in (2, 1, 3) * 20:
            arrays[-1][:] = 0
            team().run(made, threads)
            results.append(np.array_equal(arrays[-1], expected))

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 180
    assert all(results)


def test_two_models_in_two_threads() -> None:
    """Each gives the answer that it gives alone."""
    prompts = ["def add(a, b):", "import os\n"]
    models = [engine.load(n_ctx=256, device="cpu", n_threads=n) for n in (2, 3)]
    alone = [
        llm.complete(prompt, max_tokens=24, temperature=0).ids for llm, prompt in zip(models, prompts, strict=True)
    ]
    found: dict[int, list[list[int]]] = {0: [], 1: []}

    def answer(i: int) -> None:
        for _ in range(4):
            models[i].reset()
            found[i].append(models[i].complete(prompts[i], max_tokens=24, temperature=0).ids)

    threads = [threading.Thread(target=answer, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: [alone[i]] * 4 for i in range(2)}


def test_an_exception_in_a_callback_leaves_no_core_busy() -> None:
    llm = engine.load(n_ctx=256, device="cpu", n_threads=3)

    def stops(ids: Sequence[int], logits: np.ndarray) -> None:
        if len(ids) > 10:
            raise ZeroDivisionError("in the callback")

    with pytest.raises(ZeroDivisionError):
        llm.complete("def add(a, b):", max_tokens=24, temperature=0, logits_processors=[stops])
    time.sleep(0.2)
    before, start = sum(os.times()[:2]), time.perf_counter()
    time.sleep(0.4)
    assert (sum(os.times()[:2]) - before) / (time.perf_counter() - start) < 0.2
    assert len(llm.complete("def add(a, b):", max_tokens=4, temperature=0).ids) == 4


# --- processes ---------------------------------------------------------------------------------------------------


PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
sys.path.insert(0, {tests!r})
from engine.cpu.runtime.team import team
from tests.cpu.test_team import count, program, slow
def busy():
    times = os.times()
    return times.user + times.system
def idle_use(seconds=0.6):
    # On a busy machine a thread that has nothing to do may have to wait until it can notice that.
    end = time.perf_counter() + 60
    while True:
        before, start = busy(), time.perf_counter()
        time.sleep(seconds)
        use = (busy() - before) / (time.perf_counter() - start)
        if use < 0.05 or start > end:
            return use
x = np.ones(64, np.float32)
long = program(*((slow, x, 200_000, 64) for _ in range(400)))
short = program(*((slow, x, 1000, 64) for _ in range(20)))
"""


def run_process(body: str, *arguments: str, before: Callable[[], None] | None = None) -> str:
    """The output of a Python process that runs ``body`` after ``PROGRAM``."""
    code = PROGRAM.format(tests=os.getcwd()) + textwrap.dedent(body)
    done = subprocess.run(
        [*arguments, sys.executable, "-c", code], capture_output=True, text=True, timeout=120, preexec_fn=before
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_core_is_busy_between_passes() -> None:
    out = run_process(
        """
        team().run(short, 4)
        time.sleep(0.2)
        print(idle_use())
        """
    )
    assert float(out) < 0.05


def test_an_interrupt_ends_a_pass() -> None:
    """Ctrl-C is seen in the middle of a pass; afterwards no core is busy, and the team works."""
    out = run_process(
        """
        team().run(short, 3)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        start = time.perf_counter()
        try:
            team().run(long, 3)
            print("not interrupted")
        except KeyboardInterrupt:
            print("interrupted")
        time.sleep(0.2)
        print(idle_use() < 0.05)
        seen = np.zeros(64, np.int64)
        team().run(program((count, seen, 64), (count, seen, 64)), 3)
        print((seen == 2).all())
        """
    )
    assert out.split() == ["interrupted", "True", "True"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_a_team_of_its_own() -> None:
    out = run_process(
        """
        seen = np.zeros(64, np.int64)
        made = program((count, seen, 64), (count, seen, 64))
        team().run(made, 3)
        child = os.fork()
        team().run(made, 3)
        good = (seen == 4).all()
        if child == 0:
            os._exit(0 if good else 1)
        print(good, os.waitpid(child, 0)[1])
        """
    )
    assert out.split() == ["True", "0"]


def test_more_threads_than_cores() -> None:
    out = run_process(
        """
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        seen = np.zeros(640, np.int64)
        made = program(*((count, seen, 640) for _ in range(100)))
        team().run(made, 8 * cores)
        time.sleep(0.2)
        print((seen == 100).all(), idle_use() < 0.05)
        """
    )
    assert out.split() == ["True", "True"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot restrict a process to a core")
def test_a_part_of_one_core() -> None:
    """Several threads on a core that another process keeps busy: what a container with half a core is like."""
    core = min(os.sched_getaffinity(0))
    spin = subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    try:
        out = run_process(
            """
            start = time.perf_counter()
            for _ in range(50):
                team().run(short, 4)
            print("done")
            """,
            before=lambda: os.sched_setaffinity(0, {core}),
        )
    finally:
        spin.kill()
        spin.wait()
    assert out.split() == ["done"]


def test_the_end_of_the_process_ends_the_threads() -> None:
    """Also if it comes from another thread's exception or right after a pass."""
    out = run_process("team().run(short, 4); print('end')")
    assert out.split() == ["end"]
