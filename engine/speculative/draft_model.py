"""A small model that drafts for a large one with the same vocabulary (Leviathan et al. 2023, Chen et al. 2023)."""

import contextlib
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from engine.arrays import Array
from engine.cache.kv import KVCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.errors import ModelError, NotFinite, NoToken
from engine.ops.executor import Forward
from engine.sampling.sampler import Sampler
from engine.speculative.acceptance import distribution
from engine.speculative.proposal import Distribution, Proposal, script_of
from engine.speculative.source import LoadedLLM, Source

MOST_EXTRA = 256
"""The most tokens that one of two vocabularies may have more than the other: padding at the end of a matrix."""

CONFIDENCE = 10
"""The number of likeliest tokens over which ``draft_p_min`` computes the probability of a draft, as in llama.cpp."""


class DraftModel(Source):
    """A loaded model as a draft source.  It has sequences of its own, one for each of the target's, which follow the answers:
    accepted tokens are read once, rejected ones are forgotten."""

    name = "model"

    reads = 2
    """Tokens that the first pass of a step reads if drafts are made on the target's device.  After a step whose drafts were
    all accepted, the last of them has not been read; otherwise a token is read again and stores the same values in the
    cache.  So the host need not know which case it was."""

    def __init__(self, llm: LoadedLLM, target: LoadedLLM) -> None:
        """Raises ModelError if the vocabularies differ."""
        self.llm = llm
        check_vocabulary(llm, target)
        self.n_vocab = min(llm.config.n_vocab, target.config.n_vocab)
        #: int32 [n_ctx] or None: the token proposed for a position instead of the model's own, unless negative.
        self.script: np.ndarray | None = None
        #: Whether it knows every token of the target.
        self.reads_all = llm.config.n_vocab >= target.config.n_vocab
        #: The changes of each sequence when it was used last: whether something else has used it since.
        self._changes: dict[int, int] = {}
        #: The tokens of the answer that each sequence was used for last, which grow with the answer.
        self._known: dict[int, Sequence[int]] = {}

    @property
    def cost(self) -> float:
        """Bytes that drafting a token reads."""
        return float(self.llm.n_bytes_read)

    def sampler(self, sampler: Sampler) -> Sampler:
        """The target's sampler, restricted to the tokens that both models know."""
        if sampler.n_vocab == self.n_vocab:
            return sampler
        return sampler.narrowed(self.n_vocab)

    def can_read(self, tokens: Sequence[int]) -> bool:
        """Whether this model knows all of ``tokens``."""
        return self.reads_all or not tokens or max(tokens) < self.n_vocab

    def propose(
        self,
        known: Sequence[int],
        count: int,
        sampler: Sampler,
        p_min: float,
        with_distributions: bool,
        sequence: TokenSequence,
    ) -> Proposal:
        """Up to ``count`` tokens that may follow ``known``, drawn by ``sampler`` (see :meth:`sampler`).  sequence: the
        target's, whose salt counts here, too.

        p_min: stop at a token that has a lower probability (see :func:`confidence`).
        with_distributions: also return the distribution each was drawn from; ``p_min`` then applies to the likeliest token:
            to drop a drawn token because of what it is would not preserve the distribution.
        """
        if not self.can_read(known):
            return Proposal()
        whole = sampler.n_vocab == self.llm.config.n_vocab and self.script is None
        if whole and not with_distributions and p_min == 0 and self.llm.can_sample(sampler):
            drafts: list[int] = []
            with contextlib.suppress(NoToken, NotFinite):  # no error before the target cannot choose one either
                drafts.extend(
                    token for token, _ in islice(self.llm.decode(known, sampler, count, salt=sequence.salt), count)
                )
            return Proposal(drafts)
        return drafted(
            lambda history: self.logits(history, sequence.salt),
            known,
            count,
            sampler,
            p_min,
            with_distributions,
            script_of(self, sequence.slot),
        )

    def logits(self, history: list[int], salt: str = "") -> np.ndarray:
        """The logits of the token after ``history`` with a salt: float32 [n_vocab], for the tokens that both models know."""
        return self.llm.extend(history, salt)[: self.n_vocab]

    # --- passes on the target's own device -------------------------------------------------------------------------

    @property
    def passes(self) -> tuple[Forward[Array]]:
        """The pass of all drafts."""
        return (self.llm.model.compute,)

    def catch_up(self, known: Sequence[int], target: TokenSequence) -> None:
        """Make the sequence in the slot of ``target`` hold all of ``known`` but the last one or two tokens, with the salt of
        ``target``."""
        slot = target.slot
        sequence = self.sequence(slot)
        lags = self._changes.get(slot) != sequence.changes or len(known) - sequence.length > self.reads
        if self._known.get(slot) is not known:
            # Of another answer, which may have followed another text.
            lags = lags or sequence.tokens != known[: sequence.length]
        if lags or sequence.salt != target.salt:
            self.llm.hold(slot, known[:-1], target.salt)
            self._changes[slot] = sequence.changes
        self._known[slot] = known

    def keep(self, known: Sequence[int], count: int, tokens: Sequence[int], slot: int) -> None:
        """Record that ``tokens`` followed ``known`` in a step with ``count`` drafts: keep what this model has read of it."""
        sequence = self.sequence(slot)
        unread = known[sequence.length :]
        sequence.claim(sequence.length, len(unread) + count - 1)
        sequence.commit([*unread, *tokens[: min(len(tokens), count) - 1]])
        self._changes[slot] = sequence.changes

    @property
    def cache(self) -> KVCache:
        """The model's own cache."""
        return self.llm.cache

    def sequence(self, slot: int) -> TokenSequence:
        """What the model has read of the target's sequence in a slot."""
        return self.llm.model.sequences[slot]


