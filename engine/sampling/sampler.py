"""Sampling: choosing the next token from the logits.

The chain is llama.cpp's default: logits processors, grammar, logit bias, penalties, DRY, top-k, typical, top-p, min-p, XTC,
temperature, draw.  A stage that is switched off costs nothing.  The draw takes the largest logit after adding noise that
depends only on the seed, the position and the token, and XTC excludes tokens at positions that depend only on the seed, so a
token is a function of the logits, the history, the seed and its position: the same on every device, and the same whether it
is sampled in plain decoding or to verify a draft.
"""

import math
import operator
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.checks import described
from engine.compile.jobs import Job, noted
from engine.cpu import dry, xtc
from engine.cpu import sample as kernels
from engine.errors import NoToken, UsageError
from engine.grammar.matcher import Matcher
from engine.numerics import log
from engine.sampling.finite import not_finite
from engine.sampling.params import LogitsProcessor, SamplerParams
from engine.sampling.processors import processed
from engine.sampling.token_logprob import TokenLogprob
from engine.text.tokenizer import Tokenizer

# Below this, logit / temperature may overflow; it is far below the point where noise could change the result.
_LEAST_TEMPERATURE = 1e-30

_NO_TOKENS = np.empty(0, np.int64)


class Sampler:
    """Chooses tokens for one model; its work arrays are reused, so one thread at a time may use it.

    It keeps no state between calls: the same logits, position and history give the same token, in any order of calls; with a
    matcher, for histories of its answer.
    """

    def __init__(self, params: SamplerParams, n_vocab: int, matcher: Matcher | None = None) -> None:
        """``n_vocab``: the number of logits per row; ``matcher``: which tokens a grammar permits in the one answer that this
        sampler is for.  Raises UsageError if ``logit_bias`` or ``dry_breakers`` names a token outside the vocabulary."""
        if n_vocab < 1:
            raise UsageError(f"a sampler needs a vocabulary of at least 1 token, not {n_vocab}")
        self.params = params
        self.n_vocab = n_vocab
        self.matcher = matcher
        #: The seed in use: ``params.seed``, or the random one that replaces -1 (32 bits, short enough to retype).
        self.seed: int = params.seed if params.seed >= 0 else int.from_bytes(os.urandom(4), "little")
        # Compared as Python integers, which do not overflow.
        _check_last("logit_bias", max(params.logit_bias, default=0), n_vocab)
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._breakers = _breaker_arrays(params.dry_breakers, n_vocab) if params.penalizes_repetitions else ()
        self._temperature = np.float32(max(params.temperature, _LEAST_TEMPERATURE))
        self._log_min_p = np.float32(log(np.float32(params.min_p)))

    @property
    def _work(self) -> "_Work":
        return _work_of(self.n_vocab)

    @property
    def temperature(self) -> np.float32:
        """The divisor of the logits, above 0 even if sampling is greedy."""
        return self._temperature

    def narrowed(self, n_vocab: int) -> "Sampler":
        """A sampler with these parameters and this seed for the first ``n_vocab`` tokens only, without the logits processors,
        which need the whole vocabulary."""
        bias = {token: value for token, value in self.params.logit_bias.items() if token < n_vocab}
        breakers = [tokens for tokens in self.params.dry_breakers if max(tokens) < n_vocab]
        params = replace(self.params, logit_bias=bias, dry_breakers=breakers, logits_processors=(), seed=self.seed)
        return Sampler(params, n_vocab, self.matcher)

    def ahead(self) -> "Sampler":
        """A sampler with these parameters and this seed for drafts, whose tokens may not become those of the answer."""
        if self.matcher is None:
            return self
        return Sampler(replace(self.params, seed=self.seed), self.n_vocab, self.matcher.ahead)

    def sample(self, logits: npt.NDArray[np.float32], position: int, history: Sequence[int] = ()) -> int:
        """The token to put at ``position``.

        logits: float32 [n_vocab], left unchanged.
        position: the absolute position, from 0, that the sampled token will occupy.
        history: the token ids before it, including the prompt; only penalties, DRY, logits processors and a grammar use it.
        Raises NotFinite if the logits contain NaN or +infinity, NoToken if every token is banned, UsageError if an argument
        does not fit or a logits processor returns something else than logits.
        """
        position = _checked_position(position)
        values, ids, n = self._filter(logits, position, history)
        if n == 1:
            return int(ids[0])
        return int(kernels.draw(values, ids, n, self._temperature, np.uint64(self.seed), position))

    def candidates(
        self, logits: npt.NDArray[np.float32], history: Sequence[int] = (), position: int | None = None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """(ids, logits) from which the token is drawn: int32 [n] and float32 [n], with bias and penalties but not yet
        divided by the temperature.

        Sorted by logit descending, ties by lower id, if top_k, typical_p or top_p is on, else by id.  ``position`` is
        ``len(history)`` by default; arguments and errors are those of :meth:`sample`.  If sampling is greedy there is one
        candidate.
        """
        position = _checked_position(len(history) if position is None else position)
        values, ids, n = self._filter(logits, position, history)
        return ids[:n].copy(), values[:n].copy()

    def warm_up(self) -> None:
        """Compiles the kernels that these parameters use (about 4 s once per machine; later they are loaded)."""
        self.sample(np.zeros(self.n_vocab, np.float32), 0, [0])

    def jobs(self) -> list[Job]:
        """A compile job for each kernel that these parameters use. Nothing is computed."""
        found: dict[Job, None] = {}
        # Kernels that are noted write nothing, so fresh work arrays: the others may hold the NaN of an earlier answer.
        with noted(found), _WORKS.fresh():
            self.warm_up()
        return list(found)

    def _edit(self, logits: npt.NDArray[np.float32], history: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits after everything that changes them: a copy, or the logits themselves when all of it is off."""
        if not isinstance(logits, np.ndarray) or logits.dtype != np.float32 or logits.shape != (self.n_vocab,):
            raise UsageError(f"logits must be one row of float32 [{self.n_vocab}], not {_describe(logits)}")
        logits = np.ascontiguousarray(logits)
        p = self.params
        if p.logits_processors:
            # What a damaged model has produced is not the fault of a processor.
            _check_largest(float(logits.max()))
            logits = processed(p.logits_processors, history, logits)
        recent = self._recent(history, p.repeat_last_n if p.penalizes else 0)
        window = self._recent(history, p.dry_penalty_last_n if p.penalizes_repetitions else 0)
        if not (self.matcher is not None or self._bias.size or recent.size or window.size):
            return logits
        edited, counts = self._work.edited, self._work.counts
        np.copyto(edited, logits)
        if self.matcher is not None:
            kernels.permit(edited, self.matcher.mask(history).view(np.uint32))
        if self._bias.size:
            kernels.add_bias(edited, self._bias_ids, self._bias)
        if recent.size:
            penalties = (np.float32(p.repeat_penalty), np.float32(p.frequency_penalty), np.float32(p.presence_penalty))
            kernels.penalize(edited, recent, counts, *penalties)
        if window.size:
            # No repetition is longer than the window, and the kernel takes 64 bits.
            strength = (p.dry_multiplier, p.dry_base, min(p.dry_allowed_length, window.size + 1))
            dry.penalize_repetitions(edited, window, *strength, *self._breakers, counts)
        return edited

    def _recent(self, history: Sequence[int], last_n: int) -> npt.NDArray[np.int64]:
        """The last ``last_n`` tokens, checked; -1: all."""
        if last_n == 0:
            return _NO_TOKENS
        recent = np.asarray(history if last_n < 0 else history[-last_n:], np.int64)
        if recent.size and not 0 <= recent.min() <= recent.max() < self.n_vocab:
            outside = recent[(recent < 0) | (recent >= self.n_vocab)][0]
            raise UsageError(f"the history contains token {outside}, but the vocabulary ends at {self.n_vocab - 1}")
        return recent

    def _filter(
        self, logits: npt.NDArray[np.float32], position: int, history: Sequence[int]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], int]:
        """The candidate list: (values, ids, n)."""
        p = self.params
        work = self._work
        values, ids, n = self._edit(logits, history), work.all_ids, self.n_vocab
        front, back = work.lists
        sums = (work.weights, work.scores, work.partial)
        sort = (work.keys, work.spare)
        if p.greedy:
            place = int(kernels.argmax(values, n))
            self._check(float(values[place]), logits)
            return values[place:], ids[place:], 1
        if p.top_k > 0:
            n = kernels.top_k(values, ids, n, min(p.top_k, n), *sort, *front)
            (values, ids), front, back = front, back, front
            self._check(float(values[0]), logits)
        else:
            self._check(float(values[kernels.argmax(values, n)]), logits)
        if p.typical_p < 1 and n > 1:
            n = kernels.typical(values, ids, n, np.float32(p.typical_p), *sums, *sort, *front)
            (values, ids), front, back = front, back, front
        if p.top_p < 1 and n > 1:
            n = kernels.top_p(values, ids, n, np.float32(p.top_p), work.weights, work.partial, *sort, *front)
            (values, ids), front, back = front, back, front
        if p.min_p > 0 and n > 1:
            n = kernels.min_p(values, ids, n, self._log_min_p, *front)
            (values, ids), front, back = front, back, front
        if (
            p.excludes_top_choices
            and n > 1
            and xtc.strikes(np.uint64(self.seed), position, np.float32(p.xtc_probability))
        ):
            threshold = np.float32(p.xtc_threshold)
            n = xtc.exclude(values, ids, n, threshold, work.weights, work.partial, *front)
            values, ids = front
        return values, ids, n

    def _check(self, largest: float, logits: npt.NDArray[np.float32] | None = None) -> None:
        """Raise the error for edited logits from which nothing can be chosen; logits: the model's, if they are here."""
        if largest == -math.inf:
            p = self.params
            banning = self.matcher is not None or bool(p.logit_bias) or bool(p.logits_processors)
            if not banning or (logits is not None and logits.max() == -math.inf):
                raise not_finite("infinite logits")
            if self.matcher is not None:
                raise NoToken("logit_bias or a logits processor bans every token that the grammar permits; ban fewer")
        _check_largest(largest)


class _Work:
    """The arrays of the samplers of one vocabulary that a thread uses, one after another: making them for each answer would
    delay its first token.  Untouched memory pages cost nothing, so every array is as long as the vocabulary."""

    def __init__(self, n_vocab: int) -> None:
        self.all_ids = np.arange(n_vocab, dtype=np.int32)
        self.lists = [(np.zeros(n_vocab, np.float32), np.zeros(n_vocab, np.int32)) for _ in range(2)]
        self.edited = np.empty(n_vocab, np.float32)
        self.counts = np.zeros(n_vocab, np.int32)
        self.weights = np.empty(n_vocab, np.float32)
        self.scores = np.empty(n_vocab, np.float32)
        self.partial = np.empty(-(-n_vocab // kernels.CHUNK), np.float32)
        self.keys = np.empty(n_vocab, np.uint64)
        self.spare = np.empty(n_vocab, np.uint64)


class _Works(threading.local):
    """The arrays that a thread has, by the number of tokens of the vocabulary."""

    def __init__(self) -> None:
        self.found: dict[int, _Work] = {}

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """A context in which this thread's arrays are new ones."""
        found, self.found = self.found, {}
        try:
            yield
        finally:
            self.found = found


_WORKS = _Works()


def _work_of(n_vocab: int) -> _Work:
    """The arrays of this thread for a vocabulary."""
    if n_vocab not in _WORKS.found:
        _WORKS.found[n_vocab] = _Work(n_vocab)
    return _WORKS.found[n_vocab]


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
    Raises NotFinite if the logits contain NaN or +infinity, UsageError if an argument does not fit.
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
    if top == -math.inf:
        raise not_finite("infinite logits")
    _check_largest(float(top))
    top_n = min(top_n, n_vocab)
    top_values, top_ids = np.empty(top_n, np.float32), np.empty(top_n, np.int32)
    if top_n:
        all_ids = np.arange(n_vocab, dtype=np.int32)
        keys, spare = np.empty(n_vocab, np.uint64), np.empty(n_vocab, np.uint64)
        kernels.top_k(logits, all_ids, n_vocab, top_n, keys, spare, top_values, top_ids)
    top, log_total = np.float32(top), np.float32(log_total)
    return Logprobs((logits[chosen] - top) - log_total, top_ids, (top_values - top) - log_total)


def token_logprob(tokenizer: Tokenizer, logits: npt.NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """A token with its log-probability in logits float32 [n_vocab], and the ``top`` most probable tokens."""
    found = logprobs(logits, [token], top)

    def entry(id: int, value: float, others: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return TokenLogprob(id, tokenizer.token_bytes(id, special=True).decode("utf-8", "replace"), value, others)

    likely = zip(found.top_ids.tolist(), found.top_values.tolist(), strict=True)
    return entry(token, float(found.values[0]), tuple(entry(id, value) for id, value in likely))


# --- checks ----------------------------------------------------------------------------------------------------


def _check_largest(value: float) -> None:
    """Raise the error for a row that cannot be sampled; the largest logit shows it, since NaN sorts above everything."""
    if math.isnan(value):
        raise not_finite("NaN logits")
    if value == math.inf:
        raise not_finite("infinite logits")
    if value == -math.inf:
        raise NoToken("logit_bias or a logits processor bans every token that the model could choose; ban fewer")


def _checked_position(position: int) -> int:
    position = operator.index(position)
    if not 0 <= position < 2**63:
        raise UsageError(f"the position of a token must be 0 or more, not {described(position)}")
    return position


def _check_last(name: str, token: int, n_vocab: int) -> None:
    """Raise UsageError if a parameter names a token beyond the vocabulary."""
    if token >= n_vocab:
        last = n_vocab - 1
        raise UsageError(f"{name} names token {described(token)}, but the vocabulary ends at {last}; correct the id")


def _breaker_arrays(breakers: Sequence[Sequence[int]], n_vocab: int) -> tuple[np.ndarray, ...]:
    """Breakers as ``engine.cpu.dry.unbroken`` takes them: (alone, heads, starts, tails)."""
    _check_last("dry_breakers", max(map(max, breakers), default=0), n_vocab)
    alone = np.zeros(n_vocab, np.bool_)
    alone[[tokens[0] for tokens in breakers if len(tokens) == 1]] = True
    longer = sorted(tuple(tokens) for tokens in breakers if len(tokens) > 1)
    starts = np.cumsum([0, *(len(tokens) - 1 for tokens in longer)], dtype=np.int64)
    tails = np.array([token for tokens in longer for token in tokens[1:]], np.int64)
    return alone, np.array([tokens[0] for tokens in longer], np.int64), starts, tails


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


__all__ = ["Logprobs", "LogitsProcessor", "Sampler", "SamplerParams", "logprobs"]
