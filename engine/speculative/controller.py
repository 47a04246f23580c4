"""How many tokens to draft: as many as pay off, and none where drafts only cost time.

With a share a of drafts accepted, each independently of the others, a pass with n drafts gives

    E(n) = 1 + a + ... + a^n

tokens (Leviathan et al. 2023, section 3.1) and takes T(n) seconds, drafting included.  What counts is E(n) / T(n), against
1 / T(0) for a plain pass.  a and T are followed as the answer goes on.
"""

from collections import deque
from statistics import median

WINDOW = 8
"""Latest passes of one size whose median is their time."""

SEEN = 2
"""Passes with drafts that must have been timed before time decides anything."""

MEMORY = 0.95
"""How much of what is known about acceptance survives a pass."""

PRIOR = (1.5, 2.0)
"""Drafts accepted of drafts tried before the first is seen."""

GAIN = 1.02
"""A smaller gain than this does not pay for being wrong."""

FIRST_PAUSE, LONGEST_PAUSE = 64, 512
"""Tokens without drafts before they are tried again; doubled as long as they do not help."""


class Costs:
    """Seconds of passes with 0, 1, 2 ... drafts from one source."""

    def __init__(self, plain: "deque[float]") -> None:
        """``plain``: the seconds of the latest plain passes, which all sources share."""
        self._plain = plain
        self._passes: dict[int, deque[float]] = {}

    def add(self, n: int, seconds: float) -> None:
        """A pass with n drafts took so long.  The first of its kind also waits for what is made once, and is left out."""
        if n not in self._passes:
            self._passes[n] = deque(maxlen=WINDOW)
        else:
            self._passes[n].append(seconds)

    @property
    def known(self) -> bool:
        """Whether there is enough to compare: one pass alone may have been slow by chance."""
        return bool(self._plain) and sum(map(len, self._passes.values())) >= SEEN

    def relative(self, n: int) -> float:
        """T(n) / T(0); between and beyond what was measured, in proportion to the drafts of the nearest size that was."""
        plain = median(self._plain)
        nearest = min((m for m, seconds in self._passes.items() if seconds), key=lambda m: (abs(m - n), m))
        return 1 + (median(self._passes[nearest]) / plain - 1) * n / nearest


class NominalCosts:
    """Costs that are the same on every machine, for the modes in which the number of drafts shows in the text."""

    known = True

    def __init__(self, draft: float) -> None:
        """draft: bytes that drafting a token reads, as a fraction of what a pass of the target reads."""
        self._draft = draft

    def add(self, n: int, seconds: float) -> None:
        """Time is not looked at."""

    def relative(self, n: int) -> float:
        """T(n) / T(0), a row of a pass being 3 % of it."""
        return 1 + n * (self._draft + 0.03)


class Controller:
    """Decides for one draft source of one answer."""

    def __init__(self, most: int, least: int, costs: Costs | NominalCosts) -> None:
        """most, least: drafts of a pass (none is always possible)."""
        self._sizes = range(max(least, 1), most + 1)
        self._costs = costs
        self._accepted, self._tried = PRIOR
        self._size = self._sizes[-1]
        self._wait = 0
        self._pause = FIRST_PAUSE
        # After a pause a draft model first reads what it has missed, which is not what a pass costs.
        self._resumed = False

    @property
    def acceptance(self) -> float:
        """The current estimate of a."""
        return self._accepted / self._tried

    @property
    def wait(self) -> int:
        """Tokens that should still come without drafts."""
        return self._wait

    def drafts(self) -> int:
        """How many to draft now; 0 during a pause."""
        return 0 if self._wait else self._size

    def passed(self) -> None:
        """A token came without drafts."""
        self._wait = max(0, self._wait - 1)

    def verified(self, n: int, accepted: int, seconds: float) -> None:
        """A pass with n drafts kept ``accepted`` of them; n = 0: a draft was made and not worth a pass, one refused."""
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
            # What little is tried after a pause should cost little, and be able to change the estimate.
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
