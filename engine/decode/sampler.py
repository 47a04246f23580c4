"""Sampling: choosing the next token from the logits.

The chain is llama.cpp's default: logit bias, penalties, top-k, typical, top-p, min-p, temperature, draw.  A stage
that is switched off costs nothing.  The draw takes the largest logit after adding noise that depends only on the seed,
the position and the token, so a token is a function of the logits, the recent history, the seed and its position: the
same on every device, and the same whether it is sampled in plain decoding or to verify a draft.
"""

import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.cpu import sample as kernels
from engine.errors import ModelError, UsageError
from engine.numerics import log

# Below this, logit / temperature may overflow; it is far below the point where noise could change the result.
_LEAST_TEMPERATURE = 1e-30

_NO_TOKENS = np.empty(0, np.int64)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; names, meanings and defaults are llama.cpp's.

    Parameters
    ----------
    temperature : float
        Divides the logits before the draw; 0 or less takes the most probable token (greedy) and ignores top_k, typical_p,
        top_p and min_p.
    top_k : int
        Keep the k most probable tokens; 0 or less keeps all.
    top_p : float
        Keep the most probable tokens that together make up this share; 1 or more: off.
    min_p : float
        Keep tokens at least this fraction as probable as the most probable one; 0 or less: off.
    typical_p : float
        Keep the tokens whose information content is nearest the entropy, up to this share; 1 or more: off.
    repeat_penalty : float
        Divides the positive, multiplies the other logits of recent tokens; 1: off.
    repeat_last_n : int
        Number of last tokens that the three penalties consider; 0: none, -1: all.
    presence_penalty : float
        Subtracted from the logit of a recent token; 0: off.
    frequency_penalty : float
        Subtracted once for each occurrence of the token among the recent ones; 0: off.
    logit_bias : mapping of int to float
        Token id -> value added to its logit; ``-inf`` bans the token.
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
    seed: int = -1

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "logit_bias":
                value = _checked_bias(value)
            elif isinstance(f.default, int):
                value = _checked_int(f.name, value)
            else:
                value = _checked_float(f.name, value)
            object.__setattr__(self, f.name, value)
        _require(self.top_p >= 0, "top_p", "0 or more (1 switches it off)", self.top_p)
        _require(self.typical_p >= 0, "typical_p", "0 or more (1 switches it off)", self.typical_p)
        _require(self.min_p <= 1, "min_p", "at most 1 (0 switches it off)", self.min_p)
        _require(self.repeat_penalty > 0, "repeat_penalty", "above 0 (1 switches it off)", self.repeat_penalty)
        _require(self.repeat_last_n >= -1, "repeat_last_n", "-1 (all), 0 (none) or more", self.repeat_last_n)
        _require(-1 <= self.seed < 2**64, "seed", "-1 (random) or 0 to 2**64 - 1", self.seed)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is chosen, without noise."""
        return self.temperature <= 0

    @property
    def penalizes(self) -> bool:
        """Whether recent tokens change the logits."""
        changes = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return changes and self.repeat_last_n != 0


class Sampler:
    """Chooses tokens for one model; its work arrays are reused, so one thread at a time may use it.

    It keeps no state between calls: the same logits, position and history give the same token, in any order of calls.
    """

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        """``n_vocab``: the number of logits per row.  Raises UsageError if ``logit_bias`` names a token outside it."""
        if n_vocab < 1:
            raise UsageError(f"a sampler needs a vocabulary of at least 1 token, not {n_vocab}")
        self.params = params
        self.n_vocab = n_vocab
        #: The seed in use: ``params.seed``, or the random one that replaces -1 (32 bits, short enough to retype).
        self.seed: int = params.seed if params.seed >= 0 else int.from_bytes(os.urandom(4), "little")
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        if self._bias_ids.size and self._bias_ids.max() >= n_vocab:
            raise UsageError(
                f"logit_bias names token {self._bias_ids.max()}, but the vocabulary ends at {n_vocab - 1}; correct the id"
            )
        self._temperature = np.float32(max(params.temperature, _LEAST_TEMPERATURE))
        self._log_min_p = np.float32(log(np.float32(params.min_p)))
        # Untouched memory pages cost nothing, so every array is as long as the vocabulary.
        self._all_ids = np.arange(n_vocab, dtype=np.int32)
        self._lists = [(np.zeros(n_vocab, np.float32), np.zeros(n_vocab, np.int32)) for _ in range(2)]
        self._edited = np.empty(n_vocab, np.float32)
        self._counts = np.zeros(n_vocab, np.int32)
        self._weights = np.empty(n_vocab, np.float32)
        self._scores = np.empty(n_vocab, np.float32)
        self._partial = np.empty(-(-n_vocab // kernels.CHUNK), np.float32)
        self._keys = np.empty(n_vocab, np.uint64)
        self._spare = np.empty(n_vocab, np.uint64)

    @property
    def temperature(self) -> np.float32:
        """The divisor of the logits, above 0 even if sampling is greedy."""
        return self._temperature

    def narrowed(self, n_vocab: int) -> "Sampler":
        """A sampler with the same parameters and seed for the first ``n_vocab`` tokens only."""
        bias = {token: value for token, value in self.params.logit_bias.items() if token < n_vocab}
        return Sampler(replace(self.params, logit_bias=bias, seed=self.seed), n_vocab)

    def sample(self, logits: npt.NDArray[np.float32], position: int, history: Sequence[int] = ()) -> int:
        """The token to put at ``position``.

        logits: float32 [n_vocab], left unchanged.
        position: the absolute position, from 0, that the sampled token will occupy.
        history: the token ids before it, including the prompt; only penalties use it.
        Raises ModelError if the logits contain NaN or +infinity, UsageError if an argument does not fit or every
        token is banned.
        """
        position = operator.index(position)
        if not 0 <= position < 2**63:
            raise UsageError(f"the position of a token must be 0 or more, not {position}")
        if self.params.greedy:
            logits = self._edit(logits, history)
            place = int(kernels.argmax(logits, self.n_vocab))
            _check_largest(float(logits[place]))
            return place
        values, ids, n = self._filter(logits, history)
        if n == 1:
            return int(ids[0])
        return int(kernels.draw(values, ids, n, self._temperature, np.uint64(self.seed), position))

    def candidates(
        self, logits: npt.NDArray[np.float32], history: Sequence[int] = ()
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """(ids, logits) from which the token is drawn: int32 [n] and float32 [n], with bias and penalties but not yet
        divided by the temperature.

        Sorted by logit descending, ties by lower id, if top_k, typical_p or top_p is on, else by id.  Arguments and
        errors are those of :meth:`sample`; if sampling is greedy there is one candidate.
        """
        if self.params.greedy:
            token = self.sample(logits, 0, history)
            return np.array([token], np.int32), self._edit(logits, history)[token : token + 1].copy()
        values, ids, n = self._filter(logits, history)
        return ids[:n].copy(), values[:n].copy()

    def warm_up(self) -> None:
        """Compiles the kernels that these parameters use (about 4 s once per machine; later they are loaded)."""
        self.sample(np.zeros(self.n_vocab, np.float32), 0, [0])

    def _edit(self, logits: npt.NDArray[np.float32], history: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits with bias and penalties: a copy, or the logits themselves when both are off."""
        if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or logits.shape != (self.n_vocab,):
            raise UsageError(f"logits must be one row of float32 [{self.n_vocab}], not {_describe(logits)}")
        logits = np.ascontiguousarray(logits)
        recent = self._recent(history) if self.params.penalizes else _NO_TOKENS
        if not (self._bias.size or recent.size):
            return logits
        np.copyto(self._edited, logits)
        if self._bias.size:
            kernels.add_bias(self._edited, self._bias_ids, self._bias)
        if recent.size:
            p = self.params
            penalties = (np.float32(p.repeat_penalty), np.float32(p.frequency_penalty), np.float32(p.presence_penalty))
            kernels.penalize(self._edited, recent, self._counts, *penalties)
        return self._edited

    def _recent(self, history: Sequence[int]) -> npt.NDArray[np.int64]:
        last_n = self.params.repeat_last_n
        recent = np.asarray(history if last_n < 0 else history[-last_n:], np.int64)
        if recent.size and not 0 <= recent.min() <= recent.max() < self.n_vocab:
            outside = recent[(recent < 0) | (recent >= self.n_vocab)][0]
            raise UsageError(f"the history contains token {outside}, but the vocabulary ends at {self.n_vocab - 1}")
        return recent

    def _filter(
        self, logits: npt.NDArray[np.float32], history: Sequence[int]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], int]:
        """The candidate list: (values, ids, n)."""
        p = self.params
        values, ids, n = self._edit(logits, history), self._all_ids, self.n_vocab
        front, back = self._lists
        sums = (self._weights, self._scores, self._partial)
        sort = (self._keys, self._spare)
        if p.top_k > 0:
            n = kernels.top_k(values, ids, n, min(p.top_k, n), *sort, *front)
            (values, ids), front, back = front, back, front
            _check_largest(float(values[0]))
        else:
            _check_largest(float(values[kernels.argmax(values, n)]))
        if p.typical_p < 1 and n > 1:
            n = kernels.typical(values, ids, n, np.float32(p.typical_p), *sums, *sort, *front)
            (values, ids), front, back = front, back, front
        if p.top_p < 1 and n > 1:
            n = kernels.top_p(values, ids, n, np.float32(p.top_p), self._weights, self._partial, *sort, *front)
            (values, ids), front, back = front, back, front
        if p.min_p > 0 and n > 1:
            n = kernels.min_p(values, ids, n, self._log_min_p, *front)
            values, ids = front
        return values, ids, n


