"""``POST /v1/embeddings``: texts as vectors."""

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from engine.checks import described
from engine.embeddings import finished
from engine.errors import EngineError, UsageError
from engine.serving.aside import aside
from engine.serving.budget import Claim
from engine.serving.errors import Refusal, refusal_of
from engine.serving.exchange import computed
from engine.serving.fields import Fields, is_token_id
from engine.serving.openai.shapes import error_body
from engine.serving.served import Served

NUMBER_BYTES = 64
"""About the bytes that an element of a vector takes, in memory and in JSON."""


async def embeddings(request: Request) -> Response:
    """The vectors of texts."""

    async def answer(fields: Fields, served: Served) -> Mapping[str, Any]:
        coded = fields.choice("encoding_format", ("float", "base64"), "float") == "base64"
        dimensions = fields.whole("dimensions", 0, 1, served.llm.config.n_embd)
        ids = await read_ids(request, fields, "input", served, read_truncate(fields))
        vectors = finished(await served.embedder.pooled(ids), True, dimensions)
        data = [{"object": "embedding", "index": i, "embedding": _written(row, coded)} for i, row in enumerate(vectors)]
        return {"object": "list", "data": data, "model": served.name, "usage": usage(ids)}

    return await computed(request, answer, error_body)


def _written(vector: np.ndarray, coded: bool) -> str | list[float]:
    """A vector as a list of numbers, or as little-endian float32 in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if coded else vector.tolist()


def usage(ids: Sequence[Sequence[int]]) -> Mapping[str, int]:
    """The tokens of a request."""
    count = sum(map(len, ids))
    return {"prompt_tokens": count, "total_tokens": count}


def read_truncate(fields: Fields) -> bool | int:
    """Whether texts are cut, and to how many tokens: vLLM's ``truncate_prompt_tokens``, where -1 is the context."""
    most = fields.whole("truncate_prompt_tokens", 0, -1)
    return True if most == -1 else most or False


async def read_ids(
    request: Request, fields: Fields, name: str, served: Served, truncate: bool | int, with_ids: bool = True
) -> list[list[int]]:
    """The token ids of a field that is a text or a list of texts, or, if ``with_ids``, of token ids or of lists of them."""
    if problem := served.llm.why_no_vectors:
        # As an error of a command, which names flags.
        raise Refusal(str(UsageError(problem)), 501, code="not_supported")
    texts = read_texts(fields, name, served, with_ids)
    await Claim.of(request).grow(NUMBER_BYTES * len(texts) * served.llm.config.n_embd)
    return await aside(fields.size, partial(checked_ids, name, partial(served.llm.embedding_ids, texts, truncate)))


def read_texts(fields: Fields, name: str, served: Served, with_ids: bool) -> list[Any]:
    """The entries of a field that is a text or a list of texts, or, if ``with_ids``, of token ids or of lists of them."""
    value, limits, n_vocab = fields.required(name), served.limits, served.llm.config.n_vocab
    kinds = "a text or a list of texts" + (", of token ids or of lists of token ids" if with_ids else "")
    single = isinstance(value, str) or (with_ids and isinstance(value, list) and value and type(value[0]) is int)
    texts = [value] if single else value
    if not isinstance(texts, list) or not texts:
        raise fields.refuse(name, f"must be {kinds}, not {described(value)}")
    if len(texts) > limits.prompts:
        raise fields.refuse(name, f"has {len(texts)} entries and this server accepts {limits.prompts} (--prompts)")
    for i, each in enumerate(texts):
        place = name if single else f"{name}[{i}]"
        if with_ids and isinstance(each, list) and each:
            wrong = [id for id in each if not is_token_id(id, n_vocab)][:1]
            if wrong:
                raise fields.refuse(place, f"must be token ids, 0 to {n_vocab - 1}, not {described(wrong[0])}")
        elif not isinstance(each, str):
            problem = "a text or a list of token ids" if with_ids else "a text"
            raise fields.refuse(place, f"must be {problem}, not {described(each)}")
    return texts


def checked_ids(name: str, read: Callable[[], list[list[int]]]) -> list[list[int]]:
    """The token ids that ``read`` returns; its errors are refusals of the field ``name``."""
    try:
        return read()
    except EngineError as error:
        refusal = refusal_of(error)
        refusal.param = name
        raise refusal from error
