"""One answer of the server: the tokens of a driver, as events that an interface writes down."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.decode.generation import Generation, record_of, request_of
from engine.decode.scores import PromptScores
from engine.sampling.token_logprob import TokenLogprob
from engine.serving.driver import Driver, Listener, News
from engine.serving.errors import Refusal
from engine.serving.permitted import Permitted
from engine.text.shown import Piece, Shown
from engine.tools.call import identity
from engine.tools.formats.events import CallBegin, Event, Reasoning
from engine.tools.formats.parser import Parser

if TYPE_CHECKING:
    from engine.llm import LLM


@dataclass
class Ask:
    """What is asked of a model.

    prompt: token ids; options: keyword arguments of ``LLM.generate``; n: the number of answers; parser: makes what finds
    thoughts and calls in an answer; logprobs: how many of the most probable tokens to report per token, None: nothing;
    scored: report the log-probabilities of the prompt, too; stop: texts that end an answer; permitted: the tokens that it
    may consist of; receipt: whether a receipt is wanted; slot: the slot that it should get if it is free, -1: any.
    """

    prompt: list[int]
    parser: Callable[[], Parser]
    options: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    logprobs: int | None = None
    scored: bool = False
    stop: Sequence[str] = ()
    permitted: Permitted = Permitted()
    receipt: bool = False
    slot: int = -1

    def generations(self, llm: "LLM") -> list[Generation]:
        """Its answers, not yet begun.  Takes a while if they follow a grammar: call it in a thread then."""
        self.permitted.check(self.stop, self.options.get("grammar"))
        top = 0 if self.logprobs is None else max(1, self.logprobs)
        if processors := self.permitted.processors(llm, len(self.prompt)):
            if self.receipt:
                problem = (
                    "cannot be had with min_tokens or allowed_token_ids, which a replay does not know: leave them out."
                )
                raise Refusal(f"receipt {problem}", param="receipt")
            self.options["logits_processors"] = processors
        if self.receipt:
            self.options["receipt"] = True
        made = []
        for index in range(self.n):
            options = dict(self.options)
            if index and options.get("seed", -1) >= 0:
                options["seed"] = (options["seed"] + index) % 2**64
            made.append(llm.generate(self.prompt, logprobs=top, **options))
        return made


class Delta(NamedTuple):
    """What an answer says next: events, the tokens that they come from, their log-probabilities if asked for, and, if nothing
    follows, why it ended: "stop", "length" or "tool_calls"."""

    events: list[Event]
    ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str = ""


class Answer(Listener):
    """An answer that is being computed.  Iterate over it once to get its deltas; then read how it ended.

    Attributes
    ----------
    finish_reason : str
        "stop", "length" or "tool_calls"; "" before the end.
    stop_text : str
        The stop text that ended it, "" if none did.
    prompt_scores : list of TokenLogprob or None
        The log-probabilities of the tokens of the prompt from the second on, if they were asked for.
    generation : Generation
        Its tokens and timings.
    """

    def __init__(self, llm: "LLM", driver: Driver, ask: Ask, index: int, generation: Generation, backlog: int) -> None:
        self.generation = generation
        self.index = index
        self.finish_reason = ""
        self.stop_text = ""
        self.prompt_scores: list[TokenLogprob] | None = None
        self.error: Exception | None = None
        self.created = time.monotonic()
        #: When its first and its latest token arrived.
        self.first_token = self.latest_token = 0.0
        self._llm = llm
        self._driver = driver
        self._backlog = backlog
        self._parser = ask.parser()
        self._shown = Shown(llm.tokenizer, ask.stop, control=True)
        self._ends = ask.permitted.ends
        self._controls = self._parser.tags
        self._tokens: deque[int] = deque()
        self._taken = 0
        self._paused = False
        self._called = False
        self._with_logprobs = ask.logprobs is not None
        self._stop = ask.stop
        #: The number of tokens up to the one that ended it, if the request names that, or a stop text; None: all that were
        #: computed.
        self._n_receipt: int | None = None
        #: Tokens of thoughts so far.
        self.n_reasoning = 0
        #: Called as ``on_tokens(answer, n, now)`` when ``n`` tokens arrive.
        self.on_tokens: Callable[[Answer, int, float], None] | None = None
        #: Called once, when the answer has ended for whatever reason.
        self.on_end: Callable[[Answer], None] | None = None
        self._over = False
        self._news = asyncio.Event()
        if ask.scored:
            scores = PromptScores(llm.tokenizer, ask.prompt, ask.logprobs or 0)
            request_of(self.generation).on_logits, self.prompt_scores = scores, scores.found
        request_of(self.generation).wanted_slot = ask.slot
        driver.submit(self)

    # --- from the driver -------------------------------------------------------------------------------------------

    def receive(self, news: News) -> None:
        """Take note of what one or several rounds have brought."""
        if news.tokens:
            now = time.monotonic()
            if self.on_tokens is not None:
                self.on_tokens(self, len(news.tokens), now)
            self.latest_token = now
            self.first_token = self.first_token or now
            self._tokens += news.tokens
            if len(self._tokens) > self._backlog and not self._paused:
                self._paused = True
                self._driver.pause(request_of(self.generation))
        self._over = self._over or news.done
        self.error = self.error or news.error
        self._news.set()

    # --- for an interface ------------------------------------------------------------------------------------------

    async def arrived(self) -> None:
        """Wait until the next delta is there, or what ended the answer."""
        while not self._tokens and not self._over:
            self._news.clear()
            await self._news.wait()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas, each with all tokens that have arrived, or with one if log-probabilities are wanted.  Raises what
        ended the answer, if that was an error.  Ends the answer if it is left early."""
        try:
            while True:
                await self.arrived()
                if not self._tokens:
                    break
                delta = self._next()
                if not (self.finish_reason or self._tokens or self.error) and self._over:
                    # The end is written together with the last token.
                    last = self._last()
                    delta = delta._replace(events=delta.events + last.events, finish_reason=last.finish_reason)
                yield delta
                if self.finish_reason:
                    return
                if self._tokens:
                    await asyncio.sleep(0)  # with log-probabilities there may be hundreds of deltas to write
            if self.error is not None:
                raise self.error
            yield self._last()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Compute no further token.  Has no effect at the end."""
        if not self._over:
            self._driver.cancel(request_of(self.generation))
        ended, self.on_end = self.on_end, None
        if ended is not None:
            ended(self)

    def _next(self) -> Delta:
        # Writing takes time that the steps of other answers need, so tokens that wait are written together.  The
        # log-probabilities of a token go with the events of this token.
        ids = [self._tokens.popleft() for _ in range(1 if self._with_logprobs else len(self._tokens))]
        # It may have lost its slot, and what is computed next should be worth reading its tokens again.
        if self._paused and len(self._tokens) <= self._backlog // 2:
            self._paused = False
            self._driver.proceed(request_of(self.generation))
        events: list[Event] = []
        ended = False
        for i, token in enumerate(ids):
            if token in self._ends:
                # It ends the answer like a token of the model that does, and has no text.
                ended, ids = True, ids[: i + 1]
                events += self._parsed(self._shown.flush())
                break
            new = self._parsed(self._shown.feed(token))
            self.n_reasoning += any(isinstance(event, Reasoning) for event in new)
            events += new
            if self._shown.stopped:
                ids = ids[: i + 1]
                break
        delta = self._delta(events, ids)
        if self._shown.stopped or ended:
            self._n_receipt = self._taken
            self.stop_text = self._shown.stopped
            rest = self._end("stop")
            return delta._replace(events=delta.events + rest, finish_reason=self.finish_reason)
        return delta

    def _last(self) -> Delta:
        events = self._parsed(self._shown.flush())
        self.stop_text = self._shown.stopped
        reason = "stop" if self.stop_text else self.generation.finish_reason or "length"
        return self._delta(events + self._end(reason), [])._replace(finish_reason=self.finish_reason)

    def _end(self, reason: str) -> list[Event]:
        events = self._parser.finish(cut=reason == "length")
        self._note(events)
        self.finish_reason = "tool_calls" if self._called and reason == "stop" else reason
        return events

    def _parsed(self, pieces: Sequence[Piece]) -> list[Event]:
        events: list[Event] = []
        for text, special in pieces:
            # Other control tokens are no text.
            if not special or text in self._controls or not self._is_control(text):
                events += self._parser.feed(text, special)
        self._note(events)
        return events

    def _note(self, events: Sequence[Event]) -> None:
        self._called = self._called or any(isinstance(event, CallBegin) for event in events)

    def _is_control(self, text: str) -> bool:
        tokenizer = self._llm.tokenizer
        id = tokenizer.token_id(text)
        return id is not None and not tokenizer.token_bytes(id)

    def _delta(self, events: list[Event], ids: list[int]) -> Delta:
        first, self._taken = self._taken, self._taken + len(ids)
        return Delta(events, ids, self.generation.logprobs[first : self._taken] if self._with_logprobs else [])

    # --- receipts --------------------------------------------------------------------------------------------------

    def receipt(self) -> dict[str, Any]:
        """The field ``receipt`` of an answer that has ended, empty if none was asked for.  The fingerprint must be known, for
        it takes a while."""
        record = record_of(self.generation)
        if record is None:
            return {}
        parameters = replace(record.parameters, stop=self._stop, stop_token_ids=sorted(self._ends))
        made = record.receipt(self._llm.identity(), self.finish_reason, self._n_receipt, parameters)
        return {"receipt": made}

    # --- ids of calls ----------------------------------------------------------------------------------------------

    def call_id(self, index: int, prefix: str = "call_") -> str:
        """The id of the call with an index: the same for the same prompt and seed, another in the next turn."""
        return f"{prefix}{self._identity}{index:06x}"

    @cached_property
    def _identity(self) -> str:
        """A digest of prompt and seed.  The answers to one request have different seeds."""
        return identity(self.generation.prompt_ids, self.generation.seed)

    # --- usage -----------------------------------------------------------------------------------------------------

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.generation.prompt_ids)

    @property
    def n_read(self) -> int:
        """Tokens of the prompt that were read or that the cache held, so far."""
        timings = self.generation.timings
        return timings.cache_n + timings.prompt_n

    @property
    def age(self) -> float:
        """Seconds since it was asked for."""
        return time.monotonic() - self.created

    @property
    def n_cached(self) -> int:
        """Tokens of the prompt that were not read again."""
        return self.generation.timings.cache_n

    @property
    def n_completion(self) -> int:
        """Tokens of the answer that were sent, with the one that ended it."""
        # One that the request names, or that completes a stop text, was sent, whatever was computed after it.
        sent = bool(self.stop_text) or self._n_receipt is not None
        ended = bool(self.finish_reason) and self.generation.finish_reason == "stop" and not sent
        return self._taken + int(ended)
