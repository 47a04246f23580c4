"""Logits that are not finite: which they are, and what to do."""

import numpy as np
import numpy.typing as npt

from engine.errors import NotFinite

MOST_NAMED = 3
"""Tokens that a message names."""


def not_finite(what: str) -> NotFinite:
    """The error for ``what`` the model has produced, such as "NaN logits"."""
    remedy = "compare the file's checksum, or try the cache type f32"
    return NotFinite(f"the model produced {what}; the file is damaged or its arithmetic overflowed: {remedy}")


def check_rows(rows: npt.NDArray[np.float32], first: int) -> None:
    """Raise NotFinite, which names the tokens, if rows of logits float32 [n, n_vocab] are not finite; first: the number of
    the token after which the first row comes."""
    _check(np.isfinite(rows).all(axis=1), first)


def check_largest(values: npt.NDArray[np.float32], first: int) -> None:
    """Raise the same error if the largest logits of rows, float32 [n], NaN being larger than all others, are NaN or
    infinite; first: see :func:`check_rows`."""
    _check(np.isfinite(values), first)


def _check(given: npt.ArrayLike, first: int) -> None:
    finite = np.asarray(given)
    if finite.all():
        return
    tokens = (first + np.flatnonzero(~finite)).tolist()
    named, more = ", ".join(map(str, tokens[:MOST_NAMED])), len(tokens) - MOST_NAMED
    names = f"token{'s' * (len(tokens) > 1)} {named}{f' and {more} more' * (more > 0)}"
    raise not_finite(f"logits after {names}, counted from 0, that are not finite")
