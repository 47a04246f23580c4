"""Which format a model writes, as its chat template shows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.serving.formats.deepseek4 import DeepSeek4
from engine.serving.formats.gemma4 import Gemma4
from engine.serving.formats.gpt_oss import GptOss
from engine.serving.formats.llama3 import Llama3
from engine.serving.formats.parser import FormatParser, Parser
from engine.serving.formats.plain import Plain
from engine.serving.formats.qwen3 import Qwen3
from engine.serving.formats.qwen3_coder import Qwen3Coder
from engine.serving.formats.think import Think

FORMATS: Mapping[str, type[FormatParser]] = {
    "plain": Plain,
    "think": Think,
    "qwen3": Qwen3,
    "qwen3_coder": Qwen3Coder,
    "gemma4": Gemma4,
    "llama3": Llama3,
    "deepseek4": DeepSeek4,
    "gpt_oss": GptOss,
}
"""The formats by their names."""

# What the source of a template contains; the first format that fits counts.
_MARKS = (
    ("deepseek4", ("｜DSML｜",)),
    ("gemma4", ("<|tool_call>",)),
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("qwen3", ("<tool_call>", '"arguments"')),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    ("think", ("<think>", "</think>")),
)


def detect(template: str | None) -> str:
    """The name of the format of a model.

    Parameters
    ----------
    template : str or None
        The source of its chat template: ``llm.chat_template.source``. None if it has none.

    Returns
    -------
    str
        A name in :data:`FORMATS`; "plain" if there is no template, or an unknown one.
    """
    source = (template or "").replace('\\"', '"')  # a Jinja string may escape its quotes
    return next((name for name, marks in _MARKS if all(mark in source for mark in marks)), "plain")


def parser(
    name: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    single: Callable[[str], bool],
    reasoning_open: bool = False,
    calls: bool = True,
    reasoning: bool = True,
) -> Parser:
    """A parser of one answer in the format ``name``, a name in :data:`FORMATS`.

    Parameters
    ----------
    tools : sequence of mapping, optional
        The functions of the request, in OpenAI's form. Only they can be called; None: every name can.
    single : callable
        Whether a text is one token, control or user-defined, of the vocabulary. Such a tag counts only as this token.
    reasoning_open : bool
        Whether the prompt ends in an open thought: :func:`opens_thought` says so.
    calls, reasoning : bool
        Whether to look for calls, and for thoughts; if not, their tags are text.

    Returns
    -------
    Parser
        The parser.
    """
    make = FORMATS[name]
    return make(tools, single=single, reasoning_open=reasoning_open, calls=calls, reasoning=reasoning)


def can_think(template: str | None) -> bool:
    """Whether a model can think before it answers, as the source of its chat template shows."""
    name = detect(template)
    thought = FORMATS[name].THOUGHT
    return name == "gpt_oss" or (thought is not None and thought[0] in (template or ""))


def can_call(template: str | None) -> bool:
    """Whether a model can call functions in a known format, as the source of its chat template shows."""
    return detect(template) not in ("plain", "think")


def opens_thought(name: str, prompt: str) -> bool:
    """Whether a prompt in the format ``name`` ends with the tag that begins a thought.

    prompt: the text that the chat template gives (:meth:`ChatTemplate.render`), with the beginning of the answer.
    """
    thought = FORMATS[name].THOUGHT
    return thought is not None and prompt.rstrip().removesuffix("thought").endswith(thought[0])
