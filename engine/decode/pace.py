"""How much of a prompt is read at once while other answers wait for their next token."""

import math

from engine.limits import STEP_ROWS

SHARE = 1.8
"""The most time of a part of a prompt, in steps of the answers that wait for it."""


class Pace:
    """The times of steps and of parts of prompts.

    A step that follows a part of a prompt ends later by the time of the part, so neither has to be awaited by itself.
    """

    def __init__(self) -> None:
        self._step = 0.0
        #: Seconds of parts, by their number of tokens.
        self._parts: dict[int, float] = {}
        self._read = 0

    def read(self, count: int) -> None:
        """Record that ``count`` tokens of a prompt are read before the next step."""
        self._read += count

    def stepped(self, seconds: float) -> None:
        """Record the end of a step, ``seconds`` after the one before it."""
        if self._read:
            self._parts[self._read] = max(seconds - self._step, 0.0)
            self._read = 0
        else:
            self._step = seconds

    def part(self, left: int, most: int) -> int:
        """The number of tokens to read at once, of the ``left`` ones of a prompt and at most ``most``: a power of two, so
        that few graphs serve all parts; 16, or as many as have not taken more than their share of time."""
        most = 1 << (min(left, most).bit_length() - 1)
        size, share = min(most, STEP_ROWS), SHARE * self._step
        while size < most and self._parts.get(size, math.inf) <= share / 2:
            size *= 2
        while size > STEP_ROWS and self._parts.get(size, 0.0) > share:
            size //= 2
        return size
