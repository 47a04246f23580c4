"""Chat templates: from messages to the text, and the token ids, that a model was trained to answer.

The template language and its limits are in :mod:`engine.text.template.sandbox`; it is loaded when a template is first used.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from engine.errors import TemplateError
from engine.forks import renew_in_children
from engine.text.bound import AtLeast
from engine.text.template import dsml, harmony
from engine.text.template.builtin import TEMPLATES, template_of
from engine.text.template.marked import MarkedText, trusted
from engine.text.template.named import sources
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import TokenizerFile

if TYPE_CHECKING:
    from engine.text.template.sandbox import Template

__all__ = ["TEMPLATES", "ChatTemplate", "Message"]

Message = Mapping[str, Any]

MAX_DEPTH = 64

# Some templates spell a control token out of a role, as in '<|' + role + '|>': role names may be part of one.
ROLES = frozenset(("system", "user", "assistant", "tool", "developer", "function", "ipython", "model", "observation"))


class ChatTemplate:
    """How a model expects a conversation to be written, in Jinja, run as in ``transformers``.

    Everything in messages, tools and further values is plain text: whatever it contains, no character of it becomes part
    of a control token. Control tokens come from the template's own text, ``bos_token`` and the like, and role names.

    Answers are given as they were generated. Those of gpt-oss and DeepSeek-V4 are divided into thoughts, calls and text
    first, as their templates expect.

    :meth:`load` and :meth:`from_source` make templates; ``LLM.chat_template`` is the one of a model's file.

    Attributes
    ----------
    source : str
        The Jinja source.
    tokenizer : Tokenizer
        The tokenizer of the model.
    origin : str
        What error messages call the template.
    tool_source : str
        The Jinja source for conversations with ``tools``; "" if it is the same.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, origin: str = "the chat template", tool_source: str = ""
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.origin = origin
        self.tool_source = tool_source
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Forget a thread that renders, which does not exist in a process that was forked."""
        self._lock = Lock()

    @classmethod
    def from_gguf(cls, gguf: TokenizerFile, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template in the file's metadata, or else the built-in one of the model, None if there is none. It is compiled,
        and can fail, on first use."""
        found = sources(gguf)
        if found is None:
            architecture, name = (gguf.metadata.get(f"general.{key}") for key in ("architecture", "name"))
            own = template_of(architecture, name, tokenizer.vocabulary.index)
            return cls(own, tokenizer) if own is not None else None
        return cls(found.plain, tokenizer, f"{gguf.path}: {found.key}", found.with_tools)

    @classmethod
    def from_source(cls, source: str, tokenizer: Tokenizer) -> "ChatTemplate":
        """A template given as text.

        Parameters
        ----------
        source : str
            Jinja source.
        tokenizer : Tokenizer
            Tokenizer of the model: ``LLM.tokenizer``.

        Returns
        -------
        ChatTemplate
            The template.

        Raises
        ------
        TemplateError
            If the source is too large or cannot be compiled.
        """
        template = cls(source, tokenizer)
        template.compile()
        return template

    @classmethod
    def load(cls, name_or_path: str, tokenizer: Tokenizer) -> "ChatTemplate":
        """A built-in template, or one in a file.

        Parameters
        ----------
        name_or_path : str
            The name of a built-in template, such as "chatml", or the path of a Jinja file.
        tokenizer : Tokenizer
            Tokenizer of the model: ``LLM.tokenizer``.

        Returns
        -------
        ChatTemplate
            The template.

        Raises
        ------
        TemplateError
            If there is no such template, or if it cannot be compiled.
        """
        if name_or_path in TEMPLATES:
            return cls.from_source(TEMPLATES[name_or_path], tokenizer)
        try:
            source = Path(name_or_path).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError, RuntimeError):  # RuntimeError: ~name of an unknown user
            names = ", ".join(TEMPLATES)
            problem = "is neither the name of a built-in template nor a Jinja file that can be read; the names are"
            raise TemplateError(f"{name_or_path!r} {problem} {names}") from None
        return cls.from_source(source, tokenizer)

    def compile(self) -> None:
        """Compiles the template now rather than on first use; raises TemplateError."""
        _ = self._template, self._tool_template

    def source_for(self, tools: bool) -> str:
        """The source that conversations with tools, or those without, are written by."""
        return (tools and self.tool_source) or self.source

    @cached_property
    def _template(self) -> "Template":
        from engine.text.template.sandbox import Template

        return Template(self.source)

    @cached_property
    def _tool_template(self) -> "Template":
        from engine.text.template.sandbox import Template

        return Template(self.tool_source) if self.tool_source else self._template

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The conversation as one text, for reading. Use :meth:`encode` to get tokens for a model.

        Parameters
        ----------
        messages : sequence of mapping
            Mappings with at least ``role`` and ``content``.
        add_generation_prompt : bool
            End with the beginning of an answer.
        **extra
            Further values for the template, such as ``tools`` or ``enable_thinking``.

        Returns
        -------
        str
            The text.

        Raises
        ------
        TemplateError
            If the template is broken, or refuses the messages.

        Examples
        --------
        >>> import engine
        >>> llm = engine.load(n_ctx=256)
        >>> template = engine.ChatTemplate.load("chatml", llm.tokenizer)
        >>> print(template.render([{"role": "user", "content": "Hello"}]))
        <|im_start|>user
        Hello<|im_end|>
        <|im_start|>assistant
        <BLANKLINE>
        """
        return str.__str__(self._render(messages, add_generation_prompt, extra))

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        known: tuple[str, Sequence[int]] | None = None,
        at_least: AtLeast | None = None,
        **extra: Any,
    ) -> list[int]:
        """The token ids of the conversation, with the model's begin token once if the model uses it.

        Parameters
        ----------
        messages : sequence of mapping
            Mappings with at least ``role`` and ``content``.
        add_generation_prompt : bool
            End with the beginning of an answer.
        known : tuple of str and sequence of int, optional
            A text and the ids it stands for, such as an earlier prompt and its answer. If the conversation begins with it,
            it keeps those ids: a model may have written its answer in other tokens than its tokenizer would choose.
        at_least : callable, optional
            Called as ``at_least(n)`` before a long text is tokenized, with a number of tokens that it has at least. It can
            raise an error, which saves the time.
        **extra
            Further values for the template, such as ``tools`` or ``enable_thinking``.

        Returns
        -------
        list of int
            Token ids.

        Raises
        ------
        TemplateError
            If the template is broken, or refuses the messages.
        """
        text = self._render(messages, add_generation_prompt, extra)
        tokenizer = self.tokenizer
        if known is not None and known[0] and text.startswith(known[0]):
            rest = text[len(known[0]) :]
            if tokenizer.add_eos:
                rest = _without(rest, self._token_text(tokenizer.eos_id), at_end=True)
            # An answer ends in ordinary text: control tokens have been left out of it.
            ids = tokenizer.encode_marked(rest, rest.marks, add_special=False, continued=True, at_least=at_least)
            return [
                *known[1],
                *ids,
                *([tokenizer.eos_id] if tokenizer.add_eos and tokenizer.eos_id is not None else []),
            ]
        # The tokenizer adds them: a template that also writes them would double them.
        if tokenizer.add_bos:
            text = _without(text, self._token_text(tokenizer.bos_id), at_end=False)
        if tokenizer.add_eos:
            text = _without(text, self._token_text(tokenizer.eos_id), at_end=True)
        return tokenizer.encode_marked(text, text.marks, at_least=at_least)

    def _token_text(self, id: int | None) -> str:
        return self.tokenizer.vocabulary.tokens[id] if id is not None else ""

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, extra: Mapping[str, Any]) -> MarkedText:
        vocabulary = self.tokenizer.vocabulary
        special = {
            f"{name}_token": trusted(vocabulary.tokens[id])
            for name in ("bos", "eos", "unk", "pad")
            if (id := getattr(vocabulary, f"{name}_id")) is not None
        }
        count = _Count()
        speaks_dsml = dsml.MARK in vocabulary.index
        # Of the others only gpt-oss has tokens between the parts of an answer.
        divide = dsml.divided if speaks_dsml else harmony.divided if vocabulary.shown_ids else None
        copied = [_message(message, i, count, divide) for i, message in enumerate(messages)]
        values = {
            "bos_token": "",
            "eos_token": "",
            "tools": None,
            "documents": None,
            **special,
            **count.copied(dict(extra)),
            "messages": dsml.in_order_of_calls(copied) if speaks_dsml else copied,
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            template = self._tool_template if values["tools"] else self._template
            return template.render(values, count.values, count.characters)


def _message(
    message: Message, index: int, count: "_Count", divide: Callable[[Message], Message] | None
) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise TemplateError(f"message {index} is not a message: give each a role and a content")
    if divide is not None and role == "assistant":
        message = divide(message)
    copied: dict[str, Any] = count.copied(message)
    if role in ROLES:
        copied["role"] = trusted(role)
    return copied


class _Count:
    """Copies values to plain Python values, which carry no marks and no code, and counts them."""

    def __init__(self) -> None:
        self.values = 0
        self.characters = 0

    def copied(self, value: Any, depth: int = 0) -> Any:
        """``value`` with every string, list and mapping copied; raises TemplateError for anything else."""
        self.values += 1
        if depth > MAX_DEPTH:
            raise TemplateError(f"the messages are nested more than {MAX_DEPTH} deep")
        if isinstance(value, str):
            self.characters += len(value)
            return str.__str__(value)
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, Mapping):
            return {self.copied(key, depth + 1): self.copied(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.copied(item, depth + 1) for item in value]
        raise TemplateError(f"a message holds a {type(value).__name__}: give text, numbers, lists and mappings only")


def _without(text: MarkedText, token: str, at_end: bool) -> MarkedText:
    """``text`` without the control token it begins or ends with, if it is one."""
    cut = text.removesuffix(token) if at_end else text.removeprefix(token)
    marks = text.marks[len(cut) :] if at_end else text.marks[: len(text) - len(cut)]
    return cut if 0 not in marks else text
