"""``POST /v1/trace``: one token of a text, or of an answer, on its way through the layers."""

import asyncio
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.checks import described
from engine.errors import UsageError
from engine.limits import MOST_DRAFTS
from engine.serving.aside import aside
from engine.serving.errors import Refusal
from engine.serving.exchange import computed, salt_of
from engine.serving.fields import Fields, is_token_id
from engine.serving.openai.chat import read_conversation
from engine.serving.openai.completions import read_prompts
from engine.serving.openai.shapes import error_body
from engine.serving.served import Served

DRAFTS = 3
"""The default number of drafts."""


async def trace(request: Request) -> Response:
    """What a pass computes for a token between the embedding and the logits."""
    return await computed(request, partial(_answer, request), error_body)


async def _answer(request: Request, fields: Fields, served: Served) -> Mapping[str, Any]:
    llm, limits = served.llm, served.limits
    ids = await _read_ids(fields, served)
    token = fields.whole("token", -1, -len(ids), len(ids) - 1)
    top = fields.whole("top_logprobs", 5, 1, max(1, limits.top_logprobs), "--top-logprobs")
    drafts = fields.whole("drafts", DRAFTS, 0, MOST_DRAFTS)
    if served.n_replays >= limits.queue:
        problem = f"{served.n_replays} requests wait and this server lets {limits.queue} wait (--queue); try later."
        raise Refusal(problem, 503, retry_after=5)
    fingerprint = await served.fingerprint()
    left = threading.Event()

    def go_on(done: int, total: int) -> None:
        """Called between passes: end the trace if nobody waits for it."""
        if left.is_set():
            raise UsageError("nobody waits for this trace.")

    more: dict[str, Any] = {"token": token, "top": top, "drafts": drafts, "on_prefill": go_on}
    served.n_replays += 1
    try:
        async with served.replaying:
            found = await asyncio.to_thread(partial(llm.trace, ids, cache_salt=salt_of(request, fields), **more))
    finally:
        left.set()
        served.n_replays -= 1
    return {"model": served.name, "system_fingerprint": fingerprint} | await aside(
        fields.size, lambda: found.as_json(top)
    )


async def _read_ids(fields: Fields, served: Served) -> list[int]:
    """The tokens of ``input``, or those of the prompt of ``messages``; then those of ``answer``."""
    if fields.get("messages") is not None:
        if fields.get("input") is not None:
            raise fields.refuse("input", "and messages are both given: send one of them")
        prompt, _, _ = await read_conversation(fields, served)
        ids = prompt.ids
    else:
        texts = await aside(fields.size, partial(read_prompts, fields, served.llm, served.limits, name="input"))
        if len(texts) != 1:
            raise fields.refuse("input", f"has {len(texts)} texts, and one is traced at a time: send one")
        (ids,) = texts
    answer = fields.get("answer")
    if answer is None:
        return ids
    n_vocab = served.llm.config.n_vocab
    if not isinstance(answer, list) or not all(is_token_id(id, n_vocab) for id in answer):
        problem = f"must be a list of token ids of this model, 0 to {n_vocab - 1}, not {described(answer)}"
        raise fields.refuse("answer", problem)
    return [*ids, *answer]
