"""A request: an answer to be computed, and the tokens of it that nobody has fetched yet."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from engine.decode.part import Part
from engine.decode.slot import Slot
from engine.sampling.sampler import Sampler
from engine.speculative.loop import Speculation
from engine.speculative.run import Run
from engine.speculative.steps import Steps

Item = tuple[int, np.ndarray]
"""A token and the logits that it was chosen from, float32 [n_vocab]; empty if they stayed on the device."""


class Request:
    """An answer that a scheduler computes.

    It waits (``slot`` is None), then its tokens are read into a slot, then it runs (``run`` is set) until it is ``done``.  A
    request that gives way to others waits again, and reads its tokens once more.
    """

    def __init__(
        self,
        ids: Sequence[int],
        sampler: Sampler,
        count: int,
        speculation: Speculation | None = None,
        with_logits: bool = False,
        *,
        salt: str = "",
        begun: bool = False,
        ends: Iterable[int] = (),
        allowed: np.ndarray | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        on_logits: Callable[[int, np.ndarray], None] | None = None,
    ) -> None:
        """count: the most tokens to compute after ``ids``; salt: only requests of the same salt share what the cache holds.

        begun: the first token follows ``ids`` in a step, which reads the last of them, not from the logits of a prompt;
        ends: tokens after which none follows; allowed: the tokens that the first one may be, None: any; on_prefill: called
        as ``on_prefill(done, total)`` while ``ids`` are read for the first time; on_logits: called as ``on_logits(first,
        logits)`` with the logits after the tokens from index ``first`` on, float32 [n, n_vocab], while ``ids`` are read: all
        of them are read then, also those that the cache holds.
        """
        #: The tokens before the answer, and those of the answer that were computed before ``run`` began.
        self.known = list(ids)
        self.n_prompt = len(self.known)
        self.salt = salt
        self.sampler = sampler
        self.left = count
        self.speculation = speculation
        self.with_logits = with_logits
        self.begun = begun
        self.ends = frozenset(ends)
        self.allowed = allowed
        self.on_prefill = on_prefill
        self.on_logits = on_logits
        #: Whether nobody is ready to take further tokens: it has no rows, and gives its slot to one that waits.  Only rounds
        #: change it, as they change ``closing``.
        self.paused = False
        #: Computed and not fetched yet.
        self.items: deque[Item] = deque()
        #: The number of tokens that were fetched.
        self.fetched = 0
        #: The thread that fetches its tokens, whether it waits for one, and when it got the latest.
        self.thread, self.asking, self.served = 0, False, 0.0
        self.slot: Slot | None = None
        self.run: Run | None = None
        #: What computes its steps while it runs.
        self.steps: Steps | None = None
        #: The part of its tokens that is being read.
        self.part: Part | None = None
        #: The tokens at the beginning of the prompt that did not have to be read.
        self.kept = 0
        #: The numbers of tokens after which snapshots are taken while the prompt is read.
        self.stops: set[int] = set()
        #: What ended it, to be raised when all items have been fetched.
        self.error: BaseException | None = None
        #: Whether no further token will be computed.
        self.done = False
        #: Whether nobody wants further tokens.
        self.closing = False
        #: Its place in the order of arrival; 0: it has not arrived yet.
        self.number = 0
        #: The number of the latest pass that had rows of it.
        self.turn = 0
        #: The number of rounds that have failed with it since its latest token.
        self.failures = 0

    @property
    def reading(self) -> bool:
        """Whether it has a slot whose sequence does not hold its tokens yet."""
        return self.slot is not None and self.run is None and not self.done

    @property
    def scored(self) -> bool:
        """Whether the logits after each token of its prompt are wanted, and the prompt has not been read yet."""
        return self.on_logits is not None and not self.begun

    @property
    def masked(self) -> bool:
        """Whether a grammar decides which tokens may come next."""
        return self.sampler.matcher is not None

    @property
    def target(self) -> list[int]:
        """What its sequence must hold before the next token can be chosen: all known tokens, or all but the certain one."""
        return self.known[:-1] if self.begun else self.known

    def began(self, run: Run, steps: Steps) -> None:
        """Let steps compute the rest.  What reported on the prompt is forgotten, since it may keep an abandoned answer."""
        self.run, self.steps, self.begun = run, steps, True
        self.on_prefill = None

    def abandon(self) -> None:
        """Stop reading the part that is being read; it has to be read again from its beginning."""
        if self.part is not None:
            self.part.cancel()
            self.part = None

    def end_steps(self) -> None:
        """Wait for its steps in flight, whose results are dropped; none follows."""
        if self.run is not None and self.steps is not None:
            self.steps.end(self.run)
            self.steps = None

    def stopped(self) -> None:
        """Keep what ``run`` has computed, so that another one can continue."""
        if self.run is not None:
            self.known, self.left, self.run = self.run.known, self.run.left, None
