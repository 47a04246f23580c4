"""What a test of ``bitmirror bench`` runs: a prompt or an answer, after tokens that are already in the cache."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.cache.recurrent import Snapshot

if TYPE_CHECKING:
    from engine.llm import LLM


@dataclass(frozen=True)
class Measurement:
    """The nanoseconds of each run of a test: a prompt of ``n_prompt`` tokens or an answer of ``n_gen``, after ``n_depth``
    others.  drafts: where drafts came from, "" without any; acceptance: the share of them that was kept."""

    n_prompt: int
    n_gen: int
    n_depth: int
    samples_ns: tuple[int, ...]
    drafts: str = ""
    acceptance: float = 0.0


def rewind(
    llm: "LLM", depth: int, tokens: Callable[[int], np.ndarray], snapshot: Snapshot | None = None
) -> Snapshot | None:
    """Leave exactly ``depth`` tokens in the cache: by truncating it if that is enough, by a snapshot of that depth, or by
    filling it again.  Returns a snapshot of that depth, if one was needed."""
    if llm.sequence.can_truncate(depth):
        llm.sequence.truncate(depth)
    elif snapshot is not None and snapshot.length == depth:
        llm.model.restore(snapshot, llm.sequence)
    else:
        llm.reset()
        read_prompt(llm, tokens(depth))
        if llm.snapshot_bytes and depth:
            return llm.model.save(llm.sequence)
    return snapshot


def read_prompt(llm: "LLM", tokens: np.ndarray) -> None:
    """Read a prompt in batches; logits are computed for its last token only."""
    from engine.decode.evaluate import evaluate

    first, done = llm.sequence.length, 0
    while done < tokens.size:
        batch = tokens[done : done + llm.model.next_rows(tokens.size - done)]
        positions = np.arange(first + done, first + done + batch.size, dtype=np.int32)
        done += batch.size
        evaluate(llm.model, batch, positions, int(done == tokens.size), llm.sequence)


def generate_tokens(llm: "LLM", tokens: np.ndarray) -> None:
    """Run one step per token, as in an answer: where the device chooses tokens, each step takes the token of the one before,
    else each token is one forward pass with its logits."""
    from engine.decode.evaluate import evaluate
    from engine.decode.request import Request
    from engine.decode.running import Running, follow
    from engine.sampling.sampler import Sampler, SamplerParams

    first = llm.sequence.length
    greedy = Sampler(SamplerParams(temperature=0.0, seed=0), llm.config.n_vocab)
    if (steps := llm.device_steps(greedy.params)) is not None:
        history = np.resize(tokens, first + 1).tolist()
        for _ in follow(Running(Request(history, greedy, tokens.size), llm.sequence, steps)):
            pass
        return
    for i in range(tokens.size):
        evaluate(llm.model, tokens[i : i + 1], np.array([first + i], np.int32), 1, llm.sequence)


def measure(llm: "LLM", n_prompt: int, n_gen: int, depth: int, repetitions: int, warmup: bool = True) -> list[int]:
    """Nanoseconds of each run of one test; either ``n_prompt`` or ``n_gen`` is 0."""
    rng = np.random.default_rng(0)

    def tokens(n: int) -> np.ndarray:
        return rng.integers(0, llm.config.n_vocab, n, dtype=np.int32)

    run, n = (read_prompt, n_prompt) if n_prompt else (generate_tokens, n_gen)
    snapshot = None
    if warmup:
        snapshot = rewind(llm, depth, tokens)
        run(llm, tokens(n if n_prompt else 1))
    samples = []
    for _ in range(repetitions):
        snapshot = rewind(llm, depth, tokens, snapshot)
        drawn = tokens(n)
        start = time.perf_counter_ns()
        run(llm, drawn)
        samples.append(time.perf_counter_ns() - start)
    return samples
