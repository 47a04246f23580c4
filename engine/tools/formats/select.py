"""Which format a model writes, as its chat template shows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.tools.formats.apertus import Apertus
from engine.tools.formats.deepseek3 import DeepSeek3
from engine.tools.formats.deepseek4 import DeepSeek4
from engine.tools.formats.gemma4 import Gemma4
from engine.tools.formats.generic import Generic
from engine.tools.formats.glm import Glm
from engine.tools.formats.gpt_oss import GptOss
from engine.tools.formats.granite import Granite
from engine.tools.formats.hunyuan import Hunyuan
from engine.tools.formats.kimi import Kimi
from engine.tools.formats.llama3 import Llama3
from engine.tools.formats.minimax import MiniMax
from engine.tools.formats.mistral import Mistral
from engine.tools.formats.parser import FormatParser, Parser
from engine.tools.formats.plain import Plain
from engine.tools.formats.qwen3 import Qwen3
from engine.tools.formats.qwen3_coder import Qwen3Coder
from engine.tools.formats.seed_oss import SeedOss
from engine.tools.formats.think import Think

FORMATS: Mapping[str, type[FormatParser]] = {
    "plain": Plain,
    "think": Think,
    "qwen3": Qwen3,
    "qwen3_coder": Qwen3Coder,
    "gemma4": Gemma4,
    "llama3": Llama3,
    "deepseek4": DeepSeek4,
    "apertus": Apertus,
    "deepseek3": DeepSeek3,
    "generic": Generic,
    "glm": Glm,
    "granite": Granite,
    "hunyuan": Hunyuan,
    "kimi": Kimi,
    "minimax": MiniMax,
    "mistral": Mistral,
    "seed_oss": SeedOss,
    "gpt_oss": GptOss,
}
"""The formats by their names."""

MARKS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("deepseek4", ("｜DSML｜",)),
    ("gemma4", ("<|tool_call>",)),
    ("gpt_oss", ("<|channel|>", "<|message|>")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("qwen3", ("<tool_call>", '"arguments"')),
    ("glm", ("<tool_call>", "<arg_key>")),
    ("minimax", ("<minimax:tool_call>", "<invoke name=")),
    ("seed_oss", ("<seed:tool_call>", "<function=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek3", ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")),
    ("kimi", ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")),
    ("apertus", ("<|tools_prefix|>", "<|tools_suffix|>")),
    ("granite", ("<|tool_call|>", "available_tools")),
    ("granite", ("<|start_of_role|>", "<tool_call>")),
    ("hunyuan", ("<tool_call>", "```json")),
    ("hunyuan", ('<tool_calls>[{"name"',)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    ("think", ("<think>", "</think>")),
)
"""Formats, and what the source of a template contains; the first format that fits counts."""


def detect(template: str | None, tools: bool = False) -> str:
    """The name of the format of a model.

    Parameters
    ----------
    template : str or None
        The source of its chat template: ``llm.chat_template.source``. None if it has none.
    tools : bool
        Whether the conversation has tools. If the template does not know them, or their format is not known, it is "generic":
        the prompt has to describe them (:func:`engine.tools.formats.generic.describe`).

    Returns
    -------
    str
        A name in :data:`FORMATS`; without tools "plain" if there is no template, or an unknown one.
    """
    source = (template or "").replace('\\"', '"')  # a Jinja string may escape its quotes
    name = next((name for name, marks in MARKS if all(mark in source for mark in marks)), "plain")
    return "generic" if tools and (name in ("plain", "think") or "tools" not in source) else name


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
    """Whether a model can call functions: it needs a chat template, for its own format or the generic one."""
    return bool(template)


def opens_thought(name: str, prompt: str) -> bool:
    """Whether a prompt in the format ``name`` ends with the tag that begins a thought.

    prompt: the text that the chat template gives (:meth:`ChatTemplate.render`), with the beginning of the answer.
    """
    thought = FORMATS[name].THOUGHT
    return thought is not None and prompt.rstrip().removesuffix("thought").endswith(thought[0])
