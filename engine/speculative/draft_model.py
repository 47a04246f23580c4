"""A small model that drafts for a large one with the same vocabulary (Leviathan et al. 2023, Chen et al. 2023)."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from engine.arrays import Array
from engine.cache.kv import KVCache
from engine.decode.sampler import Sampler
from engine.errors import ModelError
from engine.ops import Forward
from engine.speculative.acceptance import distribution
from engine.speculative.proposal import Distribution, Proposal
from engine.speculative.source import LoadedModel, Source

MOST_EXTRA = 256
"""Tokens that one of two vocabularies may have more than the other: padding at the end of a matrix."""

CONFIDENCE = 10
"""Likeliest tokens among which ``draft_p_min`` looks at the probability of a draft, as llama.cpp does."""


class DraftModel(Source):
    """A loaded model as a draft source.  It has a cache of its own, which follows the answer: tokens that were accepted are
    read once, those that were not are forgotten."""

    name = "model"

    reads = 2
    """Tokens that the first pass of a step reads where drafts are made on the target's device.  After a step whose
    drafts were all accepted, the last of them has not been read; otherwise a token is read again and leaves the same in
    the cache.  So the host need not know which it was."""

    def __init__(self, llm: LoadedModel, target: LoadedModel) -> None:
        """ModelError where the vocabularies differ."""
        self.llm = llm
        check_vocabulary(llm, target)
        self.n_vocab = min(llm.config.n_vocab, target.config.n_vocab)
        #: int32 [n_ctx] or None: what is proposed for a position in place of the model's own token, unless negative.
        self.script: np.ndarray | None = None
        #: Whether it knows every token of the target.
        self.reads_all = llm.config.n_vocab >= target.config.n_vocab

    @property
    def cost(self) -> float:
        """Bytes that a drafted token reads."""
        return float(self.llm.n_bytes_read)

    def sampler(self, sampler: Sampler) -> Sampler:
        """The target's sampler, for the tokens that both models know."""
        if sampler.n_vocab == self.n_vocab:
            return sampler
        return sampler.narrowed(self.n_vocab)

    def can_read(self, tokens: Sequence[int]) -> bool:
        """Whether this model knows all of some tokens."""
        return self.reads_all or not tokens or max(tokens) < self.n_vocab

    def propose(
        self, known: Sequence[int], count: int, sampler: Sampler, p_min: float, with_distributions: bool
    ) -> Proposal:
        """Up to ``count`` tokens that may follow ``known``, drawn by ``sampler`` (see :meth:`sampler`).

        p_min: fewer where one of them has less than this (see :func:`confidence`).
        with_distributions: add what each was drawn from; ``p_min`` is then about the likeliest token: to leave out what was
            drawn, for what it is, would not keep the distribution.
        """
        if not self.can_read(known):
            return Proposal()
        whole = sampler.n_vocab == self.llm.config.n_vocab and self.script is None
        if whole and not with_distributions and p_min == 0 and self.llm.can_sample(sampler):
            return Proposal([token for token, _ in islice(self.llm.decode(known, sampler, count), count)])
        return drafted(self.logits, known, count, sampler, p_min, with_distributions, self.script)

    def logits(self, history: list[int]) -> np.ndarray:
        """What follows ``history``: float32 [n_vocab], of the tokens that both models know."""
        return self.llm.extend(history)[: self.n_vocab]

    # --- passes on the target's own device -------------------------------------------------------------------------

    @property
    def compute(self) -> Forward[Array]:
        """A pass."""
        return self.llm.model.compute

    def catch_up(self, known: Sequence[int], owner: object) -> None:
        """Have the cache hold all of ``known`` but the last one or two tokens; ``owner`` starts passes from now on."""
        llm = self.llm
        if not llm.used_by(owner) or len(known) - llm.n_cached > self.reads:
            llm.read(known[:-1])
        llm.lend(owner)

    def keep(self, known: Sequence[int], count: int, tokens: Sequence[int]) -> None:
        """``tokens`` followed ``known`` in a step with ``count`` drafts: what of it this model has read stays."""
        unread = known[self.llm.n_cached :]
        self.llm.keep([*unread, *tokens[: min(len(tokens), count) - 1]], len(unread) + count - 1)

    @property
    def cache(self) -> KVCache:
        """Its own cache."""
        return self.llm.cache


def drafted(
    logits_after: Callable[[list[int]], np.ndarray],
    known: Sequence[int],
    count: int,
    sampler: Sampler,
    p_min: float,
    with_distributions: bool,
    script: np.ndarray | None,
) -> Proposal:
    """Up to ``count`` tokens after ``known``, one by one; for the other arguments see :meth:`DraftModel.propose`."""
    history = list(known)
    drafts: list[int] = []
    distributions: list[Distribution] = []
    for _ in range(count):
        logits = logits_after(history)
        token = sampler.sample(logits, len(history), history)
        if script is not None and script[len(history)] >= 0:
            token = int(script[len(history)])
        judged = int(np.argmax(logits)) if with_distributions else token
        if p_min > 0 and confidence(logits, judged) < p_min:
            break
        drafts.append(token)
        if with_distributions:
            distributions.append(distribution(sampler, logits, history))
        history.append(token)
    return Proposal(drafts, distributions if with_distributions else None)


def confidence(logits: np.ndarray, token: int) -> float:
    """The probability of a token under the softmax of the :data:`CONFIDENCE` largest logits; 0 for any other."""
    top = np.sort(np.partition(logits, -min(CONFIDENCE, logits.size))[-CONFIDENCE:]).astype(np.float64)
    if logits[token] < top[0]:
        return 0.0
    return float(np.exp(logits[token] - top[-1]) / np.exp(top - top[-1]).sum())


def check_vocabulary(draft: LoadedModel, target: LoadedModel) -> None:
    """ModelError, one sentence, unless the tokens of two models are the same, up to padding at the end of one of them."""
    check_tokens(draft.path, draft.tokenizer.vocabulary.tokens, target)


def check_tokens(path: Path, ours: Sequence[str], target: LoadedModel) -> None:
    """The same for the tokens of the file at ``path``."""
    theirs = target.tokenizer.vocabulary.tokens
    name, remedy = f"{path} cannot draft for {target.path}", "choose a draft model of its family."
    if abs(len(ours) - len(theirs)) > MOST_EXTRA:
        raise ModelError(f"{name}: it has {len(ours)} tokens and the model {len(theirs)}; {remedy}")
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            raise ModelError(f"{name}: token {i} is {one[:40]!r} in it and {other[:40]!r} in the model; {remedy}")
