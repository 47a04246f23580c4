"""Drafts after a token, and which of them the model keeps."""

from collections.abc import Sequence

import numpy as np

from engine.cache.sequence import Sequence as TokenSequence
from engine.models.base import Model
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.draft_model import DraftModel
from engine.speculative.lookup import PromptLookup
from engine.speculative.mtp import MTPDraft
from engine.trace.trace import TracedDraft, TracedDrafts


def drafted(
    model: Model,
    source: DraftModel | MTPDraft | None,
    sequence: TokenSequence,
    token: int,
    most: int,
) -> TracedDrafts | None:
    """Up to ``most`` drafts after the tokens of ``sequence`` and ``token``, the model's own choice, which one pass verifies;
    None if there are none.  The sequence keeps nothing of it.

    source: what drafts; None: what followed the latest tokens where they occurred before.
    """
    known = [*sequence.tokens, token]
    cache = model.cache
    # The pass reads the token and the drafts, and all of them are rolled back.
    count = min(most, cache.n_ctx - len(known), cache.rewind - 1, model.ops.decode_rows - 1, cache.max_rows - 1)
    if count < 1 or (source is not None and len(known) <= source.behind):
        return None
    if source is None:
        name, drafts = PromptLookup.name, PromptLookup().propose(known, count)
    else:
        greedy = source.sampler(Sampler(SamplerParams(temperature=0.0, seed=0), model.config.n_vocab))
        name = source.name
        drafts = source.propose(known, min(count, source.most), greedy, 0.0, False, sequence).tokens
    if not drafts:
        return None
    (rows,) = model.step([(sequence, [token, *drafts])])
    return TracedDrafts(name, token, fates(drafts, rows.argmax(1).tolist()))


def fates(drafts: Sequence[int], own: Sequence[int]) -> tuple[TracedDraft, ...]:
    """The drafts, each with its fate; own: the model's own choice in the place of each draft, and after the last."""
    differs = np.flatnonzero(np.array(drafts) != np.array(own[: len(drafts)]))
    kept = int(differs[0]) if differs.size else len(drafts)
    return tuple(
        TracedDraft(draft, "kept" if i < kept else "refused" if i == kept else "dropped", own[i] if i <= kept else None)
        for i, draft in enumerate(drafts)
    )
