"""Ctrl-C in the middle of a pass on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.cpu.runtime.program import Program


@contextmanager
def interrupted(ops: Any, share: float, after: int = 0) -> Iterator[None]:
    """A context in which the pass that begins when ``after`` others have ended computes this share of its operations and
    raises KeyboardInterrupt."""
    passes = 0

    def run_program(program: Program) -> None:
        nonlocal passes
        passes += 1
        if passes <= after:
            whole(program)
            return
        begun = Program()
        begun.operations, begun._words = program.operations[: int(share * len(program))], program._words
        begun.finish()
        whole(begun)
        raise KeyboardInterrupt

    whole = ops.run_program
    ops.run_program = run_program
    try:
        yield
    finally:
        del ops.run_program
    assert passes == after + 1
