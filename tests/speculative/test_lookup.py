"""Prompt lookup against its definition, and the cost of finding nothing."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculative.lookup import LEAST, LONGEST, PromptLookup


def matching(known: Sequence[int], end: int) -> int:
    """How many tokens up to ``known[end]``, at most LONGEST, are those at the end of ``known``."""
    n = 0
    while n < min(end + 1, LONGEST) and known[end - n] == known[len(known) - 1 - n]:
        n += 1
    return n


def definition(known: Sequence[int], count: int) -> list[int]:
    """What followed the longest earlier occurrence of the end of ``known``, the last of equally long ones."""
    lengths = [matching(known, end) for end in range(len(known) - 1)]
    longest = max(lengths, default=0)
    if longest < LEAST:
        return []
    end = max(i for i, n in enumerate(lengths) if n == longest)
    tokens = list(known)
    for i in range(count):
        tokens.append(tokens[end + 1 + i])
    return tokens[len(known) :]


REPETITIVE = st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=12).map(
    # Pieces that recur, so that long matches occur, some of which differ only in what precedes them.
    lambda pieces: [token for i, piece in enumerate(pieces) for token in piece + pieces[i * 7 % len(pieces)]]
)


@given(st.one_of(st.lists(st.integers(0, 2), min_size=1, max_size=60), REPETITIVE.filter(len)), st.integers(1, 15))
def test_it_is_the_definition(known: list[int], count: int) -> None:
    assert PromptLookup().propose(known, count) == definition(known, count)


@given(REPETITIVE.filter(len), st.data())
def test_calls_while_an_answer_grows_are_fresh_calls(tokens: list[int], data: st.DataObject) -> None:
    lookup = PromptLookup()
    lengths = data.draw(st.lists(st.integers(1, len(tokens)), max_size=20))
    for n in sorted(lengths):
        count = data.draw(st.integers(1, 15))
        assert lookup.propose(tokens[:n], count) == PromptLookup().propose(tokens[:n], count)


@pytest.mark.parametrize("n", [1023, 1024, 1025, 5000])
def test_long_answers(n: int) -> None:
    """Longer than the initial size of the array of tokens, grown in one step and in many."""
    tokens = [i % 1000 for i in range(n)]
    lookup = PromptLookup()
    for known in (tokens[:900], tokens[:1010], tokens):
        assert lookup.propose(known, 5) == definition(known, 5)


@pytest.mark.parametrize(
    ("known", "following"),
    [
        ([1], []),
        ([1, 1], []),  # one token that occurred before is not enough
        ([1, 1, 1], [1, 1, 1, 1]),
        ([5, 6, 9, 5], []),
        ([5, 6, 9, 5, 6], [9, 5, 6, 9]),  # into the end, and on beyond it
        ([1, 2, 3, 7, 1, 2, 4, 8, 1, 2], [4, 8, 1, 2]),  # the most recent of two ...
        ([0, 1, 2, 3, 7, 1, 2, 4, 8, 0, 1, 2], [3, 7, 1, 2]),  # ... unless the other match is longer
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),
    ],
)
def test_cases(known: list[int], following: list[int]) -> None:
    assert PromptLookup().propose(known, 4) == following


def test_longer_matches_than_the_longest_are_not_told_apart() -> None:
    """The first occurrence matches two tokens more, the second is more recent."""
    run = list(range(100, 100 + LONGEST))
    known = [1, 2, *run, 3, 9, 2, *run, 4, 8, 1, 2, *run]
    assert PromptLookup().propose(known, 2) == [4, 8]
    shorter = [1, 2, *run[2:], 3, 9, 9, *run[2:], 4, 8, 1, 2, *run[2:]]
    assert PromptLookup().propose(shorter, 2) == [3, 9]
