"""How much of prompts is read at once while other requests run."""

import math
from collections.abc import Mapping

SHARE = 1.35
"""The time for which one prompt is read between two steps, in units of the time of a step."""

MOST_SECONDS = 0.5
"""The most seconds by which several prompts delay the next token of a request."""

UNKNOWN = 32
"""If the time of a pass is not known, one of this many pieces is started at first."""

WEIGHT = 0.25
"""The weight of a new measurement in a running mean."""

LEAST_SECONDS = 1e-6
"""The least time of a piece.  A short piece may end while the host prepares the next step; its measured time is then 0."""

LEAST_ROWS = 16
"""The least number of tokens of a slice that is read in one piece, unless fewer are left."""

Read = Mapping[int, int]
"""What is read between two steps: the number of pieces, by the number of tokens of the slice that they belong to."""


class Pace:
    """Measured times of steps and of slices of prompts.

    The time of pieces is measured without waiting for them: the step that follows them takes longer by their time.
    """

    def __init__(self) -> None:
        self._step = 0.0
        #: Seconds of a piece, by the number of tokens of the slice, and the most pieces that were read at once.
        self._piece: dict[int, float] = {}
        self._most: dict[int, int] = {}
        #: What is read before the next step.
        self.reads: dict[int, int] = {}
        #: When the latest step ended, or the time that is measured began, of ``time.perf_counter``.
        self.ended = 0.0
        #: The most prompts that have waited since the latest step.
        self.prompts = 0

    def read(self, rows: int, pieces: int) -> None:
        """Record that ``pieces`` pieces of a slice of ``rows`` tokens are read before the next step."""
        self.reads[rows] = self.reads.get(rows, 0) + pieces

    def started(self) -> Read:
        """What is read before the step that begins now."""
        read, self.reads, self.prompts = self.reads, {}, 0
        return read

    def stepped(self, seconds: float, read: Read) -> None:
        """Record the end of a step, ``seconds`` after the one before it; read: what ``started`` returned when it began."""
        if not read:
            self._step += WEIGHT * (seconds - self._step) if self._step else seconds
            return
        # Pieces of unknown time are read by themselves.  Others differ from what was expected by the same factor.
        took, expected = max(seconds - self._step, 0.0), self._seconds(read)
        for rows, count in read.items():
            mean = self._piece.get(rows)
            if mean is not None and expected == math.inf:
                continue
            now = took / count if mean is None else mean + WEIGHT * (mean * took / expected - mean)
            self._piece[rows] = max(LEAST_SECONDS, now)

    def _seconds(self, read: Read) -> float:
        """The time that is expected for what is read."""
        return sum(count * self._piece.get(rows, math.inf) for rows, count in read.items())

    def share(self, prompts: int, groups: int) -> float:
        """Seconds for which prompts should be read between two steps.

        prompts: the number of prompts that wait; groups: the number of steps in which every running request gets a token.
        A single prompt should delay the others little.  Several prompts get more time, up to a bound: a step of one request
        takes almost as long as a step of many, so every step taken before they join delays them all.  Prompts that were
        completed since the latest step count, too; otherwise the last ones would wait for steps with few rows.
        """
        self.prompts = prompts = max(self.prompts, prompts)
        share = prompts**2 * SHARE * self._step
        return share if prompts < 2 else max(SHARE * self._step, min(share, MOST_SECONDS / groups))

    def has_time(self, rows: int, share: float) -> bool:
        """Whether a further piece of a slice of ``rows`` tokens may be read before the next step."""
        return not self.reads or self._seconds(self.reads) + self._piece.get(rows, math.inf) <= share

    def pieces(self, rows: int, total: int, share: float) -> int:
        """The number of pieces to read at once, of the ``total`` ones of a slice of ``rows`` tokens, at least 1: as many as
        fit into ``share`` seconds with what has been read since the latest step, and at most twice as many as ever before,
        since a few do not tell the mean time of all."""
        count, piece = max(1, total // UNKNOWN), self._piece.get(rows)
        if piece is not None:
            left, most = max(0.0, share - self._seconds(self.reads)), 2 * self._most.get(rows, total)
            count = max(1, min(total, most, int(left / piece)))
        self._most[rows] = max(count, self._most.get(rows, 0))
        return count

    def rows(self, left: int, most: int, share: float) -> int:
        """The number of tokens to read at once in one piece, of the ``left`` ones of a prompt and at most ``most``: a power
        of two, so that few programs serve all parts; ``LEAST_ROWS``, or as many as have not taken more than ``share``
        seconds."""
        most = 1 << (min(left, most).bit_length() - 1)
        size = min(most, LEAST_ROWS)
        while size < most and self._piece.get(size, math.inf) <= share / 2:
            size *= 2
        while size > LEAST_ROWS and self._piece.get(size, 0.0) > share:
            size //= 2
        return size
