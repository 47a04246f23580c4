"""Conversations: messages that a model answers, with text or with calls of functions."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack, overload

from engine.checks import described
from engine.decode.generation import Generation, divide
from engine.errors import TemplateError, UsageError
from engine.grammar.grammar import Grammar
from engine.options import ChatOptions, Options
from engine.schemas import Schema, grammar_of
from engine.scores import ScoringModel
from engine.several import each, is_several
from engine.stream import Stream
from engine.text.template.chat import ChatTemplate, Message
from engine.text.template.values import template_values
from engine.tools.choice import ToolChoice, beside_calls, calls_grammar
from engine.tools.given import checked_messages, given_choice
from engine.tools.prompt import prompt_of

Conversation = Sequence[Message]


class Conversations(ScoringModel):
    """A model that answers conversations."""

    @overload
    def chat(
        self, messages: Conversation, *, stream: bool = False, progress: bool = False, **options: Unpack[ChatOptions]
    ) -> Generation: ...
    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        *,
        stream: bool = False,
        progress: bool = False,
        **options: Unpack[ChatOptions],
    ) -> list[Generation]: ...
    def chat(
        self,
        messages: Any,
        *,
        stream: bool = False,
        progress: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        chat_template: str | os.PathLike[str] | ChatTemplate | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Generation | list[Generation]:
        """Answer a conversation.

        The answer depends on the arguments only, not on earlier calls. Messages that the cache still holds from
        earlier calls are not read again.

        Parameters
        ----------
        messages : sequence of mapping, or list of them
            The conversation so far: mappings with ``role`` ("system", "user", "assistant" or "tool") and ``content``, or a
            list of conversations. Whatever a message contains, its text never becomes a control token. ``answer.message`` is
            an answer as a message. If the template rejects the order of the roles, it gets the messages in the nearest order
            that it takes: neighbours of one role are joined, and later system messages become messages of the user.
        stream : bool
            Return immediately an answer to iterate over, instead of the finished one.
        progress : bool
            Show how many answers of a list are finished, on stderr, if that is a terminal.
        tools : sequence of mapping, optional
            Functions that the model may call, in OpenAI's form: ``{"type": "function", "function": {"name": ...,
            "description": ..., "parameters": <JSON schema>}}``. ``tool_calls`` of the answer has the calls. Append
            ``answer.message`` to the conversation, and for each call a message ``{"role": "tool", "tool_call_id": call.id,
            "content": <result>}``. With ``"strict": True`` the calls of a function follow its schema.
        tool_choice : str or mapping
            "auto": the model decides; "none": it calls nothing; "required": it must call a function; ``{"type": "function",
            "function": {"name": ...}}``: it must call this one.
        parallel_tool_calls : bool
            Whether an answer may have more than one call.
        chat_template : str, path or ChatTemplate, optional
            Name of a built-in template, path of a Jinja file, or a template. By default the model's own is used.
        chat_template_kwargs : mapping, optional
            Additional variables for the template, such as ``enable_thinking``.
        **options
            Keyword arguments of :meth:`generate`, such as ``max_tokens``, ``temperature``, ``seed``, ``stop`` and
            ``logprobs``.

        Returns
        -------
        Generation or list of Generation
            The answer, or, for a list, the answers in the same order, which are computed together, ``parallel`` of
            :func:`engine.load` at a time.

        Raises
        ------
        UsageError
            If ``messages`` or another argument is out of range or of a wrong type, or if the model is closed.
        TemplateError
            If the model has no chat template, or if the template is invalid or rejects the messages.
        ContextError
            If the conversation leaves no room for an answer.

        Examples
        --------
        >>> import engine
        >>> llm = engine.load(n_ctx=256)
        >>> messages = [{"role": "user", "content": "def add(a, b):"}]
        >>> answer = llm.chat(messages, chat_template="chatml", max_tokens=8, temperature=0)
        >>> messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "x = 1"}]
        >>> again = llm.chat(messages, chat_template="chatml", max_tokens=8, temperature=0)
        >>> again.timings.cache_n > len(answer.prompt_ids)
        True
        """
        self.check_open()
        own = self._template(chat_template)
        values = template_values({} if chat_template_kwargs is None else chat_template_kwargs)
        choice = given_choice(tools, tool_choice, parallel_tool_calls)
        form, schema = _form(options)

        def make(conversation: object) -> Generation:
            return self._converse(checked_messages(conversation), own, values, choice, form, schema, options)

        several = is_several(messages)
        answers = each("conversation", messages, make) if several else make(messages)
        if stream:
            return answers
        with self.answering():
            return self._finished(answers, progress)

    def stream_chat(self, messages: Conversation, **options: Unpack[ChatOptions]) -> Stream:
        """Begin to answer a conversation, for use in an event loop: ``async for piece in llm.stream_chat(messages)`` or
        ``await llm.stream_chat(messages)``.

        Parameters
        ----------
        messages : sequence of mapping
            The conversation so far.
        **options
            Keyword arguments of :meth:`chat`, such as ``tools``, ``max_tokens`` and ``seed``.

        Returns
        -------
        Stream
            The answer. Iterate over it to get the text in pieces, or await it to get the finished answer.

        Raises
        ------
        UsageError
            If ``messages`` or another argument is out of range or of a wrong type, or if the model is closed.
        TemplateError
            If the model has no chat template, or if the template is invalid or rejects the messages.
        ContextError
            If the conversation leaves no room for an answer.

        Examples
        --------
        >>> import asyncio, engine
        >>> llm = engine.load(n_ctx=256)
        >>> async def ask():
        ...     messages = [{"role": "user", "content": "def add(a, b):"}]
        ...     answer = await llm.stream_chat(messages, chat_template="chatml", max_tokens=8, seed=1)
        ...     print(len(answer.ids), answer.finish_reason)
        >>> asyncio.run(ask())
        8 length
        """
        return Stream(self.chat(messages, stream=True, **options), self._threads)

    def _converse(
        self,
        messages: list[dict[str, Any]],
        template: ChatTemplate,
        values: Mapping[str, Any],
        choice: ToolChoice,
        form: Grammar | None,
        schema: Schema | None,
        options: Options,
    ) -> Generation:
        """The answer to one conversation, which has not begun.  form: what it follows unless it calls functions."""
        if form is not None:
            values = {"enable_thinking": False, **values}  # the answer follows it from its first character
        grammar, text = beside_calls(form, choice, False)
        prompt = prompt_of(
            template,
            messages,
            choice.tools,
            values,
            names=choice.names,
            ruled=grammar is not None,
            at_least=self.check_least,
        )
        if grammar is None:
            grammar = calls_grammar(choice, self.tokenizer, prompt, text)
        given: dict[str, Any] = {**options, "grammar": grammar}
        answer = self.generate(prompt.ids, **given)
        answer.schema = schema
        return divide(answer, prompt.parser)

    def _template(self, given: object) -> ChatTemplate:
        """The chat template to use: the given one, or else the model's own."""
        if isinstance(given, ChatTemplate):
            if not given.tokenizer.agrees(self.tokenizer):
                raise UsageError("the chat template was made for another model; make it with this model's tokenizer.")
            return given
        if isinstance(given, os.PathLike):
            given = os.fspath(given)
        if isinstance(given, str):
            return ChatTemplate.load(given, self.tokenizer)
        if given is not None:
            raise UsageError(f"chat_template must be a name, a path or a ChatTemplate, not {described(given)}.")
        if self.chat_template is None:
            raise TemplateError("this model has no chat template; give one with chat_template, or use complete().")
        return self.chat_template


def _form(options: Options) -> tuple[Grammar | None, Schema | None]:
    """The grammar and the schema among the options, of which they are taken out."""
    grammar, schema = options.pop("grammar", None), options.pop("schema", None)
    if schema is None:
        return grammar, None
    if grammar is not None:
        raise UsageError("schema and grammar both describe the answer: leave one of them out.")
    return grammar_of(schema), schema
