"""The options of an answer, and checks of arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from engine.checks import described
from engine.decode.params import LogitsProcessor
from engine.errors import UsageError
from engine.grammar.grammar import Grammar
from engine.speculative.params import SpeculationParams
from engine.text.template.chat import Message

Prompt = str | Sequence[int]
"""A text, or token ids."""

OnPrefill = Callable[[int, int], None]
"""Called as ``on_prefill(done, total)``, in tokens, while a prompt is read."""


class Options(TypedDict, total=False):
    """The keyword arguments of :meth:`LLM.generate`, which :meth:`LLM.complete` and :meth:`LLM.chat` also accept.

    All of them are optional. Use it to annotate functions that pass options on:

    >>> from typing import Unpack
    >>> import engine
    >>> def shout(llm: engine.LLM, prompt: str, **options: Unpack[engine.Options]) -> str:
    ...     return llm.complete(prompt, **options).text.upper()
    """

    max_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float
    repeat_penalty: float | None
    repeat_last_n: int | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    xtc_probability: float | None
    xtc_threshold: float | None
    logits_processors: Sequence[LogitsProcessor]
    grammar: Grammar | None
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    heal: bool
    logprobs: int
    on_prefill: OnPrefill | None
    speculation: SpeculationParams | None
    cache_salt: str


def stop_texts(stop: object) -> list[str]:
    """One text or several as a list.  Raises UsageError for anything else."""
    if isinstance(stop, str):
        return [stop]
    if isinstance(stop, Sequence) and all(isinstance(text, str) for text in stop):
        return list(stop)
    raise UsageError(f"stop must be a text or a sequence of texts, not {described(stop)}.")


def checked_messages(messages: object) -> Sequence[Message]:
    """The messages of a conversation.  Raises UsageError unless they are a sequence of mappings that have a role."""
    advice = 'give a list such as [{"role": "user", "content": "Hello"}]'
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError(f"messages must be a sequence of mappings, not {described(messages)}; {advice}.")
    if not messages:
        raise UsageError(f"there are no messages to answer; {advice}.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {i} must be a mapping, not {described(message)}; {advice}.")
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise UsageError(f"message {i} needs a role, which is a text, and a content; {advice}.")
    return messages


def template_values(values: object) -> dict[str, Any]:
    """Further values for a chat template.  Raises UsageError unless they are a mapping of names that are free."""
    if not isinstance(values, Mapping):
        raise UsageError(f"chat_template_kwargs must map names to values, not {described(values)}.")
    for name in values:
        if not isinstance(name, str):
            raise UsageError(f"a name in chat_template_kwargs must be a text, not {described(name)}.")
    for name in ("self", "messages", "known", "at_least"):
        if name in values:
            raise UsageError(f"chat_template_kwargs must not set {name}; give messages as the first argument.")
    return dict(values)
