"""The prompt of a conversation, and the parser of its answer."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from engine.text.bound import AtLeast
from engine.text.template.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer, TokenType
from engine.tools.calls.tagged import MAYBE, NONE, OPEN
from engine.tools.formats import select
from engine.tools.formats.described import described
from engine.tools.formats.parser import Parser
from engine.tools.turns import Message, rendered

LAST = 32
"""The tokens at the end of a prompt among which is a tag that opens a thought."""


class Prompt(NamedTuple):
    """The token ids of a conversation, and what makes a parser of its answer.

    format: the name of the format in which the model writes calls and thoughts; thought: ``OPEN``, ``MAYBE`` or ``NONE`` of
    ``engine.tools.calls.tagged``: whether the answer begins in a thought; headed: whether it begins in a text that the
    prompt has given a header, so that no call can follow before the end of this text.
    """

    ids: list[int]
    parser: Callable[[], Parser]
    format: str = "plain"
    thought: str = NONE
    headed: bool = False


def prompt_of(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    values: Mapping[str, Any] | None = None,
    *,
    continue_final: bool = False,
    names: Collection[str] | None = None,
    ruled: bool = False,
    at_least: AtLeast | None = None,
) -> Prompt:
    """The prompt of a conversation.  Raises TemplateError if the template refuses the messages.

    values: further variables of the template, such as ``enable_thinking``; continue_final: the last message, which is one of
    the assistant, is the beginning of the answer; names: the functions that may be called, None: all ``tools``; ruled: the
    answer follows a grammar of the request, so that nothing in it is a call or a thought;
    at_least: is told how many tokens a long text has at least, before it is tokenized, and may raise an error.
    """
    tokenizer = template.tokenizer
    kept = ("messages", "self", "known", "at_least", "add_generation_prompt")
    own = {name: value for name, value in (values or {}).items() if name not in kept}
    last: Message = {}
    if continue_final:
        *messages, last = messages
    source = template.source_for(bool(tools or own.get("tools")))
    format, messages, extra = described(source, messages, tools, own)
    ids = rendered(lambda own: template.encode(own, at_least=at_least, **extra), messages)
    tags = select.FORMATS[format].THOUGHT
    thought = NONE
    end = tokenizer.decode(ids[-LAST:], special=True)
    if select.opens_thought(format, end):
        thought = OPEN
    elif format == "gpt_oss" or (tags and tags[0] in source and not _is_closed(end, tags[1], extra)):
        thought = MAYBE
    if thought == OPEN and (begun := last.get("reasoning_content")):
        ids = ids + tokenizer.encode(begun, add_special=False, at_least=at_least)
    header: tuple[str, ...] = ()
    text = last.get("content") or ""
    if text or ruled:
        if thought == OPEN and tags:
            # What the client has begun, or what a grammar holds, is text, so the thought before it has ended.
            own_line = tags[1] == "</think>" and end.endswith("\n")
            close = f"\n{tags[1]}\n\n" if own_line else tags[1]
            ids = ids + tokenizer.encode(close, add_special=False, parse_special=True)
        if header := select.FORMATS[format].HEADER:
            ids = ids + tokenizer.encode("".join(header), add_special=False, parse_special=True)
        ids, thought = ids + tokenizer.encode(text, add_special=False, at_least=at_least), NONE
    offered = [tool for tool in tools if names is None or tool["function"]["name"] in names]

    def parser() -> Parser:
        made = select.parser(
            format,
            offered,
            single=lambda tag: control_token(tokenizer, tag) is not None,
            reasoning_open=thought == OPEN,
            calls=not ruled,
            reasoning=not ruled,
        )
        for piece in header:
            made.feed(piece, True)
        return made

    return Prompt(ids, parser, format, thought, bool(header))


def _is_closed(end: str, close: str, values: Mapping[str, Any]) -> bool:
    """Whether the model is not to think: the variables of the template say so, or the prompt ends with the tag after a
    thought."""
    return values.get("enable_thinking") is False or end.rstrip().endswith(close)


def control_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The control or user-defined token that is this text; None if there is none."""
    id = tokenizer.token_id(text)
    return id if id is not None and tokenizer.token_type(id) in (TokenType.CONTROL, TokenType.USER_DEFINED) else None
