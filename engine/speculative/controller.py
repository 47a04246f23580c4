"""How many tokens to draft: as many as pay off, and none if drafts only cost time.

With a share a of drafts accepted, each independently of the others, a pass with n drafts gives

    E(n) = 1 + a + ... + a^n

tokens (Leviathan et al. 2023, section 3.1) and takes T(n) seconds, drafting included.  The criterion is E(n) / T(n), compared
with 1 / T(0) for a plain pass.  a and T are estimated while the answer is generated.
"""

from collections import deque
from statistics import median

WINDOW = 8
"""Number of latest passes of one size whose median is taken as their time."""

SEEN = 2
"""Passes with drafts that must have been timed before times decide anything."""

MEMORY = 0.95
"""Factor by which earlier observations of acceptance are discounted after each pass."""

PRIOR = (1.5, 2.0)
"""Drafts accepted and drafts tried that the estimate starts from."""

GAIN = 1.02
"""A gain below this does not justify the risk of being wrong."""

FIRST_PAUSE, LONGEST_PAUSE = 64, 512
"""Tokens without drafts before drafting is tried again; doubled as long as drafts do not help."""


class Costs:
    """Seconds of passes with 0, 1, 2, ... drafts from one source."""

    def __init__(self, plain: "deque[float]") -> None:
        """``plain``: the seconds of the latest plain passes, which all sources share."""
        self._plain = plain
        self._passes: dict[int, deque[float]] = {}

    def add(self, n: int, seconds: float) -> None:
        """Record that a pass with n drafts took ``seconds``.  The first pass of its kind also waits for one-time work, and is
        left out."""
        if n not in self._passes:
            self._passes[n] = deque(maxlen=WINDOW)
        else:
            self._passes[n].append(seconds)

    @property
    def known(self) -> bool:
        """Whether there are enough measurements to compare: a single pass may have been slow by chance."""
        return bool(self._plain) and sum(map(len, self._passes.values())) >= SEEN

    def relative(self, n: int) -> float:
        """T(n) / T(0); for sizes that were not measured, in proportion to the drafts of the nearest measured size."""
        plain = median(self._plain)
        nearest = min((m for m, seconds in self._passes.items() if seconds), key=lambda m: (abs(m - n), m))
        return 1 + (median(self._passes[nearest]) / plain - 1) * n / nearest


class NominalCosts:
    """Costs that are the same on every machine, for the modes in which the number of drafts affects the text."""

    known = True

    def __init__(self, draft: float) -> None:
        """draft: bytes that drafting a token reads, as a fraction of those that a pass of the target reads."""
        self._draft = draft

    def add(self, n: int, seconds: float) -> None:
        """Does nothing: time is not measured."""

    def relative(self, n: int) -> float:
        """T(n) / T(0), where each additional row of a pass counts as 3 % of it."""
        return 1 + n * (self._draft + 0.03)


class Controller:
    """Decides how many tokens to draft, for one draft source of one answer."""

    def __init__(self, most: int, least: int, costs: Costs | NominalCosts) -> None:
        """most, least: drafts per pass (none is always possible)."""
        self._sizes = range(max(least, 1), most + 1)
        self._costs = costs
        self._accepted, self._tried = PRIOR
        self._size = self._sizes[-1]
        self._wait = 0
        self._pause = FIRST_PAUSE
        # After a pause a draft model first reads what it has missed, which is not part of the cost of a pass.
        self._resumed = False

    @property
    def acceptance(self) -> float:
        """The current estimate of a."""
        return self._accepted / self._tried

    @property
    def wait(self) -> int:
        """The number of tokens that should still be generated without drafts."""
        return self._wait

    @property
    def gain(self) -> float | None:
        """The speed with drafts relative to that without, as measured so far; None if it has not been."""
        return self._gain(self._size) if self._costs.known else None

    def drafts(self) -> int:
        """The number of tokens to draft now; 0 during a pause."""
        return 0 if self._wait else self._size

    def passed(self) -> None:
        """Record a token without drafts."""
        self._wait = max(0, self._wait - 1)

    def verified(self, n: int, accepted: int, seconds: float) -> None:
        """Record a pass with n drafts of which ``accepted`` were kept; n = 0: a draft was made and judged not worth a pass,
        which counts as one rejected."""
        n = max(n, 1)
        self._accepted = MEMORY * self._accepted + accepted
        self._tried = MEMORY * self._tried + accepted + (accepted < n)
        if not self._resumed:
            self._costs.add(n, seconds)
        self._resumed = False
        if not self._costs.known:
            return
        rates = {size: self._gain(size) for size in self._sizes}
        best = max(rates, key=lambda size: rates[size])
        if rates[best] < 1:
            self._wait, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._resumed = True
            # The few drafts tried after a pause should cost little, and still be able to change the estimate.
            self._size = self._sizes[0]
            self._accepted, self._tried = (0.5 * x for x in (self._accepted, self._tried))
        else:
            if rates[best] > GAIN:
                self._pause = FIRST_PAUSE
            if self._size not in rates or rates[best] > GAIN * rates[self._size]:
                self._size = best

    def _gain(self, n: int) -> float:
        """(E(n) / T(n)) / (1 / T(0))."""
        expected = sum(self.acceptance**i for i in range(n + 1))
        return expected / self._costs.relative(n)
