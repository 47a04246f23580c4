"""How every command line begins and ends: its exit status, and one sentence on stderr for any error."""

import argparse
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from engine.checks import shown
from engine.cli.parser import Parser
from engine.errors import EngineError, named_by_flags

EXIT_BUG, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 1, 2, 130, 141, 143

MOST = 4000
"""Characters of a sentence, of which the rest is left out."""

Run = Callable[[argparse.Namespace], int]
"""What a command does: takes the parsed flags and returns the exit status."""


def main(
    parser: Callable[[], Parser],
    run: Run,
    argv: Sequence[str] | None,
    *,
    memory: str = "choose a smaller context with -c, or a smaller model",
) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr.

    parser: returns the parser of the command.
    argv: the words after the command; None: those of the process.
    memory: what to do if the memory is not enough.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            with named_by_flags():
                return _status(parser, run, words, memory)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        _abandon_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # the last output cannot be written, for example because the disk is full
        _abandon_output()
        return _fail(_of_system(error), EXIT_USAGE, False)


def _status(parser: Callable[[], Parser], run: Run, words: list[str], memory: str) -> int:
    """The exit status of a command, whose failures are already reported.  Raises OSError if its output cannot be written."""
    verbose = bool({"-v", "--verbose"} & set(words))
    try:
        use_utf8()
        status = run(parser().parse_args(words))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except SystemExit as end:  # --help, or a signal
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BrokenPipeError:
        raise
    except EngineError as error:
        return _fail(str(error), EXIT_USAGE, verbose)
    except MemoryError:
        return _fail(f"not enough memory: {memory}", EXIT_USAGE, verbose)
    except ImportError as error:
        return _fail(f"a package is missing ({error}): install bitmirror again with pip", EXIT_USAGE, verbose)
    except OSError as error:
        _abandon_output()
        return _fail(_of_system(error), EXIT_USAGE, verbose)
    except Exception as error:
        what = f"this is a bug ({type(error).__name__}: {error})"
        return _fail(f"{what}; please run it again with --verbose and report what it prints", EXIT_BUG, verbose)


def program(main: Callable[[], int]) -> NoReturn:
    """Runs ``main`` as the program of this process and exits with its status; a request to end (SIGTERM) cleans up first."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the process that started this one
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))
    # Numba imports it for linear algebra, which no kernel needs, if SciPy is installed; that takes half a second.
    sys.modules.setdefault("scipy.linalg.cython_blas", None)  # type: ignore[arg-type]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # the terminal and temporary files are restored
    try:
        status = main()
    except KeyboardInterrupt:  # while a tool is imported; main() handles later ones
        status = EXIT_INTERRUPTED
    sys.exit(status)


def use_utf8() -> None:
    """Makes pipes and files carry UTF-8 whatever the locale is; a terminal keeps its encoding but never fails."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=stream.encoding if stream.isatty() else "utf-8", errors="replace")


def _of_system(error: OSError) -> str:
    named = f"{error.filename}: " if error.filename else ""
    return f"{named}{error.strerror or error}"


def _fail(sentence: str, status: int, verbose: bool) -> int:
    """Prints why a command ends, and returns its exit status."""
    if verbose:
        traceback.print_exc()
    print(f"error: {shown(sentence, MOST)}", file=sys.stderr)
    return status


def _abandon_output() -> None:
    """Redirects an output that cannot be written to the null device: the interpreter flushes both once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
