"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``: text and token ids."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from engine.checks import described
from engine.serving.accepted import check, table_of
from engine.serving.aside import aside
from engine.serving.body import read_fields
from engine.serving.budget import Claim, grow_for_tokens
from engine.serving.exchange import note_ignored
from engine.serving.fields import Fields, is_token_id
from engine.serving.llama_server.shapes import model_of
from engine.serving.models import PATIENCE_SECONDS
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
    fields = await read_fields(request, state.limits)
    check(fields, table_of("/tokenize"))
    prompt = fields.text("prompt")
    text = fields.required_text("content") if prompt is None else prompt
    add_special = fields.flag("add_special", False) if prompt is None else fields.flag("add_special_tokens", True)
    parse_special = fields.flag("parse_special", False)
    with_pieces = fields.flag("with_pieces", False)
    async with state.models.use(fields.text("model"), PATIENCE_SECONDS) as served:
        note_ignored(request, fields)
        tokenizer, n_ctx = served.llm.tokenizer, served.llm.n_ctx
        await grow_for_tokens(request, fields, tokenizer)

        def written() -> list[bytes]:
            ids = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
            values = (
                ({"id": id, "piece": _piece(tokenizer, id)} for id in ids) if with_pieces and prompt is None else ids
            )
            counts = f',"count":{len(ids)},"max_model_len":{n_ctx}' if prompt is not None else ""
            return [b'{"tokens":[', *_written(values), f"]{counts}}}".encode()]

        # The text may be long.
        parts = await asyncio.to_thread(written)
        size = sum(map(len, parts))
        Claim.of(request).hold(size)
        headers = {"content-length": str(size)}
        return StreamingResponse(_each(parts), media_type="application/json", headers=headers)


async def detokenize(request: Request) -> Response:
    """The text of token ids, control tokens included: ``content`` for llama-server's clients, ``prompt`` for vLLM's."""
    state = State.of(request)
    fields = await read_fields(request, state.limits)
    check(fields, table_of("/detokenize"))
    fields.required("tokens")
    async with state.models.use(fields.text("model"), PATIENCE_SECONDS) as served:
        llm = served.llm
        note_ignored(request, fields)

        def written() -> str:
            text = llm.tokenizer.decode(read_ids(fields, "tokens", llm.config.n_vocab), special=True)
            return dump({"content": text, "prompt": text})

        return Response(await aside(fields.size, written), media_type="application/json")


async def tokenizer_info(request: Request) -> Response:
    """The special tokens and the chat template of a model, as lm-eval's remote tokenizer reads them."""
    async with State.of(request).models.use(model_of(request), PATIENCE_SECONDS) as served:
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


def _written(values: Iterable[Any]) -> Iterator[bytes]:
    """What a list as JSON has between its brackets, in parts, between which other threads can run."""
    rest = iter(values)
    for i, part in enumerate(iter(lambda: list(islice(rest, PART)), [])):
        yield ("," if i else "").encode() + dump(part)[1:-1].encode()


async def _each(parts: list[bytes]) -> AsyncIterator[bytes]:
    """The parts, one after another."""
    for part in parts:
        yield part


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
