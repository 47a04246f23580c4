"""The requests whose prompts are read, slice by slice, between the steps of those that run."""

import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from engine.cache.pages import NoPages
from engine.cache.thinning import first_observed, kept_chunks, thins
from engine.decode.pace import Pace
from engine.decode.preemption import Displaced, NoRoom, as_failed_step
from engine.decode.prefill import Prefilling, PrefillPass, PrefillSlice, Reading
from engine.decode.request import Request
from engine.decode.running_batch import RunningBatch
from engine.limits import MOST_LOGITS, MOST_TOGETHER, REPLAYED_ROWS
from engine.sampling.finite import check_rows


class PrefillQueue:
    """Reads the tokens that requests need before they can run: in passes over slices of the earliest ones, and a pass in
    pieces if others run."""

    def __init__(
        self,
        batch: RunningBatch,
        pace: Pace,
        in_flight: Sized,
        alone: Callable[[Request], AbstractContextManager[None]],
    ) -> None:
        """in_flight: the batches in flight; alone: a context that lets an unexpected error end a request, and no other."""
        self._batch = batch
        self._pace = pace
        self._in_flight = in_flight
        self._alone = alone

    @property
    def _reading(self) -> Reading | None:
        """The pass that has been started and not finished."""
        return next((each.reading for each in self._batch.prefilling if each.reading is not None), None)

    def read(self) -> None:
        """Start pieces of a pass over tokens that requests need, or take what it has computed; at least one request must be
        in its prefill.  Raises Displaced, NoRoom and FailedStep."""
        reading = self._reading or self._begin()
        if reading is None:
            return
        logits = None
        with self._guarded([member.request for member, _ in reading.members]):
            logits = self._computed(reading)
        if logits is None:
            return
        for member, part in reading.members:
            with self._alone(member.request):
                self._read_on(member, part, logits[part])

    def drop(self) -> None:
        """Start no further piece of the pass that has been started, if there is one."""
        if (reading := self._reading) is not None:
            reading.cancel()

    @contextmanager
    def _guarded(self, requests: Sequence[Request]) -> Iterator[None]:
        """Let an unexpected error end a single request, or raise FailedStep for several."""
        with self._alone(requests[0]) if len(requests) == 1 else as_failed_step(requests):
            yield

    # --- choose ------------------------------------------------------------------------------------------------------

    def _chosen(self) -> list[tuple[Prefilling, int]]:
        """The requests of the next pass, the earliest first, and how many tokens it reads of each; 0 of one that has all."""
        waiting = sorted(
            (each for each in self._batch.prefilling if each.reading is None), key=lambda each: each.request.number
        )
        if waiting and self._joins(waiting[0]):
            waiting = [waiting[0], *(each for each in waiting[1:] if self._joins(each) and each.sequence.intact)]
            waiting = waiting[:MOST_TOGETHER]
        else:
            waiting = waiting[:1]
        lefts = [self._left(each) for each in waiting]
        rows, chosen = self._rows(sum(lefts)) if sum(lefts) else 0, []
        for member, left in zip(waiting, lefts, strict=True):
            chosen.append((member, min(left, rows)))
            rows -= min(left, rows)
            if rows == 0:
                break
        return chosen

    def _joins(self, member: Prefilling) -> bool:
        """Whether a pass may read tokens of a request together with those of others.  After a failed pass, it may not: so the
        request that fails is found."""
        request, model = member.request, self._batch.model
        return model.reads_together and not (request.scored or request.failures or self._thins(request))

    def _left(self, member: Prefilling) -> int:
        """The most tokens of a request that the next pass can read."""
        request, first, total = member.request, member.sequence.length, len(member.request.target)
        if self._thins(request):
            observed = first_observed(request.n_read)
            if observed <= first:
                # Few rows at a time: observed ones, or those of an answer that are read again over what has stayed.
                end = request.n_read if first < request.n_read else total
                return min(end - first, self._batch.decode_rows)
            total = observed
        # The output of the trunk that a layer which drafts needs is still there when a pass ends; states are not.
        borders = member.stops if self._batch.served.recurrent_bytes else set()
        left = min((stop for stop in borders if stop > first), default=total) - first
        if request.scored:
            most = MOST_LOGITS if request.reader is None else REPLAYED_ROWS
            left = min(left, max(0, request.scored_from - first) + most)
        return left

    def _rows(self, left: int) -> int:
        """The number of tokens to read in the next pass, of ``left`` ones: fewer if others run meanwhile, unless the pass can
        be split."""
        model = self._batch.model
        if self._beside and not model.splits:
            return self._pace.rows(left, model.prompt_rows, self._share)
        return model.next_rows(left, self._beside)

    # --- read --------------------------------------------------------------------------------------------------------

    def _begin(self) -> Reading | None:
        """The next pass; None if there is nothing to read."""
        members, slices = list[Prefilling](), list[PrefillSlice]()
        for member, count in self._chosen():
            part = None
            with self._alone(member.request):
                try:
                    part = self._slice(member, count)
                except NoPages:
                    if not slices:
                        raise NoRoom(member.request) from None
                    break  # this pass reads the others
            if part is not None:
                members.append(member)
                slices.append(part)
        reading = None
        if slices:
            with self._guarded([member.request for member in members]):
                observed = self._is_observed(members[0].request, slices[0].first)
                reader = members[0].request.reader if slices[0].n_logits else None
                passing = PrefillPass(self._batch.model, slices, observed, not self._beside, reader)
                reading = Reading(passing, members)
        return reading

    def _slice(self, member: Prefilling, count: int) -> PrefillSlice | None:
        """The next ``count`` tokens of a request, whose positions are claimed; None if there are none.  Raises NoPages, and
        Displaced."""
        request, first, total = member.request, member.sequence.length, len(member.request.target)
        if not member.sequence.intact:
            raise Displaced(request)
        if count == 0:
            self._run(member, np.empty((0, 0), np.float32))
            return None
        self._report(member, first)
        if request.error is not None:
            return None
        self._batch.model.prepare(first, count, member.sequence)
        n_logits = int(first + count == total and not request.begun)
        if request.scored:
            n_logits = max(0, min(count, first + count - request.scored_from))
        return PrefillSlice(member.slot, request.target[first : first + count], n_logits, member.stops)

    def _computed(self, reading: Reading) -> dict[PrefillSlice, np.ndarray] | None:
        """Start pieces of a pass.  Returns the logits of its slices, float32 [n_logits, n_vocab] each, if it has ended and
        they can be awaited."""
        passing = reading.passing
        if passing.left:
            self._advance(reading)
            # To wait for logits, let a step be started before, unless it uses the memory of this pass.
            if passing.left or (passing.n_logits and self._beside and passing.pieces > 1):
                return None
        elif reading.rushed:
            self._pace.read(passing.rows, reading.rushed)
        self._batch.on_wait()
        reading.end()
        return dict(zip(passing.slices, passing.finish(self._beside), strict=True))

    def _advance(self, reading: Reading) -> None:
        """Start pieces of a pass: all of them, or as many as the running requests should wait for."""
        passing = reading.passing
        rows, count, begun = passing.rows, passing.pieces, time.perf_counter()
        if self._beside:
            count = self._pace.pieces(rows, count, self._share)
        if not self._batch.model.splits:
            self._batch.on_wait()  # the host computes them
        try:
            started = passing.advance(count)
        except BaseException:
            reading.cancel()  # a piece may have been started or not
            raise
        if self._beside:
            if not self._in_flight and not self._pace.reads:
                self._pace.ended = begun
            self._pace.read(rows, started)
        else:
            self._pace.started()  # no step follows

    def _read_on(self, member: Prefilling, part: PrefillSlice, logits: np.ndarray) -> None:
        """Go on with a request, of which a pass has read a slice; logits: those of its last tokens, float32 [n_logits,
        n_vocab], or what the reader of the request has made of them."""
        request = member.request
        part.commit()
        if request.scored and len(logits):
            self._score(member, part.end - len(logits), logits)
            logits = logits[-1:]
        if part.end == request.n_read:
            self._thin(member)
        if part.end == len(request.target):
            self._run(member, logits)

    def _run(self, member: Prefilling, logits: np.ndarray) -> None:
        """Let a request run, all of whose tokens have been read; logits: float32 [1, n_vocab], not used if it has begun."""
        if member.slot.store is not None:
            member.slot.store.computed(len(member.request.target) - member.kept, time.perf_counter() - member.begun)
        self._report(member, len(member.request.target))
        if member.request.error is None:
            self._batch.run(member, logits)

    def _thins(self, request: Request) -> bool:
        """Whether layers without a window keep only a part of a request's prompt."""
        return thins(request.n_read, self._batch.model.cache.budget)

    def _is_observed(self, request: Request, first: int) -> bool:
        """Whether the rows of a request from index ``first`` on are those that decide what it keeps."""
        return self._thins(request) and first_observed(request.n_read) <= first < request.n_read

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
        reading = self._reading
        if reading is not None and reading.passing.left:
            return self._pace.has_time(reading.passing.rows, self._share)
        rows = sum(count for _, count in self._chosen())
        return rows > 0 and self._pace.has_time(rows, self._share)

    @property
    def _beside(self) -> bool:
        """Whether requests wait for their next token meanwhile."""
        return self._batch.n_running > 0

    @property
    def _share(self) -> float:
        """The time, in seconds, for which prompts should be read between two steps."""
        groups = -(-self._batch.n_running // self._batch.most_answers(self._batch.n_running))
        return self._pace.share(len(self._batch.prefilling), max(1, groups))

    def _score(self, prefilling: Prefilling, first: int, logits: np.ndarray) -> None:
        """Report the logits after tokens of a prompt."""
        request = prefilling.request
        assert request.on_logits is not None
        try:
            if request.reader is not None:
                request.reader.check(logits, first)
            else:
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
