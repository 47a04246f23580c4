"""What a request asks for, and what its response says about it."""

import json
import math
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.checks import described
from engine.grammar.grammar import Grammar
from engine.serving.answer import Ask
from engine.serving.aside import aside
from engine.serving.conversation import Prompt
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.openai.prompt import read_prompt
from engine.serving.permitted import read_permitted
from engine.serving.responses.conversation import read_messages
from engine.serving.sampling import clamped, read_options, read_stop
from engine.serving.served import Served
from engine.serving.tool_choice import read_tool_choice

LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""What a response includes if it is asked to."""

INCLUDED = (
    *(LOGPROBS, SEALED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
"""What a request may ask for.  The others are about tools and images, which this server does not have."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    ask: of the model; id: is part of the ids of the response and of its items; top_logprobs: how many log-probabilities to
    report per token; seal: send thoughts as ``encrypted_content``, too; head: the fields of the response that never change.
    """

    ask: Ask
    id: str
    top_logprobs: int
    seal: bool
    head: Mapping[str, Any]


async def read_request(fields: Fields, served: Served) -> Asked:
    """What a request asks for."""
    llm, limits = served.llm, served.limits
    included = read_included(fields)
    text, effort, prompt, grammar = await read_conversation(fields, served)
    top = fields.whole("top_logprobs", 0, 0, limits.top_logprobs, "--top-logprobs")
    if top and LOGPROBS not in included:
        raise fields.refuse("top_logprobs", f'needs include: ["{LOGPROBS}"]')
    most = fields.whole("max_output_tokens", None, 0)
    options = read_options(fields, llm, limits) | {
        "max_tokens": clamped(most, llm, len(prompt.ids)),
        "grammar": grammar,
    }
    ask = Ask(
        prompt.ids,
        prompt.parser,
        options,
        logprobs=top if LOGPROBS in included else None,
        stop=read_stop(fields, limits),
        permitted=read_permitted(fields, llm),
        receipt=fields.flag("receipt", False),
    )
    id = secrets.token_hex(12)
    head: dict[str, Any] = {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": served.name,
        "system_fingerprint": await served.fingerprint(),
        "instructions": fields.text("instructions"),
        "max_output_tokens": most,
        "temperature": options["temperature"],
        "top_p": options["top_p"],
        "top_logprobs": top,
        "text": {
            "format": text.mapping("format") or {"type": "text"},
            "verbosity": text.text("verbosity", "medium"),
        },
        "reasoning": {"effort": effort, "summary": None},
        "tools": fields.get("tools") or [],
        "tool_choice": fields.get("tool_choice") or "auto",
        "metadata": await aside(fields.size, partial(read_metadata, fields)),
        **{name: fields.text(name) for name in ("user", "safety_identifier", "prompt_cache_key")},
        "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
        "background": False,
        "store": False,
        "previous_response_id": None,
        "max_tool_calls": None,
        "truncation": "disabled",
        "service_tier": "default",
    }
    fields.flag("store", False)
    fields.choice("truncation", ("auto", "disabled"))  # what is too long is refused in either case
    return Asked(ask, id, top, SEALED in included, await aside(fields.size, partial(repeatable, head)))


async def read_conversation(fields: Fields, served: Served) -> tuple[Fields, str | None, Prompt, Grammar | None]:
    """The object ``text`` of a request, how much the model should think, the prompt, and the grammar of the answer."""
    text, reasoning = fields.object("text") or Fields({}), fields.object("reasoning") or Fields({})
    effort = reasoning.text("effort")
    reasoning.ignore("summary", "generate_summary", "context", "mode")
    messages = await aside(fields.size, partial(read_messages, fields, served.limits))
    choice = await aside(fields.size, partial(read_tool_choice, fields, served.limits))
    form = (text, "format")
    try:
        prompt, grammar = await read_prompt(
            fields, served.llm, served.limits, messages, choice, effort=effort, form=form
        )
    except Refusal as refusal:
        if refusal.param == "messages":
            refusal.param = "input"
        raise
    return text, effort, prompt, grammar


def repeatable(head: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a response repeats of its request, such that it can be written: half a character becomes "?", and a number beyond
    the range of a float the greatest one."""
    text = json.dumps(head, ensure_ascii=False).encode("utf-8", "replace")
    return json.loads(text, parse_constant=lambda name: math.copysign(sys.float_info.max, float(name)))


def read_metadata(fields: Fields) -> Mapping[str, str]:
    """Texts that the response repeats."""
    given = fields.object("metadata") or Fields({})
    return {name: given.text(name, "") for name in given.values}


def read_included(fields: Fields) -> list[str]:
    """What the response should include."""
    included = fields.items("include", len(INCLUDED), f"at most {len(INCLUDED)}")
    for i, name in enumerate(included):
        if name not in INCLUDED:
            raise fields.refuse(f"include[{i}]", f"must be one of {', '.join(INCLUDED)}, not {described(name)}")
    return included
