"""Prompts that are read, beside answers that wait for their next token."""

import time

import numpy as np

from engine.cache.pages import NoPages
from engine.decode.company import Company, Displaced, NoRoom
from engine.decode.flights import Flights
from engine.decode.pace import Pace
from engine.decode.part import Part
from engine.decode.request import Request
from engine.limits import MOST_LOGITS, STEP_ROWS
from engine.sampling.finite import check_rows


class Prompts:
    """Reads what the requests of a company need before they can run: part by part, and a part in pieces if others wait."""

    def __init__(self, company: Company, flights: Flights, pace: Pace) -> None:
        self._company = company
        self._flights = flights
        self._pace = pace

    @property
    def first(self) -> Request | None:
        """The earliest request that reads; None if none does."""
        reading = (request for request in self._company.active if request.reading)
        return min(reading, key=lambda request: request.number, default=None)

    def read(self, request: Request) -> None:
        """Read a part of the tokens that a request needs.  Raises Displaced, and NoRoom."""
        slot, target = request.slot, request.target
        assert slot is not None
        if request.part is None and not slot.sequence.intact:
            raise Displaced(request)
        first, total = slot.sequence.length, len(target)
        try:
            if request.part is None:
                if first < total or not request.begun:
                    self._tell(request, first)
                if request.error is not None:
                    return
            logits = np.empty((0, 0), np.float32)
            if first < total:
                part = request.part = request.part or self._part(request, first, total)
                if part.left:
                    self._advance(request, part)
                    # To wait for logits, let a step be started before, unless it uses the memory of this pass.
                    if part.left or (part.n_logits and self._beside and part.pieces > 1):
                        return
                self._company.on_wait()
                request.part, logits = None, part.finish(self._beside)
                if request.scored:
                    self._score(request, first, logits)
                    logits = logits[-1:]
                first += len(part.tokens)
            if first < total:
                return
            self._tell(request, total)
            if request.error is None:
                self._company.begin(request, logits)
        except NoPages:
            raise NoRoom(request) from None

    def _part(self, request: Request, first: int, total: int) -> Part:
        """The tokens to read in the next pass: fewer if others wait for their next token meanwhile, unless the pass can be
        split."""
        rows = self._rows(request, first, total)
        n_logits = rows if request.scored else int(first + rows == total and not request.begun)
        assert request.slot is not None
        return self._company.reader.part(request.slot, request.target[first : first + rows], n_logits, request.stops)

    def _rows(self, request: Request, first: int, total: int) -> int:
        """The number of tokens to read in the next pass, of those from index ``first`` to ``total``."""
        ops = self._company.model.ops
        # The output of the trunk that a layer which drafts needs is still there when a pass ends; states are not.
        borders = request.stops if self._company.reader.slot_bytes else set()
        left = min((stop for stop in borders if stop > first), default=total) - first
        if request.scored:
            left = min(left, MOST_LOGITS)
        if self._beside and not ops.splits:
            return self._pace.part(left, ops.max_rows, self._share)
        return ops.next_rows(left, self._beside)

    def _advance(self, request: Request, part: Part) -> None:
        """Start pieces of a part: all of them, or as many as those who wait for their next token should wait for."""
        rows, count, begun = len(part.tokens), part.pieces, time.perf_counter()
        if self._beside:
            count = self._pace.pieces(rows, count, self._share)
        if not self._company.model.ops.splits:
            self._company.on_wait()  # the host computes them
        try:
            started = part.advance(count)
        except BaseException:
            request.abandon()  # a piece may have been started or not
            raise
        if self._beside:
            self._flights.follow(rows, started, begun)
        else:
            self._flights.forget()

    @property
    def goes_on(self) -> bool:
        """Whether more of prompts is to be read before the next step."""
        if not self._beside:
            return False
        reading = [r for r in self._company.active if r.reading and (r.part is None or r.part.left)]
        if not reading:
            return False
        request = min(reading, key=lambda r: r.number)
        if request.part is not None:
            return self._pace.has_time(len(request.part.tokens), self._share)
        assert request.slot is not None
        first, total = request.slot.sequence.length, len(request.target)
        return first < total and self._pace.has_time(self._rows(request, first, total), self._share)

    @property
    def _beside(self) -> bool:
        """Whether answers wait for their next token meanwhile."""
        return self._company.n_running > 0

    @property
    def _share(self) -> float:
        """The time, in seconds, for which prompts should be read between two steps."""
        groups = -(-self._company.n_running // STEP_ROWS)
        return self._pace.share(self._company.n_reading, max(1, groups))

    def _score(self, request: Request, first: int, logits: np.ndarray) -> None:
        """Report the logits after tokens of a prompt."""
        assert request.on_logits is not None
        try:
            check_rows(logits, first)
            with self._company.reader.reserved("on_logits"):
                request.on_logits(first, logits)
        except Exception as error:
            self._company.fail(request, error)

    def _tell(self, request: Request, done: int) -> None:
        """Report how much of a prompt has been read."""
        if request.on_prefill is not None and not request.begun:
            try:
                with self._company.reader.reserved("on_prefill"):
                    request.on_prefill(done, request.n_prompt)
            except Exception as error:
                self._company.fail(request, error)
