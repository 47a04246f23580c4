"""The masks of several answers, computed at the same time."""

import math
import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.errors import NoToken
from engine.grammar.library import llguidance
from engine.grammar.matcher import Mask, Matcher

if TYPE_CHECKING:
    from llguidance import LLExecutor


PATIENCE = 1e-3
"""Seconds after which several threads compute the masks that are still missing.  Most masks take less time than to wake a
thread."""


class Asked(NamedTuple):
    """An answer that needs masks: its matcher, its tokens so far, prompt included, and the drafts after them."""

    matcher: Matcher
    tokens: Sequence[int]
    drafts: Sequence[int]


def masks_of(asked: Sequence[Asked]) -> list[Mask]:
    """The result of ``Matcher.masks`` for each answer, int32 [1 + n, words]; [0, words] where it raises NoToken, as it will
    again.  Matchers are all different."""
    found: list[Mask] = []
    slow = time.perf_counter() + PATIENCE
    for i, each in enumerate(asked):
        if time.perf_counter() > slow:
            _compute_together(asked[i:])
            slow = math.inf
        found.append(_masks(*each))
    return found


def _masks(matcher: Matcher, tokens: Sequence[int], drafts: Sequence[int]) -> Mask:
    try:
        matcher.following(tokens)
        return matcher.masks(tokens, drafts)
    except NoToken:
        return np.empty((0, matcher.words), np.int32)


def _compute_together(asked: Sequence[Asked]) -> None:
    """Let several threads compute the masks after the last sampled tokens, for the matchers to know.  Why one cannot be known
    is found out when it is asked for."""
    states = []
    for matcher, tokens, _ in asked:
        try:
            state = matcher.following(tokens)
        except NoToken:
            continue
        if state is not None:
            states.append((matcher, state))
    if len(states) < 2:
        return
    words = states[0][0].words
    masks = np.empty((len(states), words), np.int32)
    given = [(state, i) for i, (_, state) in enumerate(states)]
    _executor().unsafe_compute_mask_ptr(given, masks.ctypes.data, masks.itemsize * words, len(states))
    for (matcher, _), mask in zip(states, masks, strict=True):
        try:
            matcher.settle(mask)
        except NoToken:
            continue


@cache
def _executor() -> "LLExecutor":
    return llguidance().LLExecutor()
