"""``POST /v1/rerank``: documents in the order of their relevance for a query, in the words of Jina, Cohere and TEI."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from engine.checks import described
from engine.serving.aside import aside
from engine.serving.errors import Refusal
from engine.serving.exchange import computed
from engine.serving.fields import Fields
from engine.serving.openai.embeddings import checked_ids, read_truncate, usage
from engine.serving.openai.shapes import error_body
from engine.serving.served import Served


async def rerank(request: Request) -> Response:
    """The scores of documents, the best first.

    ``documents`` are texts or objects with a ``text``.  With ``texts`` in their place, the answer is that of Hugging Face's
    TEI: a list, and texts are cut if ``truncate`` says so.
    """
    return await computed(request, _answer, error_body)


async def _answer(fields: Fields, served: Served) -> Mapping[str, Any] | Sequence[Any]:
    llm, limits = served.llm, served.limits
    if problem := llm.why_no_scores:
        raise Refusal(problem, 501, code="not_supported")
    query, listed = fields.required_text("query"), "texts" in fields
    name = "texts" if listed else "documents"
    fields.required(name)
    given = fields.items(name, limits.prompts, "--prompts")
    if not given:
        raise fields.refuse(name, "is empty: give at least one text")
    texts = [_text(fields, f"{name}[{i}]", each) for i, each in enumerate(given)]
    most = fields.whole("top_n", len(texts), 1)
    quoted = fields.flag("return_text", False) if listed else fields.flag("return_documents", False)
    truncate = fields.flag("truncate", False) if listed else read_truncate(fields)
    ids = await aside(
        fields.size * len(texts), partial(checked_ids, name, partial(llm.rank_ids, query, texts, truncate))
    )
    scores = llm.scores(await served.embedder.pooled(ids))
    best = np.argsort(-scores, kind="stable")[:most].tolist()
    if listed:
        return [{"index": i, "score": float(scores[i])} | ({"text": texts[i]} if quoted else {}) for i in best]
    results = [
        {"index": i, "relevance_score": float(scores[i])} | ({"document": {"text": texts[i]}} if quoted else {})
        for i in best
    ]
    return {"model": served.name, "object": "list", "usage": usage(ids), "results": results}


def _text(fields: Fields, name: str, value: object) -> str:
    """The text of a document, which is the field of this name."""
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise fields.refuse(name, f"must be a text, or an object with a text, not {described(value)}")
    return text
