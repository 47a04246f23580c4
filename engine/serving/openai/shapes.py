"""What OpenAI's answers have in common: errors, usage and log-probabilities."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from engine.sampling.token_logprob import TokenLogprob
from engine.serving.answer import Answer
from engine.serving.errors import Refusal
from engine.serving.streams import sse
from engine.text.tokenizer import Tokenizer

UNLIKELY = -9999.0
"""The log-probability that is reported for a probability of 0, which JSON has no number for."""


def error_body(refusal: Refusal) -> dict[str, Any]:
    """The body of an error."""
    message = refusal.message
    if refusal.code == "context_length_exceeded":
        # litellm looks for these words, and then tries a model with a longer context.
        message = f"prompt is too long: {message}"
    fields = {"message": message, "type": refusal.kind, "param": refusal.param, "code": refusal.code}
    return {"error": fields | refusal.more}


def error_response(refusal: Refusal) -> Response:
    """The response of an error."""
    return JSONResponse(error_body(refusal), refusal.status, refusal.headers())


def error_event(refusal: Refusal) -> str:
    """An error in a stream that has begun."""
    return sse(error_body(refusal))


def usage_of(answers: Sequence[Answer], n_prompts: int = 1) -> dict[str, Any]:
    """The tokens of ``n_prompts`` prompts with as many answers each, and of the answers."""
    firsts = answers[:: max(1, len(answers) // n_prompts)]
    prompt, completion = sum(a.n_prompt for a in firsts), sum(a.n_completion for a in answers)
    counts = [a.generation.speculation for a in answers if a.generation.speculation is not None]
    accepted, drafted = sum(c.accepted for c in counts), sum(c.drafted for c in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(a.n_cached for a in firsts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(a.n_reasoning for a in answers),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def finite(value: float) -> float:
    """A log-probability as JSON can hold it."""
    return value if math.isfinite(value) else UNLIKELY


def logprob_of(tokenizer: Tokenizer, token: TokenLogprob) -> dict[str, Any]:
    """A token with its id, its log-probability and its bytes, which may be a part of a character."""
    data = tokenizer.token_bytes(token.id, special=True)
    return {"id": token.id, "token": token.text, "logprob": finite(token.logprob), "bytes": list(data)}


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob], top: int) -> Mapping[str, Any]:
    """The log-probabilities of tokens of a chat, with the ``top`` most probable tokens of each."""

    content = [
        logprob_of(tokenizer, token) | {"top_logprobs": [logprob_of(tokenizer, other) for other in token.top[:top]]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def timings_of(answer: Answer) -> dict[str, Any]:
    """Counts and times in llama-server's words."""
    t = answer.generation.timings
    return {
        "cache_n": t.cache_n,
        "prompt_n": t.prompt_n,
        "prompt_ms": round(1e3 * t.prompt_s, 3),
        "prompt_per_token_ms": round(1e3 * t.prompt_s / max(1, t.prompt_n), 3),
        "prompt_per_second": round(t.prompt_per_second, 3),
        "predicted_n": t.predicted_n,
        "predicted_ms": round(1e3 * t.predicted_s, 3),
        "predicted_per_token_ms": round(1e3 * t.predicted_s / max(1, t.predicted_n), 3),
        "predicted_per_second": round(t.predicted_per_second, 3),
        **({"dropped_n": t.dropped_n} if t.dropped_n else {}),
    }
