"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``: text and token ids."""

import asyncio
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.checks import described
from engine.serving.body import read_fields
from engine.serving.budget import TOKENIZED
from engine.serving.fields import Fields, is_token_id
from engine.serving.llama_server.shapes import model_of
from engine.serving.state import State
from engine.serving.streams import dump
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.llm import LLM


PART = 4096
"""Entries of a list that are written at once."""

MOST_IDS = 1 << 22
"""Token ids of one text; a body has no room for more by default."""


async def tokenize(request: Request) -> Response:
    """The token ids of a text.

    llama-server's form is ``{"content", "add_special": false, "parse_special": false, "with_pieces": false}``, that of
    vLLM and lm-eval ``{"prompt", "add_special_tokens": true}``.  Unlike in llama-server, ``parse_special`` is off by default,
    so that what a user wrote never becomes a control token.
    """
    state = State.of(request)
    fields = await read_fields(request, state.limits, memory_per_byte=TOKENIZED)
    prompt = fields.text("prompt")
    text = fields.required_text("content") if prompt is None else prompt
    add_special = fields.flag("add_special", False) if prompt is None else fields.flag("add_special_tokens", True)
    parse_special = fields.flag("parse_special", False)
    with_pieces = fields.flag("with_pieces", False)
    async with state.models.use(fields.text("model")) as served:
        tokenizer, n_ctx = served.llm.tokenizer, served.llm.n_ctx

        def written() -> str:
            ids = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
            if prompt is not None:
                return f'{{"tokens":{_written(ids)},"count":{len(ids)},"max_model_len":{n_ctx}}}'
            if not with_pieces:
                return f'{{"tokens":{_written(ids)}}}'
            pieces = ({"id": id, "piece": _piece(tokenizer, id)} for id in ids)
            return f'{{"tokens":{_written(pieces)}}}'

        # The text may be long.
        return Response(await asyncio.to_thread(written), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of token ids, control tokens included: ``content`` for llama-server's clients, ``prompt`` for vLLM's."""
    state = State.of(request)
    fields = await read_fields(request, state.limits)
    fields.required("tokens")
    async with state.models.use(fields.text("model")) as served:
        ids = read_ids(fields, "tokens", served.llm.config.n_vocab)
        text = await asyncio.to_thread(served.llm.tokenizer.decode, ids, special=True)
    return JSONResponse({"content": text, "prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """The special tokens and the chat template of a model, as lm-eval's remote tokenizer reads them."""
    async with State.of(request).models.use(model_of(request)) as served:
        llm = served.llm
        bos, eos = llm.tokenizer.bos_id, llm.tokenizer.eos_id
        found = {
            "bos_token": special_text(llm, bos),
            "bos_token_id": bos,
            "eos_token": special_text(llm, eos),
            "eos_token_id": eos,
            "chat_template": llm.chat_template.source if llm.chat_template is not None else None,
        }
        return JSONResponse(found)


def _written(values: Iterable[Any]) -> str:
    """A list as JSON, written in parts, between which other threads can run."""
    rest = iter(values)
    parts = iter(lambda: list(islice(rest, PART)), [])
    return f"[{','.join(dump(part)[1:-1] for part in parts)}]"


def read_ids(fields: Fields, name: str, n_vocab: int) -> list[int]:
    """A list of token ids.  Raises Refusal."""
    ids = fields.items(name, MOST_IDS, f"at most {MOST_IDS}")
    for i, id in enumerate(ids):
        if not is_token_id(id, n_vocab):
            raise fields.refuse(f"{name}[{i}]", f"must be a token id, 0 to {n_vocab - 1}, not {described(id)}")
    return ids


def special_text(llm: "LLM", id: int | None) -> str | None:
    """How the vocabulary writes a special token."""
    return None if id is None else llm.tokenizer.token_bytes(id, special=True).decode("utf-8", "replace")


def _piece(tokenizer: Tokenizer, id: int) -> Any:
    """The text of a token, or its bytes if they are only a part of a character."""
    data = tokenizer.token_bytes(id, special=True)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)
