"""One token from one row of logits, at the vocabulary sizes of the bundled model and of gemma3."""

from time import process_time
from typing import ClassVar

import numpy as np

from engine.sampling.sampler import Sampler, SamplerParams, logprobs

from .commits import once

timer = process_time
repeat = (5, 100, 0.3)

SETTINGS = {
    "greedy": SamplerParams(temperature=0.0),
    "default": SamplerParams(seed=1),
    "whole vocabulary": SamplerParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1),
    "top-p only": SamplerParams(temperature=1.0, top_k=0, top_p=0.95, min_p=0.0, seed=1),
    "penalties": SamplerParams(repeat_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, seed=1),
}


class Sample:
    """``Sampler.sample`` with 64 tokens of history, by settings and vocabulary size."""

    params: ClassVar[tuple[object, ...]] = (tuple(SETTINGS), (8192, 262144))
    param_names = ("settings", "n_vocab")

    @once
    def setup(self, settings: str, n_vocab: int) -> None:
        rng = np.random.default_rng(0)
        self.logits = 3 * rng.standard_normal(n_vocab, np.float32)
        self.history = rng.integers(0, n_vocab, 64).tolist()
        self.sampler = Sampler(SETTINGS[settings], n_vocab)
        self.time_sample(settings, n_vocab)

    def time_sample(self, settings: str, n_vocab: int) -> None:
        self.sampler.sample(self.logits, 64, self.history)


class Logprobs:
    """The chosen token's log-probability and the ten best."""

    params = (8192, 262144)
    param_names = ("n_vocab",)

    @once
    def setup(self, n_vocab: int) -> None:
        self.logits = 3 * np.random.default_rng(0).standard_normal(n_vocab, np.float32)
        self.time_logprobs(n_vocab)

    def time_logprobs(self, n_vocab: int) -> None:
        logprobs(self.logits, [1], 10)
