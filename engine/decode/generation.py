"""One answer during its generation: an iterator of text that also records tokens, probabilities and timings."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from typing import Any, Protocol

import numpy as np

from engine import schemas
from engine.checks import shown
from engine.decode.request import Request
from engine.decode.timings import Timings
from engine.errors import UsageError
from engine.locking import Lock
from engine.receipts.parameters import Parameters
from engine.receipts.record import Record
from engine.sampling.processors import Ended, Ending
from engine.sampling.sampler import Sampler, token_logprob
from engine.sampling.token_logprob import TokenLogprob
from engine.schemas import Schema
from engine.speculative.speculation import Speculation
from engine.speculative.statistics import Statistics
from engine.text.shown import Piece, Shown
from engine.text.tokenizer import Tokenizer
from engine.tools.call import ToolCall, divided, identity
from engine.tools.formats.parser import Parser

BEGINNING = 40
"""Characters of an answer that its ``repr`` shows."""


class AnsweringModel(Protocol):
    """The interface of a loaded model that an answer uses; ``engine.llm.LLM`` implements it."""

    tokenizer: Tokenizer
    n_ctx: int
    load_seconds: float
    compile_seconds: float

    def identity(self) -> dict[str, Any]:
        """The object whose hash is its fingerprint."""

    def tokens(self, request: Request) -> Generator[tuple[int, np.ndarray], None, None]:
        """The tokens of a request, each with the logits that it was chosen from, float32 [n_vocab] or empty."""


class Generation:
    """One answer, from :meth:`LLM.generate`, :meth:`LLM.complete` or :meth:`LLM.chat`.

    Iterate over it to get the text in pieces while it is generated. Each piece is computed when it is requested, or a little
    earlier together with other answers. The attributes can be read at any time. A finished answer can be copied and pickled.

    Attributes
    ----------
    text : str
        The text so far, without the prompt.
    ids : list of int
        Tokens whose text was produced so far, without the end-of-generation token.
    prompt_ids : list of int
        Tokens of the prompt.
    finish_reason : str or None
        "stop" (an end-of-generation token or a stop text), "length" (``max_tokens`` or the context), or "tool_calls" (it
        stopped, and calls functions). None while the answer is generated, and if it was closed early.
    seed : int
        The seed in use, also if it was chosen at random. The same seed gives the same text.
    logprobs : list of TokenLogprob
        One entry per token of ``ids`` if ``logprobs`` was given, else empty.
    end_logprob : TokenLogprob or None
        That of the end-of-generation token, if ``logprobs`` was given and there was one.
    timings : Timings
        Seconds and counts.
    speculation : Statistics or None
        Counts of drafts, if there is a source of drafts.
    content, reasoning : str
        At the end of an answer of :meth:`LLM.chat`: its text without thoughts and calls, and its thoughts; of another
        answer: its text, and "".
    tool_calls : list of ToolCall
        At the end of an answer of :meth:`LLM.chat` with ``tools``: the functions that it calls.
    schema : mapping, class or None
        What the answer follows, as it was given.

    Examples
    --------
    >>> import engine
    >>> llm = engine.load(n_ctx=256)
    >>> answer = llm.generate("def add(a, b):\\n    return", max_tokens=4, temperature=0)
    >>> for piece in answer:
    ...     print(repr(piece))
    ' a'
    ' +'
    ' b'
    '\\n\\n'
    >>> answer
    <Generation: 4 tokens, ended by 'length', ' a + b\\n\\n'>
    """

    def _begin(
        self,
        llm: AnsweringModel,
        prompt_ids: list[int],
        sampler: Sampler,
        *,
        max_tokens: int,
        stop: Sequence[str],
        ignore_eos: bool,
        top_logprobs: int,
        begins_with: str,
        on_prefill: Callable[[int, int], None] | None,
        speculation: Speculation | None,
        ending: Ending,
        salt: str = "",
        schema: Schema | None = None,
        receipt: bool = False,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprob] = []
        self.end_logprob: TokenLogprob | None = None
        self.finish_reason: str | None = None
        self.seed = sampler.seed
        self.speculation: Statistics | None = speculation.statistics if speculation is not None else None
        self.timings = Timings(load_s=llm.load_seconds, compile_s=llm.compile_seconds)
        self.content = self.reasoning = ""
        self.tool_calls: list[ToolCall] = []
        self.schema = schema
        self._turn = Lock()
        self._parser: Callable[[], Parser] | None = None
        self._llm = llm
        self._stop = stop
        self._top_logprobs = top_logprobs
        self._begins_with = begins_with
        self._on_prefill = on_prefill
        self._closing = False
        self._ending = ending
        #: When the answer was asked for, when its prompt had been read, and the tokens that the cache held.
        self._started = self._begun = time.perf_counter()
        self._first: int | None = None
        room = llm.n_ctx - len(prompt_ids)
        self._request = Request(
            prompt_ids,
            sampler,
            room if max_tokens < 0 else min(room, max_tokens),
            speculation,
            top_logprobs > 0,
            salt=salt,
            ends=() if ignore_eos else llm.tokenizer.eog_ids,
            allowed=llm.tokenizer.beginning_with(begins_with) if begins_with else None,
            on_prefill=self._prefilled,
            receipt=receipt,
        )
        self._record: Record | None = None
        if receipt:
            params, grammar = replace(sampler.params, seed=sampler.seed), sampler.matcher and sampler.matcher.grammar
            ends_late = ignore_eos or (sampler.matcher is not None and sampler.matcher.ends_late)
            most = self._request.left
            parameters = Parameters(params, most, stop, (), ends_late, begins_with, grammar or None)
            self._record = Record(prompt_ids, parameters)
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        # Not while another thread computes the next piece of this answer.
        with self._turn:
            if self._running:
                raise UsageError(
                    "a function that an answer has called must not continue it; it may end it with close()."
                )
            while not (piece := next(self._pieces)):
                pass  # a token without text
            return piece

    def close(self) -> None:
        """End the answer early: no further token is computed. Does nothing if the answer has ended.

        ``on_prefill`` and logits processors may also call it: the answer then ends when they return, without the token
        that was being chosen.
        """
        if self._ending.asked():
            return
        if not self._turn.acquire(blocking=False):
            self._closing = True  # another thread computes its next piece
            return
        try:
            if self._running:
                self._closing = True
            else:
                self._pieces.close()
        finally:
            self._turn.release()

    @property
    def _running(self) -> bool:
        """Whether a function that this answer has called is running, provided that this thread has the turn."""
        return getgeneratorstate(self._pieces) == GEN_RUNNING

    @property
    def done(self) -> bool:
        """Whether the answer has ended, for whatever reason: no further text follows."""
        return getgeneratorstate(self._pieces) == GEN_CLOSED

    def __repr__(self) -> str:
        if self.done:
            end = f"ended by {self.finish_reason!r}" if self.finish_reason else "closed early"
        else:
            end = "in progress"
        beginning = self.text if len(self.text) <= BEGINNING else self.text[: BEGINNING - 1] + "…"
        return f"<Generation: {len(self.ids)} token{'s' * (len(self.ids) != 1)}, {end}, {beginning!r}>"

    def __getstate__(self) -> dict[str, Any]:
        if not self.done:
            raise TypeError(
                "an answer in progress cannot be pickled or copied, because it uses its model: "
                "wait for its end, or send its text or ids."
            )
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._turn = Lock()
        self._ending = Ending()
        self._record = None
        self._pieces = _nothing()
        self._pieces.close()

    @property
    def message(self) -> dict[str, Any]:
        """A finished answer of :meth:`LLM.chat` as a message, to be appended to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message for call in self.tool_calls]
        return message

    def receipt(self) -> dict[str, Any]:
        """The receipt of a finished answer that was asked for with ``receipt=True``.

        Returns
        -------
        dict
            An object for JSON: what identifies the model, the prompt, the parameters with the seed in use, the tokens, and of
            each the digest of the logits that it was chosen from, with a chain of hashes over all of it.
            :meth:`LLM.verify` replays it, on any device; ``docs/receipts.md`` says what it proves.

        Raises
        ------
        UsageError
            If no receipt was asked for, if the answer has not ended, or if its model was closed before the first receipt.

        Examples
        --------
        >>> import engine
        >>> llm = engine.load(n_ctx=256)
        >>> answer = llm.complete("def add(a, b):", max_tokens=8, seed=1, receipt=True)
        >>> llm.verify(answer.receipt()).same
        True
        """
        if self._record is None:
            raise UsageError("there is no receipt: ask for one (receipt=True) when you ask for the answer.")
        if not self.done:
            raise UsageError("an answer in progress has no receipt: wait for its end.")
        return self._record.receipt(self._llm.identity(), self.finish_reason)

    @property
    def parsed(self) -> Any:
        """What a finished answer with a ``schema`` means: an object of the class that was given, or else a value of Python.
        None if the answer calls functions instead.

        Raises UsageError if there is no schema, or if the answer is not complete.
        """
        if self.schema is None:
            raise UsageError("there is nothing to parse: give a schema (schema=...) when you ask for the answer.")
        if self.tool_calls:
            return None
        try:
            return schemas.parsed(self.schema, self.content if self.done else self.text)
        except ValueError as error:
            if self.finish_reason == "stop":
                raise UsageError(f"the answer does not follow the schema: {shown(str(error))}.") from error
            problem = (
                "it reached its limit, so allow more tokens (max_tokens=...)"
                if self.finish_reason
                else "wait for its end"
            )
            raise UsageError(f"the answer is not complete JSON: {problem}.") from None

    def _run(self) -> Generator[str, None, None]:
        """Generate tokens, decode them, and yield the text that may be shown after each; "" if there is none."""
        yield from self._said()
        self._divide()

    def _divide(self) -> None:
        """Find the thoughts and the calls in the answer, which has ended."""
        if self._parser is None:
            self.content = self.text
            return
        cut, own = self.finish_reason != "stop", identity(self.prompt_ids, self.seed)
        found = divided(self.ids, self._llm.tokenizer, self._stop, self._parser(), cut=cut, identity=own)
        self.content, self.reasoning, self.tool_calls = found.content, found.reasoning, found.calls
        if self.finish_reason == "stop" and found.calls:
            self.finish_reason = "tool_calls"

    def _said(self) -> Generator[str, None, None]:
        text = Shown(self._llm.tokenizer, self._stop, begins_with=self._begins_with)
        for token in self._tokens():
            pieces = text.feed(token)
            if text.stopped:
                self.finish_reason = "stop"
                yield self._show(pieces)
                return
            yield self._show(pieces)
        pieces = text.flush()
        if text.stopped:
            self.finish_reason = "stop"
        yield self._show(pieces)

    def _show(self, pieces: Sequence[Piece]) -> str:
        text = "".join(piece.text for piece in pieces)
        self.text += text
        return text

    # --- tokens ------------------------------------------------------------------------------------------------

    def _took(self, token: int, logits: np.ndarray) -> bool:
        """Record the next token of the request, and the logits it was chosen from, float32 [n_vocab] or empty.  Returns
        whether it has text; if it has none, it ended the answer."""
        timings, now = self.timings, time.perf_counter()
        timings.predicted_n += 1
        timings.predicted_s = now - self._begun
        if timings.predicted_n == 1:
            timings.first_token_s = now - self._started
        if self._record is not None:
            self._record.add(token, self._request.rows.popleft())
        if token in self._request.ends:
            self.finish_reason = "stop"
            if self._top_logprobs:
                self.end_logprob = self._logprob(logits, token)
            return False
        self.ids.append(token)
        if self._top_logprobs:
            self.logprobs.append(self._logprob(logits, token))
        return True

    def _tokens(self) -> Iterator[int]:
        """One token after another, until one ends the answer."""
        self._started = self._begun = time.perf_counter()
        following = self._llm.tokens(self._request)
        try:
            for token, logits in following:
                if self._closing or not self._took(token, logits):
                    return
                yield token
            self.finish_reason = "length"
        except Ended:
            return
        finally:
            following.close()

    def _prefilled(self, done: int, total: int) -> None:
        """Count tokens of the prompt while it is read, because that may be interrupted."""
        timings = self.timings
        if self._first is None:
            timings.cache_n = self._first = done
        timings.prompt_n, timings.dropped_n = done - self._first, self._request.dropped
        self._begun = time.perf_counter()
        timings.prompt_s = self._begun - self._started
        if self._on_prefill:
            self._on_prefill(done, total)
        if self._closing:
            raise Ended

    def _logprob(self, logits: np.ndarray, token: int) -> TokenLogprob:
        return token_logprob(self._llm.tokenizer, logits, token, self._top_logprobs)


