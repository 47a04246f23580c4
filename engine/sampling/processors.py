"""Logits processors: functions of the user that change the logits before a token is chosen."""

import math
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.errors import UsageError
from engine.sampling.params import LogitsProcessor


def processed(
    processors: Sequence[LogitsProcessor], ids: Sequence[int], logits: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """The logits after each of ``processors`` in turn: a new array, float32 [n_vocab]; ``logits`` stay as they are.

    ids: the tokens before the one to be chosen; each function gets them as a tuple.
    Raises UsageError if a function returns something else than None or float32 [n_vocab] without NaN and +infinity.
    Exceptions of the functions are not caught.
    """
    before, logits = tuple(ids), logits.copy()
    for processor in processors:
        found = processor(before, logits)
        _check(processor, logits if found is None else found, logits.size)
        if found is not None:
            logits = np.array(found, order="C")  # the function may keep its array, and change it later
    return logits


class Ended(Exception):
    """Ends an answer that a function which it has called has closed."""


class Ending:
    """How logits processors end their answer: before the token that is being chosen, whoever computes it."""

    def __init__(self) -> None:
        self._thread = 0
        self._ended = False

    def around(self, processor: LogitsProcessor) -> LogitsProcessor:
        """A function that does the same; if the answer is ended in it, it raises ``Ended`` when it has returned."""

        def ending(ids: Sequence[int], logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
            outer, self._thread = self._thread, threading.get_ident()
            try:
                found = processor(ids, logits)
            finally:
                self._thread = outer
            if self._ended:
                raise Ended
            return found

        ending.__name__ = _name(processor)
        return ending

    def asked(self) -> bool:
        """End the answer if this thread is in one of its processors; returns whether it is."""
        inside = self._thread == threading.get_ident()
        self._ended = self._ended or inside
        return inside


def _name(processor: LogitsProcessor) -> str:
    return str(getattr(processor, "__name__", type(processor).__name__))


def _check(processor: LogitsProcessor, found: object, n_vocab: int) -> None:
    name = _name(processor)
    wanted = f"None or an array float32 [{n_vocab}]"
    if not isinstance(found, np.ndarray):
        raise UsageError(f"the logits processor {name} must return {wanted}, not {type(found).__name__}")
    if found.dtype != np.float32 or found.shape != (n_vocab,):
        raise UsageError(f"the logits processor {name} must return {wanted}, not {found.dtype} {list(found.shape)}")
    largest = float(found.max())
    if math.isnan(largest) or largest == math.inf:
        raise UsageError(
            f"the logits processor {name} made a logit {'NaN' if math.isnan(largest) else 'infinite'}; "
            "logits must be finite, or -inf to ban a token"
        )
