"""Answers: texts that a model continues."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Unpack, overload

from engine.checks import described, function, require, token_ids, whole
from engine.decode.generation import Generation, begun
from engine.errors import ContextError, UsageError
from engine.grammar.grammar import Grammar
from engine.grammar.matcher import Matcher
from engine.limits import MOST_PARALLEL
from engine.models.base import Model
from engine.options import Options, Prompt, Prompts
from engine.sampling.defaults import filled
from engine.sampling.params import LogitsProcessor, SamplerParams
from engine.sampling.processors import Ending
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams, stop_texts, with_sampling_params
from engine.schemas import Schema, grammar_of
from engine.several import each, finish, is_several
from engine.speculative.params import SpeculationParams
from engine.speculative.speculation import Speculation
from engine.stateful_model import StatefulModel
from engine.stream import Stream
from engine.text.breakers import BREAKERS, breaker_ids
from engine.text.tokenizer import Tokenizer


class Answers(StatefulModel):
    """A model that continues texts."""

    #: The sampling parameters that its file recommends.
    sampling: Mapping[str, Any]
    #: Bytes of weights that one token reads.
    n_bytes_read: int
    #: Seconds that loading and compiling it took.
    load_seconds: float
    compile_seconds: float

    def __init__(self, model: Model, tokenizer: Tokenizer, snapshot_bytes: int) -> None:
        super().__init__(model, tokenizer, snapshot_bytes)
        #: The threads of answers that are streamed in an event loop.
        self._threads = ThreadPoolExecutor(MOST_PARALLEL, "stream")

    def renew(self) -> None:
        """In a process that was forked: the threads of streamed answers do not exist."""
        super().renew()
        self._threads = ThreadPoolExecutor(MOST_PARALLEL, "stream")

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

    # --- answers -----------------------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation: ...
    @overload
    def generate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Generation]: ...
    @with_sampling_params
    def generate(
        self,
        prompt: Prompt | Prompts,
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
        sampling_params: SamplingParams | None = None,
        schema: Schema | None = None,
        receipt: bool = False,
    ) -> Generation | list[Generation]:
        """Begin an answer that continues a text or a sequence of token ids.

        Parameters
        ----------
        prompt : str, sequence of int, or list of them
            Text or token ids to continue, or a list of prompts. Answers whose pieces are requested by turns are computed
            together.
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
        sampling_params : SamplingParams, optional
            Values of the arguments that are not given.
        schema : mapping or class, optional
            What the answer, which is JSON, follows: a JSON schema as a dict, or a class with ``model_json_schema()``, such as
            a subclass of ``pydantic.BaseModel``, whose fields are then the only ones. ``parsed`` of the answer is a value of
            Python, or an object of the class. Not with ``grammar``.
        receipt : bool
            Record what :meth:`Generation.receipt` needs: of each token the digest of the logits that it was chosen from. Not
            with logits processors, nor with drafts that are accepted by "ratio" or "p-min".

        Returns
        -------
        Generation or list of Generation
            The answer, or, for a list, the answers in the same order. Iterate over an answer to compute it and to get its
            text in pieces.

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
        options = locals().copy()
        for name in ("self", "prompt", "sampling_params"):
            del options[name]
        self.check_open()
        if schema is not None:
            if grammar is not None:
                raise UsageError("schema and grammar both describe the answer: leave one of them out.")
            options["grammar"] = grammar_of(schema)
        if is_several(prompt):
            return each("prompt", prompt, lambda one: self._begin(one, **options))
        return self._begin(prompt, **options)

    def _begin(
        self,
        prompt: object,
        *,
        max_tokens: int,
        stop: str | Sequence[str],
        grammar: Grammar | None,
        schema: Schema | None,
        ignore_eos: bool,
        heal: bool,
        logprobs: int,
        logit_bias: Mapping[int, float] | None,
        dry_sequence_breakers: Sequence[str],
        on_prefill: Callable[[int, int], None] | None,
        speculation: SpeculationParams | None,
        cache_salt: str,
        receipt: bool,
        **chosen: Any,
    ) -> Generation:
        """One answer; chosen: the other fields of SamplerParams."""
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
        params = SamplerParams(**filled(chosen | {"logit_bias": bias}, self.sampling))
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
                "shorten the prompt or choose a larger context (n_ctx=...).",
                len(ids),
                self.n_ctx,
            )
        ending = Ending()
        if params.logits_processors:
            params = replace(params, logits_processors=[ending.around(each) for each in params.logits_processors])
        matcher = Matcher(grammar, self.tokenizer, len(ids), ends_late=ignore_eos) if grammar is not None else None
        sampler = Sampler(params, self.config.n_vocab, matcher)
        speculating = self._speculation(speculation or SpeculationParams(), sampler, cache_salt)
        if receipt:
            _check_receipt(params, speculating)
        return begun(
            self,
            ids,
            sampler,
            max_tokens=max_tokens,
            stop=stop_texts(stop),
            ignore_eos=endless,
            top_logprobs=logprobs,
            begins_with=begins_with,
            on_prefill=on_prefill,
            speculation=speculating,
            ending=ending,
            salt=cache_salt,
            schema=schema,
            receipt=receipt,
        )

    def _speculation(self, params: SpeculationParams, sampler: Sampler, salt: str) -> Speculation | None:
        """The draft sources of one answer; None if there are none."""
        if not isinstance(params, SpeculationParams):
            raise UsageError(f"speculation must be SpeculationParams, not {described(params)}.")
        if not params.enabled or (self.draft is None and not params.lookup):
            return None
        history = self.histories.of(salt) if params.lookup else None
        return Speculation(params, sampler, self.draft, self.n_bytes_read, history)

    def _take_back(self, ids: list[int]) -> str:
        """Remove the last of ``ids`` and return its text.  Remove nothing and return "" if it is the only one, a control
        token, or a part of a character."""
        text = self.tokenizer.decode(ids[-1:]) if len(ids) > 1 else ""
        if not text or text.encode() != self.tokenizer.token_bytes(ids[-1]):
            return ""
        ids.pop()
        return text

    @overload
    def complete(self, prompt: Prompt, *, progress: bool = False, **options: Unpack[Options]) -> Generation: ...
    @overload
    def complete(self, prompt: Prompts, *, progress: bool = False, **options: Unpack[Options]) -> list[Generation]: ...
    def complete(
        self, prompt: Any, *, progress: bool = False, **options: Unpack[Options]
    ) -> Generation | list[Generation]:
        """Continue a text or a sequence of token ids, or each of several, and wait for the whole answer.

        The answers to a list of prompts are computed together, ``parallel`` of :func:`engine.load` at a time. Each has the
        same bits as alone.

        Parameters
        ----------
        prompt : str, sequence of int, or list of them
            Text or token ids to continue, or a list of prompts.
        progress : bool
            Show how many answers of a list are finished, on stderr, if that is a terminal.
        **options
            Keyword arguments of :meth:`generate`, such as ``max_tokens``, ``temperature``, ``seed``, ``stop`` and
            ``logprobs``.

        Returns
        -------
        Generation or list of Generation
            The finished answer, or, for a list, the finished answers in the same order.

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
        >>> prompts = ["def add(a, b):\\n    return", "for i in range("]
        >>> [answer.text for answer in llm.complete(prompts, max_tokens=4, temperature=0, stop="\\n")]
        [' a + b', '1, 1']
        """
        with self.answering():
            return self._finished(self.generate(prompt, **options), progress)

    def _finished(self, answer: Any, progress: bool) -> Any:
        """One answer or a list of answers, after the last piece."""
        finish(answer if isinstance(answer, list) else [answer], len(self.slots), progress)
        return answer

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Begin an answer in an event loop: ``async for piece in llm.stream(prompt)`` or ``await llm.stream(prompt)``.

        Several answers that are streamed at once are computed together, as many as ``parallel`` of :func:`engine.load`
        says. An answer ends early if the iterator is closed or its task is cancelled.

        Parameters
        ----------
        prompt : str or sequence of int
            Text or token ids to continue.
        **options
            Keyword arguments of :meth:`generate`.

        Returns
        -------
        Stream
            The answer. Iterate over it to get the text in pieces, or await it to get the finished answer.

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
        return Stream(self.generate(prompt, **options), self._threads)


def _check_receipt(params: SamplerParams, speculation: Speculation | None) -> None:
    """Raise UsageError if an answer cannot be replayed from its tokens."""
    if params.logits_processors:
        raise UsageError("a receipt cannot hold logits processors, which are functions of a program: leave them out.")
    mode = speculation.params.accept if speculation is not None else "exact"
    if mode != "exact" and not params.greedy:
        raise UsageError(
            f"an answer whose drafts are accepted by {mode} depends on the drafts, so it has no receipt: accept them "
            'exactly (accept="exact").'
        )
