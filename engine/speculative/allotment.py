"""How many drafts each request of a pass gets: as many as pay off, and none if drafts only cost time.

If drafts of a request are accepted with probability a, independently of each other, n of them give

    E(n) = 1 + a + ... + a^n

tokens (Leviathan et al. 2023, section 3.1).  A pass of several requests takes T(w, d) seconds, where w is the number of its
rows, with those that a backend adds, and d the number of drafts that a model makes one after another.  The criterion is the
sum of E over all requests, divided by T.  Further rows are free until the next number to which a backend pads, so only full
passes are compared.  Draft i of a request adds a^i tokens, so the most probable drafts of all requests come first: no other
choice of as many adds more.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.speculative.passes import PassShape, PassTimes

GAIN = 1.02
"""A gain below this does not justify the risk of being wrong."""

STAY = 2.0
"""How many times as probable another draft must be to replace the only one of a request: all requests of the pass would wait
for their steps in flight."""

ALIKE = 8.0
"""Drafts of its own from which the acceptance of a request is known as well as from those of all requests."""


class Wish(NamedTuple):
    """The drafts that a request could have in the next pass.

    accepted, tried: drafts accepted and drafts tried so far, from which the probability that a draft is accepted is estimated
    (a draft after a rejected one was not tried); least, most: the number of drafts, if there are any; made: whether a
    model makes them, one after another; cost: bytes that making one reads, as a fraction of those that a pass of the target
    reads; tries: whether they are made to find out whether they are accepted now, whatever they cost; stays: whether steps in
    flight have some.
    """

    accepted: float = 0.0
    tried: float = 1.0
    least: int = 1
    most: int = 0
    made: bool = False
    cost: float = 0.0
    tries: bool = False
    stays: bool = False

    @property
    def acceptance(self) -> float:
        """The estimated probability that a draft is accepted."""
        return self.accepted / self.tried


def expected(acceptance: float, n: int) -> float:
    """The expected number of tokens of a pass with n drafts."""
    return sum(acceptance**i for i in range(n + 1))


def gain(wish: Wish, passes: PassTimes) -> float | None:
    """The speed of a request that is alone, relative to that without drafts; None if it is not known."""
    if not passes.known(1):
        return None
    price = passes.prices(1, wish.cost)
    sizes = range(wish.least, wish.most + 1)
    return max(
        (expected(wish.acceptance, n) / price(passes.shape(1, 1 + n, n if wish.made else 0)) for n in sizes),
        default=1.0,
    )


def allot(wishes: Sequence[Wish], limit: int, passes: PassTimes) -> list[int]:
    """The number of drafts of each request of a pass; limit: the most rows of the pass."""
    answers = len(wishes)
    if not any(wish.most for wish in wishes) or not passes.begun(answers):
        return [0] * answers
    if not passes.known(answers):
        return _equal(wishes, limit)
    counts = _tried(wishes, limit)
    drafts = _drafts(wishes)
    choices = _choices(wishes, counts, drafts, limit, passes)
    best = max(choices, key=lambda shape: choices[shape][0])
    chosen = passes.chosen.get(best.plain)
    if chosen in choices and choices[best][0] <= GAIN * choices[chosen][0]:
        best = chosen
    passes.chosen[best.plain] = best
    left = choices[best][1]
    for draft in drafts:
        if left and draft.depth <= best.depth:
            counts[draft.request] += draft.size
            left -= 1
    return counts


def _tried(wishes: Sequence[Wish], limit: int) -> list[int]:
    """The drafts that are made whatever they cost, as far as there are rows."""
    counts, rows = list[int](), len(wishes)
    for wish in wishes:
        counts.append(wish.least if wish.tries and wish.most and rows + wish.least <= limit else 0)
        rows += counts[-1]
    return counts


def _equal(wishes: Sequence[Wish], limit: int) -> list[int]:
    """As many drafts for each request as for the others, and what those before it have left."""
    counts, used = list[int](), 0
    for i, wish in enumerate(wishes):
        room = max(0, limit * (i + 1) // len(wishes) - used - 1)
        counts.append(min(wish.most, room) if room >= wish.least else 0)
        used += 1 + counts[-1]
    return counts


class _Draft(NamedTuple):
    """What can be added to a pass: the first drafts of a request, which come together if it wants no fewer, or a further one.

    value: tokens for each draft; depth: the number of drafts of a model that it needs; request: the index of the request;
    size: the number of drafts.
    """

    value: float
    depth: int
    request: int
    size: int


def _drafts(wishes: Sequence[Wish]) -> list[_Draft]:
    """What can be added to a pass, the most tokens first."""
    # After a few drafts, the highest and the lowest acceptances are so by chance, so all are taken closer to each other.
    accepted = ALIKE * sum(wish.accepted for wish in wishes if wish.most)
    tried = sum(wish.tried for wish in wishes if wish.most)
    found: list[tuple[float, _Draft]] = []
    for i, wish in enumerate(wishes):
        if wish.most < wish.least or wish.tries:
            continue
        a = (wish.accepted + accepted / tried) / (wish.tried + ALIKE)
        value, probability = (expected(a, wish.least) - 1) / wish.least, a**wish.least
        first = _Draft(value, wish.least if wish.made else 0, i, wish.least)
        found.append((STAY * value if wish.stays else value, first))
        for n in range(wish.least + 1, wish.most + 1):
            probability *= a
            found.append((probability, _Draft(probability, n if wish.made else 0, i, 1)))
    return [draft for _, draft in sorted(found, key=lambda ranked: -ranked[0])]


def _choices(
    wishes: Sequence[Wish], tried: Sequence[int], drafts: Sequence[_Draft], limit: int, passes: PassTimes
) -> dict[PassShape, tuple[float, int]]:
    """For each shape that a pass can have: tokens per time of a plain pass, and how many of the drafts that its depth permits
    it has; tried: the drafts that each request has in any case."""
    answers, found = len(wishes), dict[PassShape, tuple[float, int]]()
    price = passes.prices(answers, max(wish.cost for wish in wishes))
    least = max((n for n, wish in zip(tried, wishes, strict=True) if wish.made), default=0)
    begin = answers + sum(tried), answers + sum(n * wish.acceptance for n, wish in zip(tried, wishes, strict=True) if n)
    for depth in range(least, max(least, *(draft.depth for draft in drafts), 0) + 1):
        (rows, tokens), count, shape = begin, 0, passes.shape(answers, begin[0], least)
        for value, needed, _, size in drafts:
            if needed > depth:
                continue
            if rows + size > limit:
                break
            if rows + size > shape.rows or shape.depth != depth:
                found[shape] = tokens / price(shape), count
                shape = passes.shape(answers, rows + size, depth)
            rows, tokens, count = rows + size, tokens + value * size, count + 1
        found[shape] = tokens / price(shape), count
    return found
