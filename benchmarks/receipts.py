"""What receipts cost, and how much faster than an answer its replay is.

    python -m benchmarks.receipts MODEL.gguf [--device cuda] [--users 1,64] [-n 128] [--replayed 1000] [-r 3]

Answers of random prompts are computed with receipts and without, alternately.  Rates are tokens per second of all answers,
from the end of their prompts to their last tokens; the cost is that of the median.  Then an answer of 1000 tokens is
computed and its receipt is replayed: for the first time in the process, when the weights are hashed and passes are recorded,
and again.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.receipts.form import problem_of

PROMPT = 32
"""Tokens of a prompt."""

PLAIN = engine.SpeculationParams(enabled=False)


def rate(llm: engine.LLM, prompts: Sequence[list[int]], count: int, receipt: bool) -> float:
    """Tokens per second of answers that are computed together."""
    llm.reset()
    answers = llm.complete(list(prompts), max_tokens=count, seed=1, ignore_eos=True, receipt=receipt, speculation=PLAIN)
    tokens = sum(answer.timings.predicted_n for answer in answers)
    return tokens / max(answer.timings.predicted_s for answer in answers)


def costs(llm: engine.LLM, users: Sequence[int], count: int, repetitions: int) -> None:
    """Print the rates with receipts and without, for numbers of users."""
    rng = np.random.default_rng(0)
    print("| users | tokens/s | with receipts | cost |\n| ---: | ---: | ---: | ---: |")
    for n in users:
        prompts = rng.integers(0, llm.config.n_vocab, (n, PROMPT)).tolist()
        for receipt in (False, True):
            rate(llm, prompts, 16, receipt)
        found: dict[bool, list[float]] = {False: [], True: []}
        for i in range(2 * repetitions):
            # In turn, and each first in half of the pairs.
            receipt = i % 4 in (1, 2)
            found[receipt].append(rate(llm, prompts, count, receipt))
        plain, with_receipts = (statistics.median(found[receipt]) for receipt in (False, True))
        print(f"| {n} | {plain:.1f} | {with_receipts:.1f} | {1 - with_receipts / plain:.2%} |", flush=True)


def replays(llm: engine.LLM, count: int, repetitions: int, options: dict[str, Any]) -> None:
    """Print how long an answer takes and its replay."""
    prompt = np.random.default_rng(1).integers(0, llm.config.n_vocab, PROMPT).tolist()
    llm.reset()
    answer = llm.complete(prompt, max_tokens=count, seed=1, ignore_eos=True, receipt=True, speculation=PLAIN, **options)
    made, receipt = answer.timings.predicted_s, answer.receipt()
    seconds = []
    for _ in range(repetitions + 1):
        begun = time.perf_counter()
        found = llm.verify(receipt)
        seconds.append(time.perf_counter() - begun)
        assert found.same, found.problem
    begun = time.perf_counter()
    assert problem_of(receipt) == ""
    hashes, replayed = time.perf_counter() - begun, statistics.median(seconds[1:])
    print(
        f"{count} tokens: made in {made:.3f} s, replayed in {seconds[0]:.3f} s at first and {replayed:.4f} s again, "
        f"{made / replayed:.1f} times as fast; {hashes:.4f} s of this for the hashes of the receipt",
        flush=True,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--users", default="1,64", help="numbers of answers at a time (1,64); 0: none")
    parser.add_argument("-n", type=int, default=128, help="tokens of an answer (128)")
    parser.add_argument("--replayed", type=int, default=1000, help="tokens of the answer that is replayed (1000)")
    parser.add_argument("-r", "--repetitions", type=int, default=4)
    args = parser.parse_args()
    users = [n for n in map(int, args.users.split(",")) if n]
    n_ctx = PROMPT + max(args.n, args.replayed) + 1
    with engine.load(args.model, device=args.device, n_ctx=n_ctx, parallel=max([1, *users]), mtp=False) as llm:
        print(f"{llm.model.ops.label}: {args.model.name}", flush=True)
        llm.compile()
        if users:
            costs(llm, users, args.n, args.repetitions)
        if args.replayed:
            for options in ({}, {"temperature": 0.0}):
                replays(llm, args.replayed, args.repetitions, options)


if __name__ == "__main__":
    main()
