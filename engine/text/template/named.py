"""The chat templates of a file: one without a name, and others with names, such as one for requests with tools."""

from typing import NamedTuple

from engine.checks import shown
from engine.errors import TemplateError
from engine.text.vocabulary import TokenizerFile

KEY = "tokenizer.chat_template"
DEFAULT = "default"
WITH_TOOLS = "tool_use"
RERANK = f"{KEY}.rerank"
"""The key of the prompt of a reranker, which is no template of conversations."""


class TemplateSources(NamedTuple):
    """The source of the template that a model uses, under which key it is, and the source of that for requests with tools,
    "" if the file has none of its own for them."""

    key: str
    plain: str
    with_tools: str


def sources(gguf: TokenizerFile) -> TemplateSources | None:
    """The templates of a file; None if it has none.  A template of blanks counts as none.

    Without a template that has no name, the one that is called ``default`` takes its place, or else the first in the file.
    Raises TemplateError if a template is no text.
    """
    found = {key: text_of(gguf, key) for key in gguf.metadata if key == KEY or key.startswith(f"{KEY}.")}
    found.pop(RERANK, None)
    found = {key: text for key, text in found.items() if text.strip()}
    if not found:
        return None
    key = next((key for key in (KEY, f"{KEY}.{DEFAULT}") if key in found), next(iter(found)))
    return TemplateSources(key, found[key], found.get(f"{KEY}.{WITH_TOOLS}", ""))


def text_of(gguf: TokenizerFile, key: str) -> str:
    """The template of a key, "" if the file has none.  Raises TemplateError if it is no text."""
    value = gguf.metadata.get(key, "")
    if not isinstance(value, str):
        raise TemplateError(f"{gguf.path}: {shown(key)} must be a string, not {type(value).__name__}")
    return value
