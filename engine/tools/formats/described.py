"""What a chat template is told about functions and earlier calls, so that nothing of them is lost."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.tools.formats import generic, granite, select
from engine.tools.formats.history import adapted

SILENT = ("plain", "think", "qwen3")
"""Formats whose templates may leave out earlier calls.  As generic text they are what such a model writes, or can read."""


class Described(NamedTuple):
    """A conversation as a template is given it: the name of the format of the model, the messages, and the variables."""

    format: str
    messages: list[dict[str, Any]]
    values: dict[str, Any]


def described(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
) -> Described:
    """A conversation as the template whose source this is can write it out.

    Parameters
    ----------
    source : str
        The source of the template.
    messages, tools : sequence of mapping
        The conversation and the functions of the request, in OpenAI's form.
    values : mapping
        Further variables of the template.

    Returns
    -------
    Described
        What to give the template.
    """
    format = select.detect(source, bool(tools))
    own, given = adapted(format, messages), dict(values)
    silent = "tool_calls" not in source and any(each.get("tool_calls") for each in own)
    if format == "generic" or (silent and format in SILENT):
        own = generic.as_text(own)
    elif silent and format == "granite":
        own = granite.with_calls(own)
    if format == "generic":
        # A template without a place for the system message gets it in the first message of the user (turns.py).
        return Described(format, generic.with_system(own, generic.describe(tools)), given)
    if tools:
        given["tools"] = list(tools)
        if "xml_tools" in source:  # SmolLM3's name, beside that for functions which are called in Python
            given["xml_tools"] = list(tools)
    return Described(format, own, given)
