"""Trying grammars in another process first: compiling one may take hours, or end the process by a stack overflow."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from engine.errors import UsageError
from engine.grammar.library import LIMITS
from engine.grammar.messages import CRASH, SLOW, problem

SECONDS = 1.0
"""Seconds of processor time that compiling a grammar may take."""

PATIENCE = 20.0
"""Seconds after which the process is given up, however busy the machine is."""

ENDS = {signal.SIGKILL, signal.SIGPROF} if os.name == "posix" else {-1}
"""The signals that end a process which takes too long; on Windows, which has none, the negative exit status."""

PROGRAM = Path(__file__).with_name("child.py")


class Trial:
    """The process in which grammars are tried.  It starts when it is first needed, and ends with this one."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget the process, which belongs to another one after a fork."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def problem(self, source: str, vocabulary: str = "") -> str:
        """What is wrong with a grammar, as a part of a sentence; "" if nothing is.

        vocabulary: keyword arguments of ``engine.grammar.child.tokenizer`` as JSON; "": special tokens stay unchecked.
        Raises UsageError if the process cannot be started.
        """
        request = {"source": source, "limits": LIMITS, "seconds": SECONDS, "vocabulary": vocabulary}
        with self._lock:
            process = self._running()
            timer = threading.Timer(PATIENCE, process.kill)
            timer.daemon = True
            timer.start()
            try:
                report = _exchange(process, json.dumps(request).encode() + b"\n")
            except BaseException:  # an interrupt: the answer would be taken for that of the next request
                process.kill()
                self._end()
                raise
            finally:
                timer.cancel()
            if report is not None:
                return problem(report) if report else ""
            self._end()
            return SLOW if -process.returncode in ENDS else CRASH

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        command = [sys.executable, "-P", str(PROGRAM)]
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        try:
            # In a session of its own, so that Ctrl-C in a terminal does not reach it.
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none, start_new_session=True)
        except OSError as error:
            raise UsageError(f"the process that tries grammars cannot be started: {error}.") from error
        self._process = process
        if _exchange(process, b"") is None:
            self._end()
            raise UsageError(f"the process that tries grammars cannot be started: {command[0]} cannot run llguidance.")
        return process

    def _end(self) -> None:
        """Close what is left of a process that has ended, or been killed."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # what was not read is lost
                pass
        process.wait()


def _exchange(process: "subprocess.Popen[bytes]", request: bytes) -> str | None:
    """Send a request and wait for the answer; None if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(request)
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        return None
    return str(json.loads(answer)) if answer else None


TRIAL = Trial()
"""The one process of this program."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=TRIAL.renew)
