"""The bundled model: a prompt of 256 tokens, 32 tokens one by one, and a whole answer through the API."""

from time import process_time

import numpy as np

import engine
from engine.bench import generate_tokens, read_prompt

from .commits import once, sequence_of

N_PROMPT, N_GEN = 256, 32

timer = process_time
repeat = (3, 20, 2.0)


class Prompt:
    """Forward passes over a prompt; divide 256 by the time for tokens per second."""

    @once
    def setup(self) -> None:
        self.llm = engine.load(None, n_threads=1)
        self.llm.compile()
        self.tokens = np.random.default_rng(0).integers(0, self.llm.config.n_vocab, N_PROMPT, dtype=np.int32)
        self.time_prompt()

    def time_prompt(self) -> None:
        sequence_of(self.llm).truncate(0)
        read_prompt(self.llm, self.tokens)


class Generation:
    """32 forward passes of one token each, with an empty cache or after a prompt."""

    params = (0, N_PROMPT)
    param_names = ("depth",)

    @once
    def setup(self, depth: int) -> None:
        self.llm = engine.load(None, n_threads=1)
        self.llm.compile()
        tokens = np.random.default_rng(0).integers(0, self.llm.config.n_vocab, depth + N_GEN, dtype=np.int32)
        read_prompt(self.llm, tokens[:depth])
        self.tokens = tokens[depth:]
        self.time_generation(depth)

    def time_generation(self, depth: int) -> None:
        sequence_of(self.llm).truncate(depth)
        generate_tokens(self.llm, self.tokens)


class Complete:
    """``LLM.complete``, including tokenizer and sampler; the cache is cleared before each run."""

    @once
    def setup(self) -> None:
        self.llm = engine.load(None, n_threads=1)
        self.llm.compile()
        self.time_complete()

    def time_complete(self) -> None:
        self.llm.reset()
        self.llm.complete("def fibonacci(n):\n", max_tokens=N_GEN, ignore_eos=True, seed=1)
