"""An answer as Ollama writes it: one JSON object, or a stream of them, one per line."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.sampling.token_logprob import TokenLogprob
from engine.serving.answer import Answer, Ask
from engine.serving.exchange import Plan
from engine.serving.ollama.said import Listening, Said
from engine.serving.ollama.shapes import now
from engine.serving.openai.shapes import chat_logprobs
from engine.serving.streams import line, merged
from engine.text.tokenizer import Tokenizer

DONE_REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop"}
"""Why an answer ended, in Ollama's words."""


@dataclass(frozen=True)
class Clock:
    """When a request came, and when its model was open, in nanoseconds of ``time.monotonic_ns``."""

    came: int
    opened: int


@dataclass(frozen=True)
class Lines:
    """How an answer is written down.

    model: the name that the client uses; form: the fields that hold what is said; tokenizer: that of the model; top: how
    many of the most probable tokens to report per token, None: no log-probabilities; clock: what durations are counted from.
    """

    model: str
    form: Callable[[Said], Mapping[str, Any]]
    tokenizer: Tokenizer
    top: int | None
    clock: Clock

    def plan(self, ask: Ask) -> Plan:
        """The plan of a request that asks for one answer."""
        return Plan([ask], self._whole, self._chunks)

    async def _whole(self, answers: list[Answer]) -> Mapping[str, Any]:
        (answer,) = answers
        deltas = [delta async for _, delta in merged(answers)]
        said = Listening(answer).feed(event for delta in deltas for event in delta.events)
        tokens = [token for delta in deltas for token in delta.logprobs]
        return self._line(said) | self._logprobs(tokens) | self._end(answer)

    async def _chunks(self, answers: list[Answer]) -> AsyncIterator[str]:
        (answer,) = answers
        listening = Listening(answer)
        async for _, delta in merged(answers):
            said, logprobs = listening.feed(delta.events), self._logprobs(delta.logprobs)
            if any(said) or logprobs:
                yield line(self._line(said) | logprobs)
        yield line(self._line(Said()) | self._end(answer))

    def _line(self, said: Said) -> dict[str, Any]:
        return {"model": self.model, "created_at": now(), **self.form(said), "done": False}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self.top is None or not tokens:
            return {}
        return {"logprobs": chat_logprobs(self.tokenizer, tokens, self.top)["content"]}

    def _end(self, answer: Answer) -> dict[str, Any]:
        timings = answer.generation.timings
        return {
            "done": True,
            "done_reason": DONE_REASONS[answer.finish_reason],
            "total_duration": time.monotonic_ns() - self.clock.came,
            "load_duration": self.clock.opened - self.clock.came,
            "prompt_eval_count": answer.n_prompt,
            "prompt_eval_duration": round(1e9 * timings.prompt_s),
            "eval_count": answer.n_completion,
            "eval_duration": round(1e9 * timings.predicted_s),
        }
