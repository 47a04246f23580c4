"""One answer during its generation: an iterator of text that also records tokens, probabilities and timings."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from engine.decode.sampler import Sampler, logprobs
from engine.decode.timings import Timings
from engine.speculative.loop import Speculation
from engine.text.tokenizer import Tokenizer


class AnsweringModel(Protocol):
    """The interface of a loaded model that an answer uses; ``engine.llm.LLM`` implements it."""

    tokenizer: Tokenizer
    n_ctx: int
    load_seconds: float
    compile_seconds: float

    def prefill(
        self, ids: Sequence[int], on_prefill: Callable[[int, int], None] | None = None
    ) -> tuple[np.ndarray, int]:
        """Make the cache hold exactly ``ids``.  Returns the logits after the last one, float32 [n_vocab], and the number of
        tokens that the cache already held."""

    def decode(
        self,
        ids: Sequence[int],
        sampler: Sampler,
        count: int,
        speculation: Speculation | None = None,
        with_logits: bool = False,
    ) -> Generator[tuple[int, np.ndarray], None, None]:
        """Generate ``count`` tokens after ``ids``, each with the logits that it was chosen from, float32 [n_vocab]."""


class Generation:
    """One answer.  Iterate over it to get the text in pieces.  ``ids``, ``text``, ``logprobs``, ``finish_reason`` and
    ``timings`` are valid at any time.

    ``finish_reason`` is "stop" (end-of-generation token or stop text), "length" (``max_tokens`` or the context), or None
    while the answer is generated or if it was closed early.  ``ids`` contains the tokens whose text was produced, without
    the end-of-generation token.  ``begins_with`` is text that the first token must begin with: the last token of the prompt,
    removed so that a longer token may replace it (token healing); it is not part of the answer.  ``speculation`` counts
    accepted drafts, if there are any.
    """

    def __init__(
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
    ) -> None:
        self.prompt_ids = prompt_ids
        self.ids: list[int] = []
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.seed = sampler.seed
        self.speculation = speculation.statistics if speculation is not None else None
        self.timings = Timings(load_s=llm.load_seconds, compile_s=llm.compile_seconds)
        self._llm = llm
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._stop = [text for text in stop if text]
        self._ignore_eos = ignore_eos
        self._top_logprobs = top_logprobs
        self._begins_with = begins_with
        self._on_prefill = on_prefill
        self._speculation = speculation
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the answer early: no further token is computed."""
        self._pieces.close()

    def _run(self) -> Generator[str, None, None]:
        """Generate tokens, decode them, and yield the text that may be shown."""
        decoder = self._llm.tokenizer.stream()
        held = ""
        for token in self._tokens():
            held += decoder.feed(token)
            if len(self.ids) == 1:
                held = held.removeprefix(self._begins_with)
            cut, safe = _find_stop(held, self._stop)
            if cut is not None:
                self.finish_reason = "stop"
                yield from self._show(held[:cut])
                return
            yield from self._show(held[:safe])
            held = held[safe:]
        held += decoder.flush()
        cut, _ = _find_stop(held, self._stop)
        if cut is not None:
            self.finish_reason = "stop"
            held = held[:cut]
        yield from self._show(held)

    def _show(self, text: str) -> Iterator[str]:
        if text:
            self.text += text
            yield text

    def _tokens(self) -> Iterator[int]:
        """Prefill, then one token after another, until one ends the answer."""
        llm, timings = self._llm, self.timings
        started = time.perf_counter()
        starts: list[int] = []

        def on_prefill(done: int, total: int) -> None:
            # Counted while the prompt is read, because that may be interrupted.
            starts.append(done)
            timings.cache_n, timings.prompt_n = starts[0], done - starts[0]
            timings.prompt_s = time.perf_counter() - started
            if self._on_prefill:
                self._on_prefill(done, total)

        logits, timings.cache_n = llm.prefill(self.prompt_ids, on_prefill)
        begun = time.perf_counter()
        timings.prompt_n = len(self.prompt_ids) - timings.cache_n
        timings.prompt_s = begun - started
        history = list(self.prompt_ids)
        room = llm.n_ctx - len(history)
        room = room if self._max_tokens < 0 else min(room, self._max_tokens)
        # It reads the history when its first token is requested.
        following = llm.decode(history, self._sampler, room - 1, self._speculation, self._top_logprobs > 0)
        try:
            for step in range(room):
                if step == 0:
                    choices = self._beginning(logits) if self._begins_with else logits
                    token = self._sampler.sample(choices, len(history), history)
                else:
                    token, logits = next(following)
                timings.predicted_n += 1
                timings.predicted_s = time.perf_counter() - begun
                if step == 0:
                    timings.first_token_s = time.perf_counter() - started
                if token in llm.tokenizer.eog_ids and not self._ignore_eos:
                    self.finish_reason = "stop"
                    return
                self.ids.append(token)
                if self._top_logprobs:
                    self.logprobs.append(_logprob_entry(logits, token, self._top_logprobs))
                yield token
                history.append(token)
            self.finish_reason = "length"
        finally:
            following.close()

    def _beginning(self, logits: np.ndarray) -> np.ndarray:
        """The logits with every token excluded whose text does not begin with ``begins_with``."""
        tokenizer, prefix = self._llm.tokenizer, self._begins_with.encode()
        allowed = [i for i in range(logits.size) if tokenizer.token_bytes(i).startswith(prefix)]
        kept = np.full_like(logits, -np.inf)
        kept[allowed] = logits[allowed]
        return kept


def _logprob_entry(logits: np.ndarray, token: int, n: int) -> dict[str, Any]:
    found = logprobs(logits, [token], n)
    top = [(int(i), float(v)) for i, v in zip(found.top_ids, found.top_values, strict=True)]
    return {"id": token, "logprob": float(found.values[0]), "top": top}


def _find_stop(text: str, stops: Sequence[str]) -> tuple[int | None, int]:
    """The index at which the first stop text begins (None if there is none), and the length of the part of ``text`` that can
    be shown: all except an end that may become a stop text."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    if found:
        return min(found), 0
    safe = len(text)
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:n]):
                safe = min(safe, len(text) - n)
                break
    return None, safe
