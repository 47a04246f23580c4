"""The requests whose prompts are read, slice by slice, between the steps of those that run."""

import time
from collections import deque
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

PATIENCE = 1e-3
"""Seconds of a pass after which the prompts that have arrived meanwhile are looked at."""

POLL_SECONDS = 5e-5
"""The time, in seconds, that the host sleeps while it waits for prompts or for the end of a pass."""


class PrefillQueue:
    """Reads the tokens that requests need before they can run: in passes over slices of the earliest ones, and a pass in
    pieces if others run.

    A device gets the next pass while it computes the one before, as soon as no further prompt could join it, or else at the
    end of the one before, whose results are then taken.  So it has work while the host chooses first tokens.
    """

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
        #: The passes that have been begun and whose results have not been taken, oldest first.  Only the latest may have
        #: pieces that are not started.
        self._readings: deque[Reading] = deque()

    def read(self) -> None:
        """Start pieces of a pass over tokens that requests need, or take what the oldest one has computed, or both; at least
        one request must be in its prefill.  Raises Displaced, NoRoom and FailedStep."""
        self._forget_left()
        started = self._start()
        if not started and self._can_gather():
            self._gather()
            if self._readings[0].passing.is_running():
                return
            started = self._start()
        self._forget_left()
        if self._is_due(started):
            self._take()

    def drop(self) -> None:
        """Start no further piece of the passes that have been started, and drop their results."""
        while self._readings:
            self._readings.pop().cancel()

    def _forget_left(self) -> None:
        """Forget the passes that all requests have left."""
        self._readings = deque(reading for reading in self._readings if reading.members or reading.passed)

    @contextmanager
    def _guarded(self, requests: Sequence[Request]) -> Iterator[None]:
        """Let an unexpected error end a single request, or raise FailedStep for several."""
        with self._alone(requests[0]) if len(requests) == 1 else as_failed_step(requests):
            yield

    # --- choose ------------------------------------------------------------------------------------------------------

    def _chosen(self) -> list[tuple[Prefilling, int]]:
        """The requests of the next pass, the earliest first, and how many tokens it reads of each; 0 of one that has all."""
        # An interrupt may have come between a pass and what its requests know of it, so the passes decide.
        idle = (each for each in self._batch.prefilling if each.reading not in self._readings)
        waiting = sorted(idle, key=lambda each: each.request.number)
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

    def _start(self) -> bool:
        """Start pieces of the latest pass, or of the next one; returns whether there are any to start now."""
        reading = self._readings[-1] if self._readings else None
        if reading is None or not reading.passing.left:
            reading = self._begin()
        if reading is not None:
            with self._guarded(reading.requests):
                self._advance(reading)
        return reading is not None

    def _is_due(self, started: bool) -> bool:
        """Whether to take the results of the oldest pass now; started: whether pieces have just been started."""
        if not self._readings or self._readings[0].passing.left:
            return False
        latest = self._readings[-1].passing
        if not started:
            return True
        if len(self._readings) > 1:
            # The device has enough to do meanwhile, or nobody waits.
            return latest.left == 0 or len(self._in_flight) > 0 or not self._readings[0].passing.is_running()
        # To wait for logits, let a step or the next pass be started before, unless it uses the memory of this pass.
        ahead = self._batch.model.prompts_ahead > 1 or (latest.n_logits > 0 and self._beside)
        return latest.pieces == 1 or not ahead

    def _begin(self) -> Reading | None:
        """The next pass; None if there is nothing to read, or if results must be taken first."""
        if len(self._readings) >= self._batch.model.prompts_ahead:
            return None
        chosen = self._chosen()
        if self._readings and not self._can_follow([count for _, count in chosen]):
            return None
        members, slices = list[Prefilling](), list[PrefillSlice]()
        for member, count in chosen:
            part = None
            with self._alone(member.request):
                try:
                    part = self._slice(member, count)
                except NoPages:
                    if not slices and not self._readings:
                        raise NoRoom(member.request) from None
                    break  # this pass reads the others, or the one before may free pages
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
                self._readings.append(reading)
        return reading

    def _can_follow(self, counts: Sequence[int]) -> bool:
        """Whether a pass over slices of so many tokens may begin before the results of the one in flight are taken.

        Prompts that arrive meanwhile may join a pass that is not full, so it begins when the one before has ended.  A pass of
        few rows uses the memory of steps, and the logits of scored tokens stay in that of prompts.
        """
        before, rows = self._readings[0], sum(counts)
        if rows <= self._batch.decode_rows or any(request.scored for request in before.requests):
            return False
        is_full = rows >= self._batch.model.prompt_rows or len(counts) == MOST_TOGETHER
        return is_full or not before.passing.is_running()

    def _can_gather(self) -> bool:
        """Whether prompts that arrive before the pass in flight has ended may be read right after it."""
        if self._in_flight or not 0 < len(self._readings) < self._batch.model.prompts_ahead:
            return False
        return not self._beside or self.goes_on

    def _gather(self) -> None:
        """Wait for the end of the pass in flight, but not for long."""
        self._batch.on_wait()
        passing, end = self._readings[0].passing, time.perf_counter() + PATIENCE
        while passing.is_running() and time.perf_counter() < end:
            time.sleep(POLL_SECONDS)

    def _slice(self, member: Prefilling, count: int) -> PrefillSlice | None:
        """The next ``count`` tokens of a request, whose positions are claimed; None if there are none.  Raises NoPages, and
        Displaced."""
        request, first, total = member.request, member.sequence.length, len(member.request.target)
        if not member.sequence.intact:
            raise Displaced(request)
        if count == 0:
            self._run(member, np.empty((0, 0), np.float32))
            return None
        if first == member.kept:
            self._report(member, first)
        if request.error is not None:
            return None
        self._batch.model.prepare(first, count, member.sequence)
        n_logits = int(first + count == total and not request.begun)
        if request.scored:
            n_logits = max(0, min(count, first + count - request.scored_from))
        return PrefillSlice(member.slot, request.target[first : first + count], n_logits, member.stops)

    def _take(self) -> None:
        """Wait for the oldest pass, and go on with its requests."""
        reading, beside = self._readings[0], self._beside
        passing, members, logits = reading.passing, list[tuple[Prefilling, PrefillSlice]](), None
        with self._guarded(reading.requests):
            self._batch.on_wait()
            self._readings.popleft()
            members = reading.end()
            logits = dict(zip(passing.slices, passing.finish(beside), strict=True))
        if logits is None:
            return
        if reading.rushed:
            self._pace.read(passing.rows, reading.rushed)
        if self._readings and not beside:
            # The next step takes longer by the pass that follows, which begins now.
            self._pace.started()
            self._pace.ended = time.perf_counter()
            follows = self._readings[0].passing
            self._pace.read(follows.rows, follows.pieces - follows.left)
        for member, part in reading.passed:
            if member.request.state is member:
                with self._alone(member.request):
                    self._report(member, part.end)
        for member, part in members:
            with self._alone(member.request):
                self._read_on(member, part, logits[part])

    def _advance(self, reading: Reading) -> None:
        """Start pieces of a pass: all of them, or as many as the running requests should wait for.  Requests that need
        nothing of the pass may then go on with the next one."""
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
        if not passing.left:
            for member, part in list(reading.members):
                if self._needs_nothing(member, part):
                    with self._alone(member.request):
                        reading.let_pass(member, part)

    def _needs_nothing(self, member: Prefilling, part: PrefillSlice) -> bool:
        """Whether the next slice of a request can follow when a pass has been started and not ended."""
        goes_on = part.end < len(member.request.target)
        return goes_on and not (part.n_logits or self._thins(member.request))

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
        else:
            self._report(member, part.end)

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
        if self._readings and (latest := self._readings[-1].passing).left:
            return self._pace.has_time(latest.rows, self._share)
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
