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
    if np.isfinite(rows).all():
        return
    tokens = (first + np.flatnonzero(~np.isfinite(rows).all(axis=1))).tolist()
    named, more = ", ".join(map(str, tokens[:MOST_NAMED])), len(tokens) - MOST_NAMED
    names = f"token{'s' * (len(tokens) > 1)} {named}{f' and {more} more' * (more > 0)}"
    raise not_finite(f"logits after {names}, counted from 0, that are not finite")
