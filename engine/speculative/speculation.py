"""The draft sources of an answer, and what it verifies next.

A step reads the last sampled token together with the drafts for the positions after it, in one pass of the target.  Row i of
its logits predicts what follows that token and i drafts; as long as that is the next draft, the next row counts.  The first
token that is not the draft, or the one after the last draft, is the target's own choice: it is the last sampled token of the
next step.  So each step is one pass, and gives at least the token that a plain step would.

If nothing is proposed a step is plain, and if a device chooses tokens by itself several plain steps are in flight at once
(``engine/decode/running.py``).
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.cache.sequence import Sequence as TokenSequence
from engine.sampling.sampler import Sampler
from engine.speculative import passes
from engine.speculative.allotment import GAIN, Wish, gain
from engine.speculative.controller import Controller
from engine.speculative.history import AnswerHistory
from engine.speculative.lookup import PromptLookup
from engine.speculative.params import SpeculationParams
from engine.speculative.proposal import Draft, Proposal, StepLimits
from engine.speculative.statistics import Statistics

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
        self._passed = 0
        #: Whether it had no draft in the latest pass, and others had.
        self.rides = False
        #: Whether time may decide how much is drafted: the number does not affect the text.
        self.adapts = params.accept == "exact" or sampler.params.greedy
        # The text must not depend on earlier answers where it depends on the number of drafts.
        self._history = history if params.lookup and self.adapts else None
        #: The times of passes by which the number of drafts is chosen, if they are not those that are measured.
        self.nominal = None if self.adapts else passes.NominalTimes()
        #: Bytes that a draft of each source reads, as a fraction of those that a pass of the target reads.
        self._costs = {"lookup": 0.0, "history": 0.0}
        if draft is not None:
            self._costs[draft.name] = draft.cost / target_bytes
        self._controllers = {}
        for kind in self._costs:
            most = params.most(kind)
            if draft is not None and kind == draft.name:
                most = min(most, draft.most)
            self._controllers[kind] = Controller(most, min(params.draft_min, most))

    @property
    def in_blocks(self) -> bool:
        """Whether a pass of its drafts has a row for each row of the target's pass."""
        return self._draft is not None and self._draft.block is not None

    def choose(self, known: Sequence[int], room: int, times: passes.PassTimes) -> Proposal:
        """What could be verified after ``known``, with at most ``room`` drafts.  times: those of passes.

        A model's drafts do not exist yet: its proposal has only their ``count``, and :meth:`made` replaces it.
        """
        if room < max(1, self.params.draft_min) or (self.adapts and self._passed < passes.MEASURED):
            return NOTHING
        best, matched = NOTHING, 0
        for source in (self._lookup, self._history):
            if source is None or not (n := self._controllers[source.name].most):
                continue
            drafts = source.propose(known, min(n, room))
            if self._matcher is not None:
                drafts = drafts[: self._matcher.permitted(known, drafts)]
            if len(drafts) >= max(1, self.params.draft_min) and source.matched > matched:
                best, matched = Proposal(drafts, source=source.name), source.matched
        if self._draft is None or len(known) <= self._draft.behind:
            return best
        if n := self._controllers[self._draft.name].most:
            best = self._better(best, Proposal(count=min(n, room), source=self._draft.name), times)
        return best

    def _better(self, one: Proposal, other: Proposal, times: passes.PassTimes) -> Proposal:
        """The first of two proposals, or the second one if there is no first or if its source gains more."""
        if not one.source:
            return other
        gains = [gain(self.wish(each), times) if self.adapts else None for each in (one, other)]
        return other if gains[0] is not None and gains[1] is not None and gains[1] > GAIN * gains[0] else one

    def wish(self, proposal: Proposal) -> Wish:
        """What decides how many drafts of a proposal are made."""
        if not proposal.source:
            return Wish()
        controller, made = self._controllers[proposal.source], proposal.count > 0
        least, cost = min(controller.least, len(proposal)), self._costs[proposal.source]
        return Wish(*controller.seen, least, len(proposal), made, cost, controller.tries)

    def allotted(self, proposal: Proposal, n: int, known: bool, others: bool) -> Proposal:
        """The first n drafts of a proposal; known: whether their number follows from times that are known; others: whether
        other requests of the pass have drafts."""
        self.rides = n == 0 and others
        if not proposal.source:
            return proposal
        controller = self._controllers[proposal.source]
        resumes = controller.tries
        if known:
            controller.allotted(n, others)
        if not n:
            return NOTHING
        return replace(proposal, tokens=proposal.tokens[:n], count=n if proposal.count else 0, resumes=resumes)

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
        return min(most, max(due, passes.MEASURED - self._passed if self.adapts else 0, 1))

    def made(self, known: Sequence[int], proposal: Proposal, steps: StepLimits, sequence: TokenSequence) -> Proposal:
        """The drafts of the draft model after ``known``, which the target has in ``sequence``, or, if ``steps`` makes them on
        the device, the request to do so."""
        assert self._draft is not None
        if self.on_device(steps):
            return replace(proposal, device_draft=self._draft)
        p_min, ratio = self.params.draft_p_min, self.params.accept == "ratio" and not self._sampler.params.greedy
        made = self._draft.propose(known, proposal.count, self._draft_sampler, p_min, ratio, sequence)
        # What was drawn is verified: to drop it because of what it is would not preserve the distribution.
        if not ratio and len(made) < self.params.draft_min:
            made = Proposal()
        made.source, made.resumes = self._draft.name, proposal.resumes
        return made

    def drafts_blindly(self, steps: StepLimits) -> bool:
        """Whether drafts can be requested before the tokens that they follow are known."""
        return self.adapts and self._lookup is None and self._draft is not None and self.on_device(steps)

    def rewind(self, steps: StepLimits) -> int:
        """The number of tokens that may be read before they are committed, as far as a draft model's own cache limits it."""
        draft = self._draft
        if draft is None or not self.on_device(steps) or draft.cache is None:
            return steps.rewind
        return draft.cache.rewind - draft.reads + 1

    def on_device(self, steps: StepLimits) -> bool:
        """Whether the device of the target makes the drafts of the draft model."""
        # The host makes the masks, and so the drafts, of an answer with a grammar.
        if (draft := self._draft) is None or self._matcher is not None:
            return False
        return self.params.draft_p_min == 0 and draft.reads_all and steps.drafts_here(draft)

    def passed(self, seconds: float) -> None:
        """Record the end of a plain step."""
        self._passed += 1
        if self._passed > 1:
            self.statistics.plain_n += 1
            self.statistics.plain_s += seconds
        for controller in self._controllers.values():
            controller.passed()

    def verified(self, source: str, drafted: int, accepted: int, seconds: float) -> None:
        """Record the end of a step with drafts, or of one for which no draft was good enough (``drafted`` is 0)."""
        if drafted:
            self.statistics.verified(source, drafted, accepted, seconds)
        self._controllers[source].verified(drafted, accepted)
