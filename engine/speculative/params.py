"""Options of speculative decoding: how drafts are made and accepted."""

from dataclasses import dataclass

from engine.checks import described, number, require, whole
from engine.errors import UsageError
from engine.limits import MOST_DRAFTS

MODES = ("exact", "ratio", "p-min")
"""Ways to accept drafts; see :attr:`SpeculationParams.accept`."""

DRAFT_MAX = {"model": 4, "mtp": 4, "eagle3": 4, "dflash": 8, "assistant": 4, "lookup": 7, "history": 7}
"""Drafts per pass by default; chosen by measurement (docs/speculation.md)."""


@dataclass(frozen=True)
class SpeculationParams:
    """Options of speculative decoding.  Whether there is a draft model, or a layer that drafts, depends on the loaded model.

    Parameters
    ----------
    enabled : bool
        False: no drafts, whatever sources there are.
    lookup : bool
        Also propose what followed the latest tokens where they occurred before, in prompt and answer or in earlier answers
        of the same model with the same salt.
    draft_max : int
        Most drafts per pass, 1 to 15; 0: as many as usually pay off, 4 of a model, 8 of a DFlash network or 7
        of lookup.
    draft_min : int
        A pass with fewer drafts than this is not worthwhile, and reads the last sampled token alone.
    draft_p_min : float
        Drafting stops at a token whose probability, among its ten likeliest, is below this.
    accept : str
        "exact": a draft is kept if it is the token that the target's own sampler chooses there, so that the text is the same
        as without drafts. "ratio": by probability (Leviathan et al. 2023), which preserves the distribution, not the text.
        "p-min": if the target gives it at least ``accept_p_min``, which changes the distribution.
    accept_p_min : float
        The least probability of a draft that "p-min" accepts.
    sequential : bool
        Read the last sampled token and the drafts one by one instead of in one pass: slow, for debugging.

    Raises
    ------
    UsageError
        If a value is outside its range.

    Examples
    --------
    >>> import engine
    >>> llm = engine.load(n_ctx=256)
    >>> drafts = engine.SpeculationParams(lookup=True)
    >>> answer = llm.complete("x = 1\\n" * 8, max_tokens=24, temperature=0, speculation=drafts)
    >>> answer.speculation.accepted > 0
    True
    """

    enabled: bool = True
    lookup: bool = False
    draft_max: int = 0
    draft_min: int = 0
    draft_p_min: float = 0.0
    accept: str = "exact"
    accept_p_min: float = 0.3
    sequential: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.accept, str) or self.accept not in MODES:
            modes = f"{', '.join(MODES[:-1])} or {MODES[-1]}"
            raise UsageError(f"drafts are accepted by {modes}, not {described(self.accept)}.")
        for name in ("draft_max", "draft_min"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name in ("draft_p_min", "accept_p_min"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
            require(0 <= getattr(self, name) <= 1, name, "between 0 and 1", getattr(self, name))
        allowed = f"1 to {MOST_DRAFTS}, or 0 for the default"
        require(0 <= self.draft_max <= MOST_DRAFTS, "draft_max", allowed, self.draft_max)
        most = self.draft_max or MOST_DRAFTS
        require(0 <= self.draft_min <= most, "draft_min", "between 0 and draft_max", self.draft_min)

    def most(self, source: str) -> int:
        """The most drafts per pass of a kind of source: "model", "mtp", "eagle3", "dflash", "assistant",
        "lookup" or "history"."""
        return self.draft_max or max(DRAFT_MAX[source], self.draft_min)
