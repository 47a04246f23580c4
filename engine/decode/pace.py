"""How much of a prompt is read at once while other answers wait for their next token."""

import math

from engine.limits import STEP_ROWS

SHARE = 1.5
"""The most time of a part of a prompt, or of pieces of one, in steps of the answers that wait for it."""

UNKNOWN = 32
"""Of a pass whose time is not known, one piece in this many is started at first."""

WEIGHT = 0.25
"""The weight of a new measurement in a mean: times vary, since the host is delayed at times."""


class Pace:
    """The times of steps and of parts of prompts.

    A step that follows pieces of a prompt ends later by their time, so neither has to be awaited by itself.
    """

    def __init__(self) -> None:
        self._step = 0.0
        #: Seconds of a piece, by the number of tokens of the part, and how many were read at once before.
        self._piece: dict[int, float] = {}
        self._latest: dict[int, int] = {}
        self._read = (0, 0)

    def read(self, rows: int, pieces: int) -> None:
        """Record that ``pieces`` pieces of a part of ``rows`` tokens are read before the next step."""
        before = self._read
        self._read = rows, pieces + (before[1] if before[0] == rows else 0)

    def started(self) -> tuple[int, int]:
        """What is read before the step that begins now: the number of tokens of the part, and of pieces."""
        read, self._read = self._read, (0, 0)
        return read

    def stepped(self, seconds: float, read: tuple[int, int]) -> None:
        """Record the end of a step, ``seconds`` after the one before it; read: what ``started`` returned when it began."""
        rows, pieces = read
        if not pieces:
            self._step += WEIGHT * (seconds - self._step) if self._step else seconds
            return
        piece = max(seconds - self._step, 0.0) / pieces
        mean = self._piece.get(rows, piece)
        self._piece[rows] = mean + WEIGHT * (piece - mean)

    def pieces(self, rows: int, total: int, crowd: float) -> int:
        """The number of pieces to read at once, of the ``total`` ones of a part of ``rows`` tokens, at least 1: as many as
        take their share of time, and at most twice as many as before; crowd: how many prompts there are per answer that
        waits, at least 1."""
        count, piece = max(1, total // UNKNOWN), self._piece.get(rows)
        if piece is not None:
            most = 2 * self._latest.get(rows, total)
            count = max(1, min(total, most, int(SHARE * crowd * self._step / piece) if piece else most))
        self._latest[rows] = count
        return count

    def part(self, left: int, most: int, crowd: float) -> int:
        """The number of tokens to read at once in one piece, of the ``left`` ones of a prompt and at most ``most``: a power
        of two, so that few programs serve all parts; 16, or as many as have not taken more than their share of time; crowd:
        how many prompts there are per answer that waits, at least 1."""
        most = 1 << (min(left, most).bit_length() - 1)
        size, share = min(most, STEP_ROWS), SHARE * crowd * self._step
        while size < most and self._piece.get(size, math.inf) <= share / 2:
            size *= 2
        while size > STEP_ROWS and self._piece.get(size, 0.0) > share:
            size //= 2
        return size
