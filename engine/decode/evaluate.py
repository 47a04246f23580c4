"""A pass over tokens of one sequence, without a scheduler: for tests, tools and measurements."""

import numpy as np

from engine.cache.sequence import Sequence
from engine.models.base import Model


def evaluate(model: Model, tokens: np.ndarray, positions: np.ndarray, n_logits: int, sequence: Sequence) -> np.ndarray:
    """Run a pass over ``tokens`` int32 [rows] at ``positions`` int32 [rows], and commit the tokens to the sequence.

    Positions are consecutive and begin at ``sequence.length``.

    Returns the logits of the last ``n_logits`` rows, float32 [n_logits, n_vocab].  Raises ContextError if the positions do
    not fit into the context, and NoPages if all pages of the cache are in use.
    """
    logits = model.forward(tokens, positions, n_logits, sequence)
    sequence.commit(tokens.tolist())
    return logits
