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
"""Drafts of its own from which the acceptance of a request is known as well as from the drafts of all others."""


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
    wishes = _alike(wishes)
    counts = _tried(wishes, limit)
    choices = _choices(wishes, counts, limit, passes)
    best = max(choices, key=lambda shape: choices[shape][0])
    chosen = passes.chosen.get(best.plain)
    if chosen in choices and choices[best][0] <= GAIN * choices[chosen][0]:
        best = chosen
    passes.chosen[best.plain] = best
    for _, i, size in _drafts(wishes, best.depth)[: choices[best][1]]:
        counts[i] += size
    return counts


def _tried(wishes: Sequence[Wish], limit: int) -> list[int]:
    """The drafts that are made whatever they cost, as far as there are rows."""
    counts, rows = list[int](), len(wishes)
    for wish in wishes:
        counts.append(wish.least if wish.tries and wish.most and rows + wish.least <= limit else 0)
        rows += counts[-1]
    return counts


def _alike(wishes: Sequence[Wish]) -> list[Wish]:
    """The same wishes, with acceptances closer to that of all: after a few drafts, the highest and the lowest ones are so by
    chance."""
    accepted, tried = (sum(numbers) for numbers in zip(*((w.accepted, w.tried) for w in wishes if w.most), strict=True))
    return [
        wish._replace(accepted=wish.accepted + ALIKE * accepted / tried, tried=wish.tried + ALIKE) for wish in wishes
    ]


def _equal(wishes: Sequence[Wish], limit: int) -> list[int]:
    """As many drafts for each request as for the others, and what those before it have left."""
    counts, used = list[int](), 0
    for i, wish in enumerate(wishes):
        room = max(0, limit * (i + 1) // len(wishes) - used - 1)
        counts.append(min(wish.most, room) if room >= wish.least else 0)
        used += 1 + counts[-1]
    return counts


def _drafts(wishes: Sequence[Wish], depth: int) -> list[tuple[float, int, int]]:
    """(tokens for each draft, index of a wish, number of drafts) of what could be added to a pass, the most tokens first;
    depth: the most drafts of a model.  The first drafts of a request come together if it wants no fewer."""
    found: list[tuple[float, tuple[float, int, int]]] = []
    for i, wish in enumerate(wishes):
        most, a = min(wish.most, depth) if wish.made else wish.most, wish.acceptance
        if most >= wish.least and not wish.tries:
            value = (expected(a, wish.least) - 1) / wish.least
            found.append((STAY * value if wish.stays else value, (value, i, wish.least)))
            found += [(a**n, (a**n, i, 1)) for n in range(wish.least + 1, most + 1)]
    return [draft for _, draft in sorted(found, key=lambda ranked: -ranked[0])]


def _choices(
    wishes: Sequence[Wish], tried: Sequence[int], limit: int, passes: PassTimes
) -> dict[PassShape, tuple[float, int]]:
    """For each shape that a pass can have: tokens per time of a plain pass, and how many of ``_drafts`` it has; tried: the
    drafts that it has in any case."""
    answers, found = len(wishes), dict[PassShape, tuple[float, int]]()
    price = passes.prices(answers, max(wish.cost for wish in wishes))
    made = [(n, wish.most) for n, wish in zip(tried, wishes, strict=True) if wish.made]
    least, most = (max(depths) for depths in zip((0, 0), *made, strict=True))
    of_tried = sum(expected(wish.acceptance, n) - 1 for n, wish in zip(tried, wishes, strict=True))
    for depth in range(least, most + 1):
        rows, tokens, count = answers + sum(tried), answers + of_tried, 0
        shape = passes.shape(answers, rows, least)
        for value, _, size in _drafts(wishes, depth):
            if rows + size > limit:
                break
            wider = passes.shape(answers, rows + size, depth)
            if wider != shape:
                found[shape] = tokens / price(shape), count
            rows, tokens, count, shape = rows + size, tokens + value * size, count + 1, wider
        found[shape] = tokens / price(shape), count
    return found
