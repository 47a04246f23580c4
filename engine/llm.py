"""A loaded model.  ``engine/loading.py`` opens it; ``engine/conversations.py`` is how it answers."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np

from engine.checks import function, require, token_ids, whole
from engine.compile.pool import compile_all
from engine.documented import Documented
from engine.embeddings import Embeddings
from engine.errors import UsageError
from engine.gguf.file import GGUF
from engine.limits import MOST_DRAFTS
from engine.locking import in_turn
from engine.models.base import Model
from engine.models.traffic import weight_bytes_per_token
from engine.ops.memory import Progress
from engine.sampling.defaults import sampling_defaults
from engine.speculative.dflash import DFlashDraft
from engine.speculative.draft_model import DraftModel
from engine.speculative.eagle3 import Eagle3Draft
from engine.speculative.mtp import MTPDraft
from engine.text.rerank import RerankPrompt
from engine.text.template.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    # What checks receipts and what traces tokens is imported where it is used: importing them takes time.
    from engine.replay import Verification
    from engine.trace.trace import Trace


class LLM(Embeddings, metaclass=Documented):
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
    cache_types : tuple of str
        Element types of the keys and of the values in the cache, such as ``("i8", "i8")``.
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
    fingerprint : str
        Identifies everything that an answer depends on besides its prompt and its options: all weights, their formats, the
        tokenizer and the chat template, the types of the cache and its budget, and the arithmetic. Two models with the same
        fingerprint give the same answers. The first time, all of the file is read and hashed, by all cores; the result is
        remembered in the user's cache.
    closed : bool
        Whether :meth:`close` was called.
    """

    documented = (
        *(
            "generate",
            "complete",
            "stream",
            "chat",
            "stream_chat",
            "embed",
            "rank",
            "score",
            "verify",
            "trace",
            "tokenize",
            "detokenize",
            "logits",
            "prefill",
            "step",
        ),
        *("reset", "compile", "save_state", "load_state", "close"),
        *("path", "config", "tokenizer", "chat_template", "n_ctx", "batch_size", "n_threads", "n_params", "n_bytes"),
        *(
            "n_bytes_read",
            "cache_bytes",
            "cache_types",
            "memory",
            "n_cached",
            "load_seconds",
            "compile_seconds",
            "draft",
        ),
        *("sampling", "warnings", "reread", "fingerprint", "closed"),
    )
    """The names that the documentation has; the others belong to the machinery of the engine."""

    def __init__(self, *_: object, **__: object) -> None:
        """Raises UsageError: models are opened by :func:`engine.load`."""
        raise UsageError("a model is opened by load(), with the same arguments: write load(...) instead of LLM(...).")

    def _open(
        self,
        gguf: GGUF,
        tokenizer: Tokenizer,
        model: Model,
        load_seconds: float,
        snapshot_bytes: int,
    ) -> None:
        super().__init__(model, tokenizer, snapshot_bytes)
        self.path = gguf.path
        self.chat_template = ChatTemplate.from_gguf(gguf, tokenizer)
        if model.classifier is not None:
            self.rerank_prompt = RerankPrompt.from_gguf(gguf, tokenizer)
        self.n_threads = model.ops.n_threads
        self.n_params = sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in gguf.tensors.values())
        self.n_bytes = gguf.n_bytes
        self.n_bytes_read = weight_bytes_per_token(gguf)
        self.cache_bytes = model.cache.n_bytes
        self.cache_types = (model.cache.types.k.name, model.cache.types.v.name)
        self.load_seconds = load_seconds
        self.compile_seconds = 0.0
        self.warnings: list[str] = []
        sampling, warnings = sampling_defaults(gguf)
        self.sampling = MappingProxyType(sampling)
        self.warnings += warnings
        if model.drafter is not None:
            kind = DFlashDraft if model.config.block else Eagle3Draft if model.fusion is not None else MTPDraft
            self.draft = kind(self)
        self._label = model.ops.label

    def __repr__(self) -> str:
        config = self.config
        name = f"{config.name or self.path.name!r} ({config.architecture}, {self.n_params / 1e6:.1f} M parameters)"
        if self.closed:
            return f"<LLM {name}, closed>"
        return f"<LLM {name} on {self._label}, {self.n_cached} of {self.n_ctx} tokens in the cache>"

    def __dir__(self) -> list[str]:
        return dir(type(self)) + [name for name in self.documented if name not in dir(type(self))]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a model cannot be pickled or copied: send its path to the other process and open it there with engine.load()."
        )

    # --- receipts ----------------------------------------------------------------------------------------------

    def verify(
        self,
        receipt: Mapping[str, Any] | str | os.PathLike[str],
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> "Verification":
        """Replay a receipt: whether this model gives these tokens, from logits with these digests.

        The prompt and the tokens are read in passes like a prompt, anew, and the sampler of the receipt chooses after each of
        them, so it takes as long as reading a prompt of that length. The weights are hashed, whatever is remembered of them.
        The device, the number of threads, drafts and the size of passes may differ from those of the answer.

        Parameters
        ----------
        receipt : mapping, str or path
            A receipt from :meth:`Generation.receipt`, or a file that holds one.
        on_prefill : callable, optional
            Called as ``on_prefill(done, total)``, in tokens. It must not use the model.

        Returns
        -------
        Verification
            Whether all is the same, or what differs first, and by how much.

        Raises
        ------
        UsageError
            If the file cannot be read, if the receipt has parameters that this engine does not know, or if the model is
            closed.
        ContextError
            If the text does not fit into the context.

        Examples
        --------
        >>> import engine
        >>> llm = engine.load(n_ctx=256)
        >>> receipt = llm.complete("def add(a, b):", max_tokens=8, seed=1, receipt=True).receipt()
        >>> llm.verify(receipt).same
        True
        >>> receipt["parameters"]["seed"] = 2
        >>> llm.verify(receipt).problem
        'the chain of hashes is not that of the receipt: something was changed.'
        """
        self.check_open()
        self.check_generates()
        from engine.replay import read_receipt, replay

        given = read_receipt(receipt) if isinstance(receipt, str | os.PathLike) else receipt
        with self.answering():
            return replay(self, given, on_prefill)

    # --- a look inside -----------------------------------------------------------------------------------------

    def trace(
        self,
        prompt: str | Sequence[int],
        *,
        token: int = -1,
        top: int = 5,
        drafts: int = 3,
        on_prefill: Callable[[int, int], None] | None = None,
        cache_salt: str = "",
    ) -> "Trace":
        """Follow one token through the layers: what a pass computes for it on the way to the logits.

        The numbers are those of the pass itself, whose logits have the bits of any other pass; only the weights of attention,
        which no kernel holds, are computed from its queries and the keys in the cache. Other threads wait while the token is
        read, but not while the text before it is.

        Parameters
        ----------
        prompt : str or sequence of int
            Text or token ids.
        token : int
            The number of the token, from 0; negative numbers count from the end. What follows it is not read.
        top : int
            How many of the most probable tokens to list after each layer, at least 1.
        drafts : int
            The most drafts after the token, from the draft model or from the model's own layer, or else from the text itself,
            to verify; 0: none.
        on_prefill : callable, optional
            Called as ``on_prefill(done, total)``, in tokens, while the text is read. It must not use the model.
        cache_salt : str
            As in :meth:`generate`.

        Returns
        -------
        Trace
            The residual stream, the attention, the experts and the states of each layer, and the drafts.

        Raises
        ------
        UsageError
            If an argument is out of range or of a wrong type, if the model is divided between devices, or if it is closed.
        ContextError
            If the text does not fit into the context.

        Examples
        --------
        >>> import engine
        >>> llm = engine.load(n_ctx=256)
        >>> trace = llm.trace("def add(a, b):\\n    return")
        >>> [layer.stream.lens[0].text for layer in trace.layers][-1]
        ' a'
        """
        self.check_open()
        self.check_generates()
        ids = self.tokenize(prompt) if isinstance(prompt, str) else token_ids(prompt)
        self.check_ids(ids)
        n, n_vocab = len(ids), self.config.n_vocab
        at = whole("token", token)
        length = "1 token" if n == 1 else f"{n} tokens"
        require(-n <= at < n, "token", f"{-n} to {n - 1}, since the prompt has {length}", token)
        require(1 <= whole("top", top) <= n_vocab, "top", f"between 1 and {n_vocab}", top)
        require(0 <= whole("drafts", drafts) <= MOST_DRAFTS, "drafts", f"between 0 and {MOST_DRAFTS}", drafts)
        read = ids[: at % n + 1]
        if self._tracer is None:
            from engine.trace.tracer import Tracer

            self._tracer = Tracer(self.model)
        with self.answering():
            if len(read) > 1:
                before: dict[str, Any] = {"max_tokens": 0, "on_prefill": on_prefill, "cache_salt": cache_salt}
                self._finished(self.generate(read[:-1], **before), False)
            with self.lock:
                return self._tracer.trace(self, read, top, drafts, cache_salt)

    # --- opening and closing -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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


def opened(gguf: GGUF, tokenizer: Tokenizer, model: Model, load_seconds: float, snapshot_bytes: int = 0) -> LLM:
    """A loaded model of the parts that it consists of."""
    llm = LLM.__new__(LLM)
    llm._open(gguf, tokenizer, model, load_seconds, snapshot_bytes)
    return llm
