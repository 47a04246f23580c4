"""Several prompts at once: which arguments are lists of prompts, and how their answers are computed together."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from engine.decode.generation import Generation, advance
from engine.errors import ContextError, UsageError

T = TypeVar("T")


def is_several(prompt: object) -> bool:
    """Whether a prompt is a list of prompts: its first item is a text, or itself a sequence."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], (str, Sequence))


def each(name: str, prompts: Sequence[T], make: Callable[[T], Generation]) -> list[Generation]:
    """What ``make`` makes of each prompt.  Its UsageError or ContextError says which one is wrong; name: what a prompt is
    called."""
    made = []
    for i, prompt in enumerate(prompts):
        try:
            made.append(make(prompt))
        except (UsageError, ContextError) as error:
            raise type(error)(f"{name} {i}: {error}") from None
    return made


def finish(answers: Sequence[Generation], parallel: int, progress: bool = False) -> None:
    """Compute answers to their ends, ``parallel`` of them at a time.  If one fails, all end."""
    waiting = iter(answers)
    running = deque(itertools.islice(waiting, parallel))
    try:
        with _bar(len(answers), progress) as ended:
            while running:
                # One token of each in turn: a pass that computes a token of one has a row of every other.
                answer = running.popleft()
                if advance(answer):
                    running.append(answer)
                else:
                    ended()
                    running.extend(itertools.islice(waiting, 1))
    finally:
        for answer in answers:
            answer.close()


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, if it is to be shown and stderr is a terminal.  Call what it yields for each step."""
    if shown:
        # Imported here: it takes a while.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if console.is_terminal:
            columns: Iterable[Any] = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bar:
                task = bar.add_task("answers", total=total)
                yield lambda: bar.advance(task)
            return
    yield lambda: None
