"""Sequences of caches that are tested without a model."""

from engine.cache.sequence import Sequence


def store(sequence: Sequence, first: int, count: int) -> None:
    """Claim positions [first, first + count) and commit as many tokens, whatever they are."""
    sequence.claim(first, count)
    sequence.commit([0] * count)
