"""How tokens are chosen: the parameters of sampling, checked."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.checks import described, number, require, whole
from engine.errors import UsageError

LogitsProcessor = Callable[[Sequence[int], npt.NDArray[np.float32]], npt.NDArray[np.float32] | None]
"""A function that changes logits: it takes the token ids so far and a float32 array [n_vocab], and returns an array of the
same type and shape, or None if it has modified the given one."""

LEAST_DIVISOR = 1e-6
"""The least ``repeat_penalty``."""

MOST_ADDED = 1e30
"""The most that a bias or a negative penalty may add to a logit."""


@dataclass(frozen=True)
class SamplerParams:
    """How tokens are chosen; names, meanings and defaults are llama.cpp's.

    This is what a sampler obeys: every value is set, and breakers are token ids. ``engine.SamplingParams`` is what programs
    give.

    Parameters
    ----------
    temperature : float
        Divides the logits before the draw; 0 or less takes the most probable token (greedy) and ignores top_k, typical_p,
        top_p, min_p and XTC.
    top_k : int
        Keep the k most probable tokens; 0 or less keeps all.
    top_p : float
        Keep the most probable tokens whose probabilities add up to this; 1 or more: off.
    min_p : float
        Keep tokens at least this fraction as probable as the most probable one; 0 or less: off.
    typical_p : float
        Keep the tokens whose information content is closest to the entropy and whose probabilities add up to this; 1 or
        more: off.
    repeat_penalty : float
        Positive logits of recent tokens are divided by this, the others are multiplied by it; at least 1e-6, 1: off.
    repeat_last_n : int
        Number of most recent tokens that the three penalties consider; 0: none, -1: all.
    presence_penalty : float
        Subtracted from the logit of each recent token; 0: off.
    frequency_penalty : float
        Subtracted once for each occurrence of the token among the recent ones; 0: off.
    logit_bias : mapping of int to float
        Token id -> value added to its logit; ``-inf`` bans the token.
    dry_multiplier : float
        DRY: the penalty on a token that would continue the shortest penalized repetition; 0: off.
    dry_base : float
        Factor of the penalty for each further token of the repetition; at least 1.
    dry_allowed_length : int
        Length of the shortest repetition whose continuation is penalized.
    dry_penalty_last_n : int
        Number of most recent tokens that are searched for repetitions; 0: none, -1: all.
    dry_breakers : sequence of sequences of int
        Sequences of token ids beyond which a repetition does not extend back; a token that is a breaker by itself is not
        penalized.
    xtc_probability : float
        XTC: how often tokens are excluded, 0 (never) to 1 (at every position).
    xtc_threshold : float
        Of the tokens with at least this probability, all but the least probable are excluded; above 0.5: off.
    logits_processors : sequence of callable
        Functions that change the logits before anything else: ``f(ids, logits)`` gets the token ids so far and a float32
        array [n_vocab], and returns an array of the same type and shape, or None if it has modified the given one.
    seed : int
        0 <= seed < 2**64, or -1 for a random one from the operating system.

    Raises
    ------
    UsageError
        If a value is outside its range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_breakers: Sequence[Sequence[int]] = ()
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int = -1

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is type(f.default) and value == f.default:
                continue  # most are not given
            if f.name == "logit_bias":
                value = _checked_bias(value)
            elif f.name == "dry_breakers":
                value = _checked_breakers(value)
            elif f.name == "logits_processors":
                value = _checked_processors(value)
            elif isinstance(f.default, int):
                value = whole(f.name, value)
            else:
                value = number(f.name, value)
            object.__setattr__(self, f.name, value)
        require(self.top_p >= 0, "top_p", "0 or more (1 switches it off)", self.top_p)
        require(self.typical_p >= 0, "typical_p", "0 or more (1 switches it off)", self.typical_p)
        require(self.min_p <= 1, "min_p", "at most 1 (0 switches it off)", self.min_p)
        # Together, these bounds keep logits finite, so that infinite ones are always the model's.
        repeat, least = self.repeat_penalty, -MOST_ADDED
        require(repeat >= LEAST_DIVISOR, "repeat_penalty", f"at least {LEAST_DIVISOR} (1 switches it off)", repeat)
        for name in ("presence_penalty", "frequency_penalty"):
            require(getattr(self, name) >= least, name, f"at least {least} (0 switches it off)", getattr(self, name))
        require(self.repeat_last_n >= -1, "repeat_last_n", "-1 (all), 0 (none) or more", self.repeat_last_n)
        require(self.dry_multiplier >= 0, "dry_multiplier", "0 or more (0 switches it off)", self.dry_multiplier)
        require(self.dry_base >= 1, "dry_base", "at least 1 (dry_multiplier 0 switches DRY off)", self.dry_base)
        require(self.dry_allowed_length >= 0, "dry_allowed_length", "0 or more", self.dry_allowed_length)
        require(
            self.dry_penalty_last_n >= -1, "dry_penalty_last_n", "-1 (all), 0 (none) or more", self.dry_penalty_last_n
        )
        require(0 <= self.xtc_probability <= 1, "xtc_probability", "0 (off) to 1", self.xtc_probability)
        require(
            0 <= self.xtc_threshold <= 1, "xtc_threshold", "0 to 1 (above 0.5 switches XTC off)", self.xtc_threshold
        )
        require(-1 <= self.seed < 2**64, "seed", "-1 (random) or 0 to 2**64 - 1", self.seed)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is chosen, without noise."""
        return self.temperature <= 0

    @property
    def penalizes(self) -> bool:
        """Whether recent tokens change the logits."""
        changes = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return changes and self.repeat_last_n != 0

    @property
    def penalizes_repetitions(self) -> bool:
        """Whether DRY is on."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def excludes_top_choices(self) -> bool:
        """Whether XTC is on."""
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5 and not self.greedy


def _checked_bias(bias: Any) -> dict[int, float]:
    """A checked copy, so that later changes of the caller's mapping have no effect."""
    if not isinstance(bias, Mapping):
        raise UsageError(f"logit_bias must map token ids to numbers, not {described(bias)}.")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        token = whole("a token id in logit_bias", token)
        require(token >= 0, "a token id in logit_bias", "0 or more", token)
        banned = isinstance(value, (float, np.floating)) and value == -math.inf
        name = f"logit_bias of token {described(token)}"
        checked[token] = -math.inf if banned else number(name, value)
        require(checked[token] <= MOST_ADDED, name, f"at most {MOST_ADDED}", checked[token])
    return checked


def _checked_breakers(breakers: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(breakers, (str, bytes)) or not isinstance(breakers, Sequence):
        raise UsageError(f"dry_breakers must be sequences of token ids, not {described(breakers)}.")
    checked: dict[tuple[int, ...], None] = {}
    for breaker in breakers:
        if isinstance(breaker, (str, bytes)) or not isinstance(breaker, Sequence) or not breaker:
            raise UsageError(
                f"a sequence in dry_breakers must have at least one token id, unlike {described(breaker)}."
            )
        tokens = tuple(whole("a token id in dry_breakers", token) for token in breaker)
        require(min(tokens) >= 0, "a token id in dry_breakers", "0 or more", min(tokens))
        checked[tokens] = None
    return tuple(checked)


def _checked_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    if not isinstance(processors, Sequence):
        raise UsageError(f"logits_processors must be a list of functions, not {described(processors)}.")
    for processor in processors:
        if not callable(processor):
            raise UsageError(f"logits_processors must be a list of functions; {described(processor)} is not one.")
    return tuple(processors)
