"""The requests whose prompts are read, slice by slice, between the steps of those that run."""

import time
from collections.abc import Sized

import numpy as np

from engine.cache.pages import NoPages
from engine.cache.thinning import first_observed, kept_chunks, thins
from engine.decode.pace import Pace
from engine.decode.preemption import Displaced, NoRoom
from engine.decode.prefill import Prefilling, PrefillSlice
from engine.decode.request import Request
from engine.decode.running_batch import RunningBatch
from engine.limits import MOST_LOGITS
from engine.sampling.finite import check_rows


class PrefillQueue:
    """Reads the tokens that requests need before they can run: slice by slice, and a slice in pieces if others run."""

    def __init__(self, batch: RunningBatch, pace: Pace, in_flight: Sized) -> None:
        """in_flight: the batches in flight."""
        self._batch = batch
        self._pace = pace
        self._in_flight = in_flight

    @property
    def first(self) -> Prefilling:
        """The earliest request in its prefill; there must be one."""
        return min(self._batch.prefilling, key=lambda prefilling: prefilling.request.number)

    def read(self, prefilling: Prefilling) -> None:
        """Read a slice of the tokens that a request needs.  Raises Displaced, and NoRoom."""
        request, sequence, total = prefilling.request, prefilling.sequence, len(prefilling.request.target)
        if prefilling.slice is None and not sequence.intact:
            raise Displaced(request)
        first = sequence.length
        try:
            if prefilling.slice is None:
                if first < total or not request.begun:
                    self._report(prefilling, first)
                if request.error is not None:
                    return
            logits = np.empty((0, 0), np.float32)
            if first < total:
                current = prefilling.slice = prefilling.slice or self._slice(prefilling, first, total)
                if current.left:
                    self._advance(prefilling, current)
                    # To wait for logits, let a step be started before, unless it uses the memory of this pass.
                    if current.left or (current.n_logits and self._beside and current.pieces > 1):
                        return
                self._batch.on_wait()
                prefilling.slice, logits = None, current.finish(self._beside)
                if request.scored and len(logits):
                    self._score(prefilling, first + len(current.tokens) - len(logits), logits)
                    logits = logits[-1:]
                first += len(current.tokens)
                if first == request.n_read:
                    self._thin(prefilling)
            if first < total:
                return
            self._report(prefilling, total)
            if request.error is None:
                self._batch.run(prefilling, logits)
        except NoPages:
            raise NoRoom(request) from None

    def _slice(self, prefilling: Prefilling, first: int, total: int) -> PrefillSlice:
        """The tokens to read in the next pass: fewer if others run meanwhile, unless the pass can be split."""
        request, rows = prefilling.request, self._rows(prefilling, first, total)
        n_logits = int(first + rows == total and not request.begun)
        if request.scored:
            n_logits = max(0, min(rows, first + rows - request.scored_from))
        tokens = request.target[first : first + rows]
        observed = self._thins(request) and first_observed(request.n_read) <= first < request.n_read
        return PrefillSlice(self._batch.model, prefilling.slot, tokens, n_logits, prefilling.stops, observed)

    def _rows(self, prefilling: Prefilling, first: int, total: int) -> int:
        """The number of tokens to read in the next pass, of those from index ``first`` to ``total``."""
        model, request = self._batch.model, prefilling.request
        if self._thins(request):
            observed = first_observed(request.n_read)
            if observed <= first:
                # Few rows at a time: observed ones, or those of an answer that are read again over what has stayed.
                end = request.n_read if first < request.n_read else total
                return min(end - first, self._batch.decode_rows)
            total = observed
        # The output of the trunk that a layer which drafts needs is still there when a pass ends; states are not.
        borders = prefilling.stops if self._batch.served.recurrent_bytes else set()
        left = min((stop for stop in borders if stop > first), default=total) - first
        if request.scored:
            unscored = request.scored_from - first
            left = min(left, unscored if unscored > 0 else MOST_LOGITS)
        if self._beside and not model.splits:
            return self._pace.rows(left, model.prompt_rows, self._share)
        return model.next_rows(left, self._beside)

    def _advance(self, prefilling: Prefilling, current: PrefillSlice) -> None:
        """Start pieces of a slice: all of them, or as many as the running requests should wait for."""
        rows, count, begun = len(current.tokens), current.pieces, time.perf_counter()
        if self._beside:
            count = self._pace.pieces(rows, count, self._share)
        if not self._batch.model.splits:
            self._batch.on_wait()  # the host computes them
        try:
            started = current.advance(count)
        except BaseException:
            prefilling.cancel()  # a piece may have been started or not
            raise
        if self._beside:
            if not self._in_flight and not self._pace.reads:
                self._pace.ended = begun
            self._pace.read(rows, started)
        else:
            self._pace.started()  # no step follows

    def _thins(self, request: Request) -> bool:
        """Whether layers without a window keep only a part of a request's prompt."""
        return thins(request.n_read, self._batch.model.cache.budget)

    def _thin(self, prefilling: Prefilling) -> None:
        """Drop the chunks of a prompt, all of which has been read, that its last rows attend to least."""
        request, sequence = prefilling.request, prefilling.sequence
        if not self._thins(request):
            return
        model = self._batch.model
        kept = kept_chunks(model.masses(sequence), request.n_read, model.cache.budget)
        sequence.thin(kept)
        request.dropped = sequence.dropped

    @property
    def goes_on(self) -> bool:
        """Whether more of prompts is to be read before the next step."""
        if not self._beside:
            return False
        waiting = [each for each in self._batch.prefilling if each.slice is None or each.slice.left]
        if not waiting:
            return False
        prefilling = min(waiting, key=lambda each: each.request.number)
        if prefilling.slice is not None:
            return self._pace.has_time(len(prefilling.slice.tokens), self._share)
        first, total = prefilling.sequence.length, len(prefilling.request.target)
        return first < total and self._pace.has_time(self._rows(prefilling, first, total), self._share)

    @property
    def _beside(self) -> bool:
        """Whether requests wait for their next token meanwhile."""
        return self._batch.n_running > 0

    @property
    def _share(self) -> float:
        """The time, in seconds, for which prompts should be read between two steps."""
        groups = -(-self._batch.n_running // self._batch.decode_rows)
        return self._pace.share(len(self._batch.prefilling), max(1, groups))

    def _score(self, prefilling: Prefilling, first: int, logits: np.ndarray) -> None:
        """Report the logits after tokens of a prompt."""
        request = prefilling.request
        assert request.on_logits is not None
        try:
            check_rows(logits, first)
            with self._batch.served.reserved("on_logits"):
                request.on_logits(first, logits)
        except Exception as error:
            self._batch.finish(prefilling, error)

    def _report(self, prefilling: Prefilling, done: int) -> None:
        """Report how much of a prompt has been read."""
        request = prefilling.request
        if request.on_prefill is not None and not request.begun:
            try:
                with self._batch.served.reserved("on_prefill"):
                    request.on_prefill(done, len(request.target))
            except Exception as error:
                self._batch.finish(prefilling, error)