def begun(llm: AnsweringModel, prompt_ids: list[int], sampler: Sampler, **how: Any) -> Generation:
    """An answer that waits to be computed; how: the other arguments of ``Generation._begin``."""
    answer = Generation.__new__(Generation)
    answer._begin(llm, prompt_ids, sampler, **how)
    return answer


def advance(answer: Generation) -> bool:
    """Compute the next token of an answer, which nobody else iterates over, whether it has text or not.  Returns False at the
    end."""
    with answer._turn:
        return next(answer._pieces, None) is not None


def request_of(answer: Generation) -> Request:
    """What the scheduler computes for an answer.  A driver submits it, and hands its tokens to :func:`took` instead of
    iterating over the answer."""
    return answer._request


def took(answer: Generation, token: int, logits: np.ndarray) -> bool:
    """Record the next token of an answer; see ``Generation._took``."""
    return answer._took(token, logits)


def record_of(answer: Generation) -> Record | None:
    """What a receipt of an answer is made of; None if none was asked for."""
    return answer._record


def divide(generation: Generation, parser: Callable[[], Parser]) -> Generation:
    """Let a parser find thoughts and calls in an answer that has not begun."""
    generation._parser = parser
    return generation


def _nothing() -> Generator[str, None, None]:
    yield from ()
