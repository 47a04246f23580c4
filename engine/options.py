"""The options of an answer."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from engine.grammar.grammar import Grammar
from engine.sampling.params import LogitsProcessor
from engine.sampling_params import SamplingParams
from engine.schemas import Schema
from engine.speculative.params import SpeculationParams
from engine.text.template.chat import ChatTemplate

Prompt = str | Sequence[int]
"""A text, or token ids."""

Prompts = list[str] | list[list[int]] | tuple[str, ...] | tuple[list[int], ...]
"""Several prompts."""

OnPrefill = Callable[[int, int], None]
"""Called as ``on_prefill(done, total)``, in tokens, while a prompt is read."""


class Options(TypedDict, total=False):
    """The keyword arguments of :meth:`LLM.generate`, which :meth:`LLM.complete` and :meth:`LLM.chat` also accept.

    All of them are optional:

    - of the answer: ``max_tokens``, ``stop``, ``ignore_eos``, ``heal``, ``seed``, ``logprobs``, ``receipt``, ``schema`` and
      ``grammar``;
    - how tokens are chosen: ``sampling_params``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``,
      ``repeat_penalty``, ``repeat_last_n``, ``presence_penalty``, ``frequency_penalty``, ``logit_bias``, ``dry_multiplier``,
      ``dry_base``, ``dry_allowed_length``, ``dry_penalty_last_n``, ``dry_sequence_breakers``, ``xtc_probability``,
      ``xtc_threshold`` and ``logits_processors``;
    - how it is computed: ``speculation``, ``on_prefill`` and ``cache_salt``.

    :meth:`LLM.generate` describes each. Use this class to annotate functions that pass options on:

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
    sampling_params: SamplingParams | None
    schema: Schema | None
    receipt: bool


class ChatOptions(Options, total=False):
    """The keyword arguments of :meth:`LLM.chat`, but for ``stream`` and ``progress``: those of :class:`Options`, and how the
    conversation is written.

    All of them are optional.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template: str | os.PathLike[str] | ChatTemplate | None
    chat_template_kwargs: Mapping[str, Any] | None