Judge = Callable[[list[int], np.ndarray, int], float]
"""The probability that the target keeps a draft, from the text before it, the logits that it was drawn from, float32
[n_vocab], and the draft."""


def by_logits(history: list[int], logits: np.ndarray, token: int) -> float:
    """The probability of a draft by the logits that it was drawn from (:func:`confidence`)."""
    return confidence(logits, token)


def drafted(
    logits_after: Callable[[list[int]], np.ndarray],
    known: Sequence[int],
    count: int,
    sampler: Sampler,
    p_min: float,
    with_distributions: bool,
    script: np.ndarray | None,
    judge: Judge = by_logits,
) -> Proposal:
    """Up to ``count`` tokens after ``known``, one by one.  There are fewer if none can be chosen, which is no error before
    the target cannot choose one either.

    logits_after: the logits of the token after a text, float32 [n_vocab].
    judge: the probability of a draft that is compared with ``p_min``.
    script: int32 [n_ctx] or None: the token proposed for a position instead of a sampled one, unless negative.

    The other arguments are those of :meth:`DraftModel.propose`.
    """
    history = list(known)
    drafts: list[int] = []
    distributions: list[Distribution] = []
    for _ in range(count):
        try:
            logits = logits_after(history)
            token = sampler.sample(logits, len(history), history)
        except (NoToken, NotFinite):
            break
        if script is not None and script[len(history)] >= 0:
            token = int(script[len(history)])
        judged = int(np.argmax(logits)) if with_distributions else token
        if p_min > 0 and judge(history, logits, judged) < p_min:
            break
        drafts.append(token)
        if with_distributions:
            distributions.append(distribution(sampler, logits, history))
        history.append(token)
    return Proposal(drafts, distributions if with_distributions else None)


def confidence(logits: np.ndarray, token: int) -> float:
    """The probability of a token under the softmax of the :data:`CONFIDENCE` largest logits; 0 for any other token."""
    top = np.sort(np.partition(logits, -min(CONFIDENCE, logits.size))[-CONFIDENCE:]).astype(np.float64)
    if logits[token] < top[0]:
        return 0.0
    return float(np.exp(logits[token] - top[-1]) / np.exp(top - top[-1]).sum())


def check_vocabulary(draft: LoadedLLM, target: LoadedLLM) -> None:
    """Raise ModelError unless the tokens of two models are the same, up to padding at the end of one of them."""
    check_tokens(draft.path, draft.tokenizer.vocabulary.tokens, target)


def check_tokens(path: Path, ours: Sequence[str], target: LoadedLLM) -> None:
    """Raise ModelError unless the tokens of the file at ``path`` are the target's, up to padding at the end of either."""
    theirs = target.tokenizer.vocabulary.tokens
    name, remedy = f"{path} cannot draft for {target.path}", "choose a draft model of its family."
    if abs(len(ours) - len(theirs)) > MOST_EXTRA:
        raise ModelError(f"{name}: it has {len(ours)} tokens and the model {len(theirs)}; {remedy}")
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            raise ModelError(f"{name}: token {i} is {one[:40]!r} in it and {other[:40]!r} in the model; {remedy}")
