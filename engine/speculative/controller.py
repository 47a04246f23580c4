"""What is known of the drafts of one source for one answer: how many are accepted, and whether to make them at all.

How many are made follows from this and from the times of passes (``engine/speculative/allotment.py``).
"""

MEMORY = 0.95
"""Factor by which earlier observations of acceptance are discounted after each pass."""

PRIOR = (1.5, 2.0)
"""Drafts accepted and drafts tried that the estimate starts from."""

FIRST_PAUSE, LONGEST_PAUSE = 64, 512
"""Tokens without drafts before drafting is tried again; doubled as long as drafts do not help."""


class Controller:
    """Estimates the acceptance of drafts of one source, and pauses while they do not pay off."""

    def __init__(self, most: int, least: int) -> None:
        """most, least: drafts per pass (none is always possible)."""
        self.least = max(least, 1)
        self._most = most
        self._accepted, self._tried = PRIOR
        self._wait = 0
        self._pause = FIRST_PAUSE
        self._tries = False

    @property
    def seen(self) -> tuple[float, float]:
        """Drafts accepted and drafts tried, where earlier ones count less."""
        return self._accepted, self._tried

    @property
    def wait(self) -> int:
        """The number of tokens that should still be generated without drafts."""
        return self._wait

    @property
    def tries(self) -> bool:
        """Whether a pause has ended, and drafts are made to find out whether they are accepted now."""
        return self._tries and not self._wait

    @property
    def most(self) -> int:
        """The most tokens to draft now; 0 during a pause.  The few drafts tried after a pause should cost little."""
        if self._wait:
            return 0
        return self.least if self._tries else self._most

    def passed(self) -> None:
        """Record a token without drafts."""
        self._wait = max(0, self._wait - 1)

    def allotted(self, n: int, others: bool) -> None:
        """Record that drafts were compared with their cost, and that n are made; others: whether other requests of the pass
        have drafts.  If nobody has any, a pause begins."""
        if n:
            self._pause = self._pause if self._tries else FIRST_PAUSE
        elif others:
            # The drafts of others are better.  What is known of these becomes old.
            self._discount(MEMORY if self._tried > 1 else 1.0)
        else:
            self._wait, self._pause, self._tries = self._pause, min(2 * self._pause, LONGEST_PAUSE), True
            # The next drafts should be able to change the estimate.
            self._discount(0.5)

    def _discount(self, factor: float) -> None:
        self._accepted, self._tried = factor * self._accepted, factor * self._tried

    def verified(self, n: int, accepted: int) -> None:
        """Record a pass with n drafts of which ``accepted`` were kept; n = 0: a draft was made and judged not worth a pass,
        which counts as one rejected."""
        self._discount(MEMORY)
        self._accepted, self._tried = self._accepted + accepted, self._tried + accepted + (accepted < max(n, 1))
        self._tries = self._tries and self._wait > 0
