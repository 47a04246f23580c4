"""The log-probabilities of the tokens of a prompt."""

from collections.abc import Sequence

import numpy as np

from engine.sampling.sampler import token_logprob
from engine.sampling.token_logprob import TokenLogprob
from engine.text.tokenizer import Tokenizer


class PromptScores:
    """Collects the log-probabilities of the tokens of a prompt, from the second one on, when a request calls it with the
    logits after the tokens before them (``on_logits``).  ``found`` are those so far, the same that an answer with these
    tokens would have."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], top: int) -> None:
        """top: the number of most probable tokens to report per token."""
        self.found: list[TokenLogprob] = []
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._top = top

    def __call__(self, first: int, logits: np.ndarray) -> None:
        del self.found[first:]  # a prompt is read again if its answer gave way to others
        for row, token in zip(logits, self._prompt[first + 1 :], strict=False):
            self.found.append(token_logprob(self._tokenizer, row, token, self._top))
