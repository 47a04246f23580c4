"""What became of the drafts of an answer."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Counts and seconds of one answer.

    drafted_at[i], accepted_at[i]: drafts at index i (0: the first of a pass), proposed and kept.
    drafted_by: drafts of each source.  verifications: passes that read drafts, taking ``verify_s``.
    plain_n, plain_s: passes of a single token, and their seconds; the first one, which may wait for a graph, is left out.
    """

    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    verifications: int = 0
    verify_s: float = 0.0
    plain_n: int = 0
    plain_s: float = 0.0

    def verified(self, source: str, drafted: int, accepted: int, seconds: float) -> None:
        """Record the end of a pass with drafts."""
        self.drafted_at.update(range(drafted))
        self.accepted_at.update(range(accepted))
        self.drafted_by[source] += drafted
        self.accepted_by[source] += accepted
        self.verifications += 1
        self.verify_s += seconds

    @property
    def drafted(self) -> int:
        """The number of drafts that were verified."""
        return self.drafted_by.total()

    @property
    def accepted(self) -> int:
        """The number of drafts that were kept."""
        return self.accepted_by.total()

    @property
    def acceptance(self) -> float:
        """The share of drafts that were kept."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens per pass that read drafts: those that were kept, and the one after them."""
        return 1 + self.accepted / self.verifications if self.verifications else 0.0

    @property
    def by_place(self) -> list[float]:
        """For each index in a pass, the share of the drafts proposed there that were kept."""
        return [self.accepted_at[i] / self.drafted_at[i] for i in sorted(self.drafted_at)]

    @property
    def plain_per_second(self) -> float:
        """Tokens per second without drafts, as measured in between; 0 if there was no such pass."""
        return self.plain_n / self.plain_s if self.plain_s else 0.0
