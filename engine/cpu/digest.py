"""The digest of a row of logits: 128 bits that differ if any logit does, and its two largest logits.

A logit x with token id i is the word w = i * 2**32 + bits(x).  The digest is two sums modulo 2**64 over the vocabulary: of
a = mix64(w + G) and of mix64(a + G), with the constant G of SplitMix64.  Integers are added, so neither the order nor the
number of partial sums shows, and every device may divide a row as it likes.

mix64 is a bijection: two rows that differ in one logit never have the same digest.  Rows that differ in several have the same
one with a probability of about 2**-128 if they were not made for it.  It is no cryptographic hash: whoever may choose all
logits can make two rows with the same digest.  ``docs/receipts.md`` says why that does not matter there.
"""

import numpy as np
from numba import njit

from engine.cpu.sample import argmax, order_key
from engine.numerics import float_bits, mix64

u32 = np.uint32
u64 = np.uint64

GAMMA = u64(0x9E3779B97F4A7C15)


@njit(cache=True)
def word_of(x, token):
    """The first of the two mixed words of a logit."""
    return mix64(((u64(token) << u64(32)) | u64(u32(float_bits(x)))) + GAMMA)


@njit(cache=True, error_model="numpy", nogil=True)
def digest(logits):
    """(low, high, first, second): the two sums, and the tokens of the two largest logits, ties by lower id; logits float32
    [n_vocab], n_vocab > 1."""
    low = u64(0)
    high = u64(0)
    # Without the comparisons, which a loop of its own makes, the compiler mixes several words at once.
    for token in range(logits.size):
        word = word_of(logits[token], token)
        low += word
        high += mix64(word + GAMMA)
    first = argmax(logits, logits.size)
    rest = logits[first + 1 :]
    if first == 0:
        return low, high, first, 1 + argmax(rest, rest.size)
    second = argmax(logits, first)
    if rest.size > 0:
        other = first + 1 + argmax(rest, rest.size)
        if order_key(logits[other]) > order_key(logits[second]):
            second = other
    return low, high, first, second