class Logprobs(NamedTuple):
    """Natural logarithms of softmax probabilities; see :func:`logprobs`."""

    values: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_values: npt.NDArray[np.float32]


def logprobs(logits: npt.NDArray[np.float32], ids: Iterable[int] = (), top_n: int = 0) -> Logprobs:
    """Log-probabilities under the softmax of a whole row of logits (temperature 1, no filter).

    logits: float32 [n_vocab]; ids: the requested tokens; top_n: the number of most probable tokens to add.
    Returns ``values`` float32 [len(ids)] in the order of ``ids``, and ``top_ids`` int32 [top_n] with ``top_values``
    float32 [top_n], most probable first, ties by lower id (fewer if the vocabulary is smaller).

    A value is (logit - max) - log(sum of exp(logit - max)), the sum taken over the vocabulary in the order of token
    ids by :func:`engine.cpu.sample.tree_sum`, so it is the same float32 on every device.
    Raises ModelError if the logits contain NaN or +infinity, UsageError if an argument does not fit.
    """
    if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or logits.ndim != 1 or not logits.size:
        raise UsageError(f"logits must be one row of float32 [n_vocab], not {_describe(logits)}")
    logits = np.ascontiguousarray(logits)
    n_vocab = logits.size
    chosen = np.fromiter(ids, np.int64)
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < n_vocab:
        raise UsageError(f"token ids must be 0 to {n_vocab - 1}, the end of the vocabulary, not {chosen.tolist()}")
    if top_n < 0:
        raise UsageError(f"the number of most probable tokens must be 0 or more, not {top_n}")
    weights = np.empty(n_vocab, np.float32)
    top, log_total = kernels.log_softmax(logits, weights, np.empty(-(-n_vocab // kernels.CHUNK), np.float32))
    _check_largest(float(top))
    top_n = min(top_n, n_vocab)
    top_values, top_ids = np.empty(top_n, np.float32), np.empty(top_n, np.int32)
    if top_n:
        all_ids = np.arange(n_vocab, dtype=np.int32)
        keys, spare = np.empty(n_vocab, np.uint64), np.empty(n_vocab, np.uint64)
        kernels.top_k(logits, all_ids, n_vocab, top_n, keys, spare, top_values, top_ids)
    top, log_total = np.float32(top), np.float32(log_total)
    return Logprobs((logits[chosen] - top) - log_total, top_ids, (top_values - top) - log_total)


# --- checks ----------------------------------------------------------------------------------------------------


def _check_largest(value: float) -> None:
    """Raise the error for a row that cannot be sampled; the largest logit shows it, since NaN sorts above everything."""
    if math.isnan(value):
        raise ModelError("the model produced NaN logits; the file is damaged or its arithmetic overflowed")
    if value == math.inf:
        raise ModelError("the model produced infinite logits; the file is damaged or its arithmetic overflowed")
    if value == -math.inf:
        raise UsageError("logit_bias bans every token that the model could choose; ban fewer")


def _require(holds: bool, name: str, allowed: str, value: float) -> None:
    if not holds:
        raise UsageError(f"{name} must be {allowed}, not {value}")


def _checked_int(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None


def _checked_float(name: str, value: Any) -> float:
    """A number that float32 can represent, since sampling computes in float32."""
    if isinstance(value, (bool, str, bytes)):
        raise UsageError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name} must be a number, not {value!r}") from None
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise UsageError(f"{name} must be a finite number, not {value!r}")
    return number


def _checked_bias(bias: Any) -> dict[int, float]:
    """A checked copy, so that later changes of the caller's mapping have no effect."""
    if not isinstance(bias, Mapping):
        raise UsageError(f"logit_bias must map token ids to numbers, not {type(bias).__name__}")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        token = _checked_int("a token id in logit_bias", token)
        _require(token >= 0, "a token id in logit_bias", "0 or more", token)
        banned = isinstance(value, (float, np.floating)) and value == -math.inf
        checked[token] = -math.inf if banned else _checked_float(f"logit_bias of token {token}", value)
    return checked


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


__all__ = ["Logprobs", "Sampler", "SamplingParams", "logprobs"]
