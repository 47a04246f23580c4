"""Compiling many jobs in parallel: one process per core, each with its own compiler.

The main process only waits, in a call that an interrupt ends at once: while compiling, Numba may swallow an interrupt.  The
worker processes run in their own session, so that Ctrl-C in a terminal does not reach them; the main process kills them, and
they end by themselves if it is killed.  They write files atomically.
"""

import os
import pickle
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable

from engine.compile import cache as kernel_cache
from engine.compile.jobs import Job
from engine.compile.worker import START
from engine.machine.cores import available_cores
from engine.machine.memory import available_memory

Progress = Callable[[str, int, int], None]

Worker = subprocess.Popen[bytes]

WORKER_BYTES = 512 << 20
"""Bytes of memory that a process may need; most need half of it."""


def compile_all(jobs: Iterable[Job], progress: Progress | None = None) -> int:
    """Compile the jobs that are not compiled yet, and return their number.

    progress: called as ``progress("compile", done, total)``; it counts these jobs.
    A kernel whose job fails, or whose result cannot be stored, is compiled when it is first used.
    """
    missing = [job for job in dict.fromkeys(jobs) if not job.kept()]
    tell = progress or _silent
    tell("compile", 0, len(missing))
    parts: set[kernel_cache.Part] = {job.part for job in missing}
    # On other systems, no call waits for several pipes.
    able = os.name == "posix" and bool(sys.executable)
    if missing and able and all(kernel_cache.places(part).write is not None for part in sorted(parts)):
        # The largest first, so that no process is still busy with it when all others are done.
        missing.sort(key=lambda job: job.size(), reverse=True)
        _share(missing, tell)
    if missing:
        tell("compile", len(missing), len(missing))
    return len(missing)


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _share(jobs: list[Job], tell: Progress) -> None:
    waiting = deque(pickle.dumps(pickle.dumps(job)) for job in jobs)
    done = 0
    workers: list[Worker] = []
    memory = available_memory() // WORKER_BYTES
    try:
        with selectors.DefaultSelector() as selector:
            for _ in range(max(1, min(available_cores(), len(jobs), memory))):
                worker = _start(waiting.popleft())
                if worker is None:
                    break  # the remaining kernels are compiled when they are first used
                workers.append(worker)
                selector.register(worker.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            while selector.get_map():
                for key, _ in selector.select():
                    worker = key.data
                    if os.read(key.fd, 1):
                        done += 1
                        tell("compile", done, len(jobs))
                        if waiting and _send(worker, waiting.popleft()):
                            continue
                    selector.unregister(key.fileobj)
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.communicate()


def _start(job: bytes) -> Worker | None:
    """A process that begins with this job; None if it cannot be started."""
    # Jobs run in parallel, so the libraries within a process use one thread each.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    try:
        worker = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError:
        return None
    _send(worker, pickle.dumps(sys.path), job)
    return worker


def _send(worker: Worker, *messages: bytes) -> bool:
    assert worker.stdin
    try:
        for message in messages:
            worker.stdin.write(message)
        worker.stdin.flush()
    except BrokenPipeError:
        return False
    return True
