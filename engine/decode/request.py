"""A request: an answer to be computed, and its tokens that have not been fetched."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from engine.sampling.row_digest import PackedDigest, RowDigest
from engine.sampling.sampler import Sampler
from engine.speculative.speculation import Speculation

Item = tuple[int, np.ndarray]
"""A token and the logits that it was chosen from, float32 [n_vocab]; empty if they stayed on the device."""


class ReadRow(NamedTuple):
    """The digest of a row of logits, and a function that returns the token which is chosen from it, or raises what
    ``Sampler.sample`` raises."""

    digest: RowDigest
    choose: Callable[[], int]


class RowReader(Protocol):
    """What reads logits where a pass has left them, in place of a copy of them."""

    def __call__(self, rows: Any, first: int) -> np.ndarray:
        """What is wanted of rows of logits, an array of the device with float32 [n, n_vocab], which may change: numbers
        [n, words].  first: the index of the token after which the first row comes."""

    def check(self, read: np.ndarray, first: int) -> None:
        """Raise NotFinite if the rows of such numbers are not finite."""

    def rows(self, read: np.ndarray) -> list[ReadRow]:
        """What such numbers say."""


class State:
    """The state of a request: :class:`Waiting`, :class:`engine.decode.prefill.Prefilling` or
    :class:`engine.decode.running.Running`."""


class Waiting(State):
    """The request has no slot: it has not been admitted, it was preempted, or it is done."""


class Request:
    """An answer that the engine computes.

    It waits for a slot, its tokens are read into that slot (prefill), and it runs until it is ``done``.  A preempted request
    waits again, and its tokens are read once more.
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
        scored_from: int = 0,
        reader: RowReader | None = None,
        given: Sequence[int] = (),
        receipt: bool = False,
    ) -> None:
        """count: the most tokens to compute after ``ids``; salt: only requests of the same salt share pages.

        begun: the last of ``ids`` is read in the step that chooses the first token, not in the prefill; ends: tokens that end
        the answer; allowed: the tokens that the first one may be, None: any; on_prefill: called as ``on_prefill(done,
        total)`` during the first prefill; on_logits: called as ``on_logits(first, logits)`` with the logits after the tokens
        from index ``first`` on, float32 [n, n_vocab], during the prefill, which then also reads tokens that the cache holds;
        scored_from: the index of the first token whose logits it gets; reader: what reads them on the device, so that it
        gets the result of that instead; no token is computed then; given: tokens of the answer that are known already,
        and read like a prompt, but that do not belong to it; receipt: whether ``rows`` are wanted.
        """
        #: The prompt and the tokens computed so far.  The last one has not been read while the request runs.
        self.known = [*ids, *given]
        self.n_prompt = len(self.known) - len(given)
        #: The number of tokens of the prompt that are read before the first step.
        self.n_read = self.n_prompt - int(begun)
        #: The number of positions of the prompt that layers without a window have dropped.
        self.dropped = 0
        self.salt = salt
        self.sampler = sampler
        #: The number of tokens still to be computed.
        self.left = count
        self.speculation = speculation
        self.with_logits = with_logits
        self.begun = begun
        self.ends = frozenset(ends)
        self.allowed = allowed
        self.on_prefill = on_prefill
        self.on_logits = on_logits
        self.scored_from = scored_from
        assert reader is None or count == 0
        self.reader = reader
        self.receipt = receipt
        #: The digests of the logits that the tokens of ``items`` were chosen from, if they are wanted.
        self.rows: deque[RowDigest | PackedDigest] = deque()
        self.state: State = Waiting()
        #: The slot that it should get if that is free, and the one that it has or had; -1: any, and none.
        self.wanted_slot = self.slot = -1
        #: Whether a grammar decides which tokens may come next.
        self.masked = sampler.matcher is not None
        #: Whether functions of the user run while a token is chosen.
        self.has_processors = bool(sampler.params.logits_processors)
        #: Backpressure: it is not scheduled, and gives its slot to one that waits.  Changed only at the start of a round, as
        #: is ``closing``.
        self.paused = False
        #: Computed and not fetched yet.
        self.items: deque[Item] = deque()
        #: The number of tokens that were fetched.
        self.fetched = 0
        #: The thread that fetches its tokens, whether it waits for one, and when it got the latest.
        self.thread, self.asking, self.served = 0, False, 0.0
        #: The number of prompt tokens that did not have to be read.
        self.kept = 0
        #: The error that ended it, raised when all items have been fetched.
        self.error: BaseException | None = None
        #: Whether no further token will be computed.
        self.done = False
        #: Whether nobody wants further tokens.
        self.closing = False
        #: Its place in the order of arrival; 0: it has not arrived yet.
        self.number = 0
        #: The number of the latest step that had rows of it.
        self.turn = 0
        #: The number of failed rounds since its latest token.
        self.failures = 0

    @property
    def has_slot(self) -> bool:
        """Whether it is in its prefill or runs."""
        return not isinstance(self.state, Waiting)

    @property
    def scored(self) -> bool:
        """Whether the logits after tokens of its prompt are wanted, and the prompt has not been read yet."""
        return self.on_logits is not None and not self.begun

    @property
    def target(self) -> list[int]:
        """The tokens that its sequence must hold before it runs: all known ones, without the last sampled token."""
        return self.known[:-1] if self.begun else self.known
