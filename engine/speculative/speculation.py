"""The draft sources of an answer, and what it verifies next.

A step reads the last sampled token together with the drafts for the positions after it, in one pass of the target.  Row i of
its logits predicts what follows that token and i drafts; as long as that is the next draft, the next row counts.  The first
token that is not the draft, or the one after the last draft, is the target's own choice: it is the last sampled token of the
next step.  So each step is one pass, and gives at least the token that a plain step would.

If nothing is proposed a step is plain, and if a device chooses tokens by itself several plain steps are in flight at once
(``engine/decode/running.py``).
"""

from collections import deque
from collections.abc import Sequence

from engine.cache.sequence import Sequence as TokenSequence
from engine.sampling.sampler import Sampler
from engine.speculative.controller import GAIN, WINDOW, Controller, Costs, NominalCosts
from engine.speculative.history import AnswerHistory
from engine.speculative.lookup import PromptLookup
from engine.speculative.params import SpeculationParams
from engine.speculative.proposal import Draft, Proposal, StepLimits
from engine.speculative.statistics import Statistics

MEASURED = 3
"""Plain steps at the start of an answer, which provide a time to compare with."""

AHEAD_OF_LOOKUP = 2
"""Plain steps in flight while the host searches: the next step runs while the host searches for the last token."""

NOTHING = Proposal()


class Speculation:
    """The draft sources of one answer, and the record of their drafts."""

    def __init__(
        self,
        params: SpeculationParams,
        sampler: Sampler,
        draft: Draft | None,
        target_bytes: float,
        history: AnswerHistory | None = None,
    ) -> None:
        """draft: a draft model or the target's own layer, if there is one; target_bytes: bytes that a target pass reads;
        history: the texts of earlier answers, for lookup."""
        self.params = params
        self.statistics = Statistics()
        self._sampler = sampler
        self._draft = draft
        ahead = sampler.ahead()
        self._matcher = ahead.matcher
        self._draft_sampler = draft.sampler(ahead) if draft is not None else ahead
        self._lookup = PromptLookup() if params.lookup else None
        self._plain: deque[float] = deque(maxlen=WINDOW)
        self._passed = 0
        #: Whether time may decide how much is drafted: the number does not affect the text.
        self.adapts = params.accept == "exact" or sampler.params.greedy
        # The text must not depend on earlier answers where it depends on the number of drafts.
        self._history = history if params.lookup and self.adapts else None
        shares = {"lookup": 0.0, "history": 0.0} | (
            {draft.name: draft.cost / target_bytes} if draft is not None else {}
        )
        self._controllers = {}
        for kind, share in shares.items():
            most = params.most(kind)
            if draft is not None and kind == draft.name:
                most = min(most, draft.most)
            costs = Costs(self._plain) if self.adapts else NominalCosts(share)
            self._controllers[kind] = Controller(most, min(params.draft_min, most), costs)

    @property
    def in_blocks(self) -> bool:
        """Whether a pass of its drafts has a row for each row of the target's pass."""
        return self._draft is not None and self._draft.block is not None

    def choose(self, known: Sequence[int], room: int) -> Proposal:
        """What to verify after ``known``, with at most ``room`` drafts.

        A model's drafts do not exist yet: its proposal has only their ``count``, and :meth:`made` replaces it.
        """
        if room < max(1, self.params.draft_min) or (self.adapts and self._passed < MEASURED):
            return NOTHING
        best, matched = NOTHING, 0
        for source in (self._lookup, self._history):
            if source is None or not (n := self._controllers[source.name].drafts()):
                continue
            drafts = source.propose(known, min(n, room))
            if self._matcher is not None:
                drafts = drafts[: self._matcher.permitted(known, drafts)]
            if len(drafts) >= max(1, self.params.draft_min) and source.matched > matched:
                best, matched = Proposal(drafts, source=source.name), source.matched
        if self._draft is None or len(known) <= self._draft.behind:
            return best
        if n := self._controllers[self._draft.name].drafts():
            best = self._better(best, Proposal(count=min(n, room), source=self._draft.name))
        return best

    def _better(self, one: Proposal, other: Proposal) -> Proposal:
        """The first of two proposals, or the second one if there is no first or if its source has gained more so far."""
        if not one.source:
            return other
        gains = [self._controllers[each.source].gain for each in (one, other)]
        if self.adapts and gains[0] is not None and gains[1] is not None and gains[1] > GAIN * gains[0]:
            return other
        return one

    def ended(self, known: Sequence[int]) -> None:
        """Keep the text of the answer for the drafts of later ones."""
        if self._history is not None:
            self._history.add(known)

    def ahead(self, most: int) -> int:
        """The number of plain steps that may be in flight, of the ``most`` that the device supports: not past a position at
        which drafts are due."""
        if self._lookup is not None:
            return min(most, AHEAD_OF_LOOKUP) if self.adapts else 1
        if self._draft is None:
            return most
        due = self._controllers[self._draft.name].wait
        return min(most, max(due, MEASURED - self._passed if self.adapts else 0, 1))

    def made(self, known: Sequence[int], proposal: Proposal, steps: StepLimits, sequence: TokenSequence) -> Proposal:
        """The drafts of the draft model after ``known``, which the target has in ``sequence``, or, if ``steps`` makes them on
        the device, the request to do so."""
        assert self._draft is not None
        if self._on_device(steps):
            return Proposal(device_draft=self._draft, count=proposal.count, source=self._draft.name)
        p_min, ratio = self.params.draft_p_min, self.params.accept == "ratio" and not self._sampler.params.greedy
        made = self._draft.propose(known, proposal.count, self._draft_sampler, p_min, ratio, sequence)
        # What was drawn is verified: to drop it because of what it is would not preserve the distribution.
        if not ratio and len(made) < self.params.draft_min:
            made = Proposal()
        made.source = self._draft.name
        return made

    def drafts_blindly(self, steps: StepLimits) -> bool:
        """Whether drafts can be requested before the tokens that they follow are known."""
        return self.adapts and self._lookup is None and self._draft is not None and self._on_device(steps)

    def rewind(self, steps: StepLimits) -> int:
        """The number of tokens that may be read before they are committed, as far as a draft model's own cache limits it."""
        draft = self._draft
        if draft is None or not self._on_device(steps) or draft.cache is None:
            return steps.rewind
        return draft.cache.rewind - draft.reads + 1

    def _on_device(self, steps: StepLimits) -> bool:
        # The host makes the masks, and so the drafts, of an answer with a grammar.
        if (draft := self._draft) is None or self._matcher is not None:
            return False
        return self.params.draft_p_min == 0 and draft.reads_all and steps.drafts_here(draft)

    def passed(self, seconds: float) -> None:
        """Record the end of a plain step."""
        self._passed += 1
        if self._passed > 1:
            self._plain.append(seconds)
            self.statistics.plain_n += 1
            self.statistics.plain_s += seconds
        for controller in self._controllers.values():
            controller.passed()

    def verified(self, source: str, drafted: int, accepted: int, seconds: float) -> None:
        """Record the end of a step with drafts, or of one for which no draft was good enough (``drafted`` is 0)."""
        if drafted:
            self.statistics.verified(source, drafted, accepted, seconds)
        self._controllers[source].verified(drafted, accepted, seconds)
