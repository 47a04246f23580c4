"""The Python interface: from text to text.  ``engine/loading.py`` opens a model, ``engine/context.py`` runs it."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, Self, Unpack

import numpy as np

from engine.checks import described, function, require, token_ids, whole
from engine.compile.pool import compile_all
from engine.context import Context
from engine.decode.defaults import filled, sampling_defaults
from engine.decode.generation import Generation
from engine.decode.processors import Ending
from engine.decode.sampler import LogitsProcessor, Sampler, SamplingParams
from engine.errors import ContextError, TemplateError, UsageError
from engine.gguf.file import GGUF
from engine.grammar.grammar import Grammar
from engine.grammar.matcher import Matcher
from engine.limits import MOST_PARALLEL
from engine.locking import in_turn
from engine.models.base import Model
from engine.models.traffic import weight_bytes_per_token
from engine.ops import Progress
from engine.options import Options, checked_messages, stop_texts, template_values
from engine.speculative.draft_model import DraftModel
from engine.speculative.loop import Speculation
from engine.speculative.mtp import MTPDraft
from engine.speculative.params import SpeculationParams
from engine.text.breakers import BREAKERS, breaker_ids
from engine.text.template.chat import ChatTemplate, Message
from engine.text.tokenizer import Tokenizer


class LLM(Context):
    """A loaded model. :func:`engine.load` opens one.

    Use it in a ``with`` statement, or call :meth:`close`, to free its memory at a defined time.

    Threads can share a model. Their answers are computed together, as many at a time as ``parallel`` of :func:`engine.load`
    says; others wait. A thread that waits for a token computes the next pass for all of them. Each answer has the same bits
    as without other threads. Answers that begin with the same tokens share what the cache holds of them, unless their
    ``cache_salt`` differs. ``on_prefill`` and logits processors may be called in any of these threads, in the middle of a
    pass: they must not use the model, which raises UsageError, nor wait for another thread that uses it.

    Attributes
    ----------
    path : Path
        File of the model; the first part if the model is split.
    config : ModelConfig
        Description of the model: ``architecture``, ``name``, ``n_layer``, ``n_vocab`` and so on.
    tokenizer : Tokenizer
        Converts between text and token ids.
    chat_template : ChatTemplate or None
        Chat template of the file, if it has one.
    n_ctx : int
        Positions of the context of each answer.
    batch_size : int
        Most tokens of a prompt that are read in one pass.
    n_threads : int
        CPU threads that compute; 0 on a GPU.
    n_params, n_bytes : int
        Number of parameters, and bytes of weights.
    n_bytes_read : int
        Bytes of weights that one generated token reads.
    cache_bytes : int
        Bytes of the cache.
    memory : Memory
        The memory of the model and of its draft model, by what it is for.
    n_cached : int
        Tokens in the cache, of the text that was used last.
    load_seconds, compile_seconds : float
        Seconds that loading and the latest call of :meth:`compile` took.
    draft : object or None
        Draft model, or the part of the model that drafts, if there is one.
    sampling : mapping of str to number
        The sampling parameters that the file recommends, such as ``temperature`` and ``top_k``; often empty. An argument of
        :meth:`generate` that is not given has this value.
    warnings : list of str
        What is odd about the file and does not keep it from running: a sentence each.
    reread : str or None
        A sentence if more than 64 tokens of the latest prompt that had been read before had to be read again; else None.
    closed : bool
        Whether :meth:`close` was called.
    """

    def __init__(
        self,
        gguf: GGUF,
        tokenizer: Tokenizer,
        model: Model,
        load_seconds: float,
        snapshot_bytes: int = 0,
    ) -> None:
        super().__init__(model, tokenizer, snapshot_bytes)
        self.path = gguf.path
        self.chat_template = ChatTemplate.from_gguf(gguf, tokenizer)
        self.n_threads = model.ops.n_threads
        self.n_params = sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in gguf.tensors.values())
        self.n_bytes = gguf.n_bytes
        self.n_bytes_read = weight_bytes_per_token(gguf)
        self.cache_bytes = model.cache.n_bytes
        self.load_seconds = load_seconds
        self.compile_seconds = 0.0
        self.warnings: list[str] = []
        sampling, warnings = sampling_defaults(gguf)
        self.sampling = MappingProxyType(sampling)
        self.warnings += warnings
        if model.mtp is not None:
            self.draft = MTPDraft(self)
        self._label = model.ops.label
        #: The threads of answers that are streamed in an event loop.
        self._threads = ThreadPoolExecutor(MOST_PARALLEL, "stream")

    def renew(self) -> None:
        """In a process that was forked: the threads of streamed answers do not exist."""
        super().renew()
        self._threads = ThreadPoolExecutor(MOST_PARALLEL, "stream")

    def __repr__(self) -> str:
        config = self.config
        name = f"{config.name or self.path.name!r} ({config.architecture}, {self.n_params / 1e6:.1f} M parameters)"
        if self.closed:
            return f"<LLM {name}, closed>"
        return f"<LLM {name} on {self._label}, {self.n_cached} of {self.n_ctx} tokens in the cache>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a model cannot be pickled or copied: send its path to the other process and open it there with engine.load()."
        )

    # --- opening and closing -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- text and tokens ---------------------------------------------------------------------------------------

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """The token ids of a text.

        Parameters
        ----------
        text : str
            Text to convert.
        special : bool
            Add the tokens that the model expects at the beginning and end, and recognize control tokens in the text.
            Use False for text that is not trusted.

        Returns
        -------
        list of int
            Token ids.

        Raises
        ------
        UsageError
            If ``text`` is not a string, or if the model is closed.
        """
        self.check_open()
        if not isinstance(text, str):
            raise UsageError(f"only a text can be converted to token ids, not {described(text)}.")
        return self.tokenizer.encode(text, add_special=special, parse_special=special)

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids.

        Parameters
        ----------
        ids : sequence of int
            Token ids.

        Returns
        -------
        str
            Their text. Control tokens have none; bytes that form no character become U+FFFD.

        Raises
        ------
        TokenizerError
            If an id is outside the vocabulary.
        UsageError
            If ``ids`` are not whole numbers, or if the model is closed.
        """
        self.check_open()
        return self.tokenizer.decode(token_ids(ids))

    # --- kernels -----------------------------------------------------------------------------------------------

    @in_turn
    def compile(self, progress: Progress | None = None) -> float:
        """Compile every missing kernel of this model and of its draft model, with one process per core.

        Without it, kernels are compiled one by one when they are first used. Compiled kernels are kept on disk.
        Clears the cache.

        Parameters
        ----------
        progress : callable, optional
            Called as ``progress("compile", done, total)``. It counts the kernels that were missing.

        Returns
        -------
        float
            Seconds, close to 0 if no kernel is missing.

        Raises
        ------
        UsageError
            If the model is closed.
        """
        self.check_open()
        function("progress", progress)
        started = time.perf_counter()
        compile_all(self.jobs(), progress)
        self.warm_up()
        if isinstance(self.draft, DraftModel):
            self.draft.llm.warm_up()
        seconds = time.perf_counter() - started
        self.compile_seconds += seconds
        return seconds

    # --- answers -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = -1,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        typical_p: float = 1.0,
        repeat_penalty: float | None = None,
        repeat_last_n: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_penalty_last_n: int = -1,
        dry_sequence_breakers: Sequence[str] = BREAKERS,
        xtc_probability: float | None = None,
        xtc_threshold: float | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        grammar: Grammar | None = None,
        seed: int = -1,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        heal: bool = False,
        logprobs: int = 0,
        on_prefill: Callable[[int, int], None] | None = None,
        speculation: SpeculationParams | None = None,
        cache_salt: str = "",
    ) -> Generation:
        """Begin an answer that continues a text or a sequence of token ids.

        Parameters
        ----------
        prompt : str or sequence of int
            Text or token ids to continue.
        max_tokens : int
            Maximum number of tokens to generate; -1: until the model stops or the context is full.
        temperature, top_k, top_p, min_p, typical_p, repeat_penalty, repeat_last_n, presence_penalty, frequency_penalty
            How tokens are chosen: fields of :class:`engine.SamplingParams`, which describes them. None: the value that the
            file recommends (``sampling``), or else the default of :class:`engine.SamplingParams`.
        logit_bias : mapping of int to float, optional
            Token id -> value added to its logit; ``-inf`` bans the token.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, xtc_probability, xtc_threshold
            DRY and XTC: fields of :class:`engine.SamplingParams`, too, and None means the same.
        dry_sequence_breakers : sequence of str
            Texts that limit the repetitions that DRY penalizes: a repetition does not extend back beyond them.
        logits_processors : sequence of callable
            Functions ``f(ids, logits)`` that change the logits before bias and penalties. Each gets the result of the
            previous one. ``ids`` is the tuple of the tokens so far, prompt included; ``logits``, float32 [n_vocab], is a
            copy. A function modifies it and returns None, or returns a float32 array [n_vocab]; ``-inf`` bans a token.
            Its result must depend only on its arguments: it is called at least once per token, and also for drafts,
            including those that are rejected. Its exceptions are raised unchanged while the answer is generated. It may
            end the answer with :meth:`Generation.close`; any other use of the model in it raises UsageError.
        grammar : Grammar, optional
            What the answer may be: a JSON value, a text that matches a regular expression, or a text of a language. The
            model chooses only tokens with which it can still become that, and ends it only where it is complete. An answer
            that ends early, by ``max_tokens``, ``stop`` or a full context, is a beginning of it. An answer also ends, with an
            error, where no token is permitted, or where the grammar needs too much work.
        seed : int
            0 to 2**64 - 1, or -1 for a random one. The same seed gives the same text.
        stop : str or sequence of str
            Texts that end the answer. They are not part of it.
        ignore_eos : bool
            Never choose end-of-generation tokens. With a grammar, choose one only when the grammar permits nothing else.
        heal : bool
            Remove the last token of a text prompt, so that the answer can begin with a longer one (many models have a
            single token for "):" and the newline after it). Has no effect if the prompt consists of token ids, or with a
            grammar.
        logprobs : int
            How many of the most probable tokens to record per token; 0 records nothing.
        on_prefill : callable, optional
            Called as ``on_prefill(done, total)``, in tokens, while the prompt is read. It may end the answer with
            :meth:`Generation.close`, but must not use the model otherwise, which raises UsageError.
        speculation : SpeculationParams, optional
            How to draft and which drafts to accept. By default the draft model is used if one is loaded.
        cache_salt : str
            What the cache holds is shared only among answers with the same salt, so that the time of an answer does not say
            what others have asked. The text does not depend on it.

        Returns
        -------
        Generation
            The answer. Iterate over it to compute it and to get its text in pieces.

        Raises
        ------
        UsageError
            If an argument is out of range or of a wrong type, or if the model is closed.
        ContextError
            If the prompt leaves no room for an answer.

        Examples
        --------
        >>> import engine
        >>> llm = engine.load(n_ctx=256)
        >>> for piece in llm.generate("for i in range(", max_tokens=4, temperature=0):
        ...     print(repr(piece))
        '1'
        ','
        ' '
        '1'
        """
        self.check_open()
        ids = self.tokenize(prompt) if isinstance(prompt, str) else token_ids(prompt)
        if not isinstance(grammar, Grammar | None):
            raise UsageError(f"grammar must be a Grammar, such as Grammar.json_schema({{}}), not {described(grammar)}.")
        begins_with = self._take_back(ids) if heal and grammar is None and isinstance(prompt, str) else ""
        if not isinstance(logit_bias, Mapping | None):
            raise UsageError(f"logit_bias must map token ids to numbers, not {described(logit_bias)}.")
        bias = dict(logit_bias or {})
        endless = ignore_eos and grammar is None
        never = self.tokenizer.suppressed_ids | (self.tokenizer.eog_ids if endless else frozenset())
        bias |= dict.fromkeys(never, float("-inf"))
        given = locals() | {"logit_bias": bias, "dry_breakers": ()}
        params = SamplingParams(**filled({f.name: given[f.name] for f in fields(SamplingParams)}, self.sampling))
        # Without DRY the vocabulary is not searched for breakers.
        if params.penalizes_repetitions:
            params = replace(params, dry_breakers=breaker_ids(self.tokenizer, dry_sequence_breakers))
        require(whole("max_tokens", max_tokens) >= -1, "max_tokens", "-1 (no limit) or more", max_tokens)
        n_vocab = self.config.n_vocab
        require(0 <= whole("logprobs", logprobs) <= n_vocab, "logprobs", f"between 0 and {n_vocab}", logprobs)
        function("on_prefill", on_prefill)
        if not isinstance(cache_salt, str):
            raise UsageError(f"cache_salt must be a text, not {described(cache_salt)}.")
        self.check_ids(ids)
        if len(ids) >= self.n_ctx and max_tokens != 0:
            raise ContextError(
                f"the prompt has {len(ids)} tokens, which fills the context of {self.n_ctx}; "
                "shorten the prompt or choose a larger context (-c)."
            )
        ending = Ending()
        if params.logits_processors:
            params = replace(params, logits_processors=[ending.around(each) for each in params.logits_processors])
        matcher = Matcher(grammar, self.tokenizer, len(ids), ends_late=ignore_eos) if grammar is not None else None
        sampler = Sampler(params, self.config.n_vocab, matcher)
        return Generation(
            self,
            ids,
            sampler,
            max_tokens=max_tokens,
            stop=stop_texts(stop),
            ignore_eos=endless,
            top_logprobs=logprobs,
            begins_with=begins_with,
            on_prefill=on_prefill,
            speculation=self._speculation(speculation or SpeculationParams(), sampler),
            ending=ending,
            salt=cache_salt,
        )

    def _speculation(self, params: SpeculationParams, sampler: Sampler) -> Speculation | None:
        """The draft sources of one answer; None if there are none."""
        if not isinstance(params, SpeculationParams):
            raise UsageError(f"speculation must be SpeculationParams, not {described(params)}.")
        if not params.enabled or (self.draft is None and not params.lookup):
            return None
        return Speculation(params, sampler, self.draft, self.n_bytes_read)

    def _take_back(self, ids: list[int]) -> str:
        """Remove the last of ``ids`` and return its text.  Remove nothing and return "" if it is the only one, a control
        token, or a part of a character."""
        text = self.tokenizer.decode(ids[-1:]) if len(ids) > 1 else ""
        if not text or text.encode() != self.tokenizer.token_bytes(ids[-1]):
            return ""
        ids.pop()
        return text

    def complete(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Generation:
        """Continue a text or a sequence of token ids, and wait for the whole answer.

        Parameters
        ----------
        prompt : str or sequence of int
            Text or token ids to continue.
        **options
            Keyword arguments of :meth:`generate`, such as ``max_tokens``, ``temperature``, ``seed``, ``stop`` and
            ``logprobs``.

        Returns
        -------
        Generation
            The finished answer.

        Raises
        ------
        UsageError
            If an argument is out of range or of a wrong type, or if the model is closed.
        ContextError
            If the prompt leaves no room for an answer.

        Examples
        --------
        >>> import engine
        >>> llm = engine.load(n_ctx=256)
        >>> llm.complete("def add(a, b):\\n    return", max_tokens=40, temperature=0, stop="\\n").text
        ' a + b'
        """
        with self.answering():
            return _finished(self.generate(prompt, **options))

    async def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> AsyncIterator[str]:
        """The pieces of an answer, for use in an event loop: ``async for piece in llm.stream(prompt)``.

        Several answers that are streamed at once are computed together, as many as ``parallel`` of :func:`engine.load`
        says. An answer ends early if the iterator is closed or its task is cancelled.

        Parameters
        ----------
        prompt : str or sequence of int
            Text or token ids to continue.
        **options
            Keyword arguments of :meth:`generate`.

        Yields
        ------
        str
            The next piece of the text.

        Raises
        ------
        UsageError
            If an argument is out of range or of a wrong type, or if the model is closed.
        ContextError
            If the prompt leaves no room for an answer.

        Examples
        --------
        >>> import asyncio, engine
        >>> llm = engine.load(n_ctx=256)
        >>> async def show():
        ...     async for piece in llm.stream("for i in range(", max_tokens=3, temperature=0):
        ...         print(repr(piece))
        >>> asyncio.run(show())
        '1'
        ','
        ' '
        """
        generation, loop = self.generate(prompt, **options), asyncio.get_running_loop()
        try:
            # Each waits in a thread of its own: there are no more of them than answers.
            while (piece := await loop.run_in_executor(self._threads, next, generation, None)) is not None:
                yield piece
        finally:
            generation.close()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: bool = False,
        chat_template: str | os.PathLike[str] | ChatTemplate | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """Answer a conversation.

        The answer depends on the arguments only, not on earlier calls. Messages that the cache still holds from
        earlier calls are not read again.

        Parameters
        ----------
        messages : sequence of mapping
            The conversation so far: mappings with ``role`` ("system", "user" or "assistant") and ``content``.
            Whatever a message contains, its text never becomes a control token.
        stream : bool
            Return immediately an answer to iterate over, instead of the finished one.
        chat_template : str, path or ChatTemplate, optional
            Name of a built-in template, path of a Jinja file, or a template. By default the model's own is used.
        chat_template_kwargs : mapping, optional
            Additional variables for the template, such as ``tools`` or ``enable_thinking``.
        **options
            Keyword arguments of :meth:`generate`, such as ``max_tokens``, ``temperature``, ``seed``, ``stop`` and
            ``logprobs``.

        Returns
        -------
        Generation
            The answer.

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
        template = self._template(chat_template)
        values = template_values({} if chat_template_kwargs is None else chat_template_kwargs)
        ids = template.encode(checked_messages(messages), **values)
        generation = self.generate(ids, **options)
        if stream:
            return generation
        with self.answering():
            return _finished(generation)

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


def _finished(generation: Generation) -> Generation:
    """An answer after its last piece."""
    try:
        for _ in generation:
            pass
    finally:
        generation.close()
    return generation
