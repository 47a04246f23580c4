"""``POST /v1/score``: the log-probabilities of texts, each read once."""

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.sampling.token_logprob import TokenLogprob
from engine.serving.answer import Answer, Ask
from engine.serving.aside import aside
from engine.serving.exchange import TOKEN_BYTES, Plan, respond
from engine.serving.fields import Fields
from engine.serving.openai.completions import read_prompts
from engine.serving.openai.shapes import error_body, error_event, finite, logprob_of
from engine.serving.served import Served
from engine.serving.streams import merged
from engine.text.tokenizer import Tokenizer
from engine.tools.formats.plain import plain


async def score(request: Request) -> Response:
    """The log-probability of each token of some texts.  The texts are read together with what else is computed."""
    return await respond(request, _read, error_event, error=error_body)


async def _read(fields: Fields, served: Served) -> Plan:
    if fields.flag("stream", False):
        raise fields.refuse("stream", "is not supported by /v1/score, whose answers come as a whole: leave it out")
    llm, limits = served.llm, served.limits
    texts = await aside(fields.size, partial(read_prompts, fields, llm, limits, name="input"))
    top = fields.whole("top_logprobs", 0, 0, limits.top_logprobs, "--top-logprobs")
    most = limits.queue + len(llm.slots)
    if len(texts) > most:
        problem = f"has {len(texts)} texts and this server reads at most {most} at once (--queue)"
        raise fields.refuse("input", problem)
    # As in LLM.score, no token is computed.
    asks = [Ask(ids, plain, {"max_tokens": 0}, logprobs=top, scored=True) for ids in texts]
    fingerprint = await served.fingerprint()
    whole = partial(_whole, served=served, fingerprint=fingerprint, top=top)
    return Plan(asks, whole, _no_chunks)


async def _whole(answers: list[Answer], served: Served, fingerprint: str, top: int) -> Mapping[str, Any]:
    async for _ in merged(answers):
        pass
    size = TOKEN_BYTES * (1 + top) * sum(answer.n_prompt for answer in answers)
    data = await aside(size, lambda: [_scores(i, each, served.llm.tokenizer, top) for i, each in enumerate(answers)])
    n_tokens = sum(answer.n_prompt for answer in answers)
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    head = {"object": "list", "model": served.name, "system_fingerprint": fingerprint}
    return head | {"data": data, "usage": usage}


def _scores(index: int, answer: Answer, tokenizer: Tokenizer, top: int) -> Mapping[str, Any]:
    """The scores of one text; the first token has none."""
    ids, scores = answer.generation.prompt_ids, answer.prompt_scores
    assert scores is not None
    found: dict[str, Any] = {
        "object": "score",
        "index": index,
        "tokens": ids,
        "token_logprobs": [None, *(finite(score.logprob) for score in scores)],
        "logprob": finite(sum(score.logprob for score in scores)),
    }
    if top:
        found["top_logprobs"] = [None, *(_likely(score, tokenizer) for score in scores)]
    return found


def _likely(score: TokenLogprob, tokenizer: Tokenizer) -> Sequence[Mapping[str, Any]]:
    return [logprob_of(tokenizer, other) for other in score.top]


async def _no_chunks(answers: list[Answer]) -> AsyncIterator[str]:
    raise AssertionError(answers)
    yield ""
