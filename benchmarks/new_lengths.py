"""The rates of prompts of new lengths: the first time that a length comes, the second time, and later.

    python -m benchmarks.new_lengths MODEL.gguf [--lengths 200,256,300,511,700] [--device cuda]

A rate is the median over some lengths just below the given one.  Prompts of two lengths below these are read before, so that
the kernels are loaded.  Each length must always give the same logits, also if the prompt is read in two parts.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import numpy as np

import engine

TIMES = 4
"""How often a prompt of each length is read."""

NEW, OTHER = 4, 2
"""The numbers of lengths that are measured, and that are read before."""


def read(llm: engine.LLM, ids: list[int], first: int = 0) -> tuple[float, bytes]:
    """The seconds that a prompt takes after a reset, and its logits; first: tokens that are read in a part of their own."""
    llm.reset()
    begun = time.perf_counter()
    if first:
        llm.prefill(ids[:first])
    logits = llm.prefill(ids)[0]
    return time.perf_counter() - begun, np.asarray(logits).tobytes()


def rates(llm: engine.LLM, length: int) -> list[float]:
    """Tokens per second each time that a length comes, first time first.  Raises SystemExit if bits differ."""
    ids = np.random.default_rng(0).integers(0, llm.config.n_vocab, length).tolist()
    for n in range(length - NEW - OTHER + 1, length - NEW + 1):
        read(llm, ids[:n])
    seconds = []
    for n in range(length - NEW + 1, length + 1):
        taken = [read(llm, ids[:n]) for _ in range(TIMES)]
        if len({logits for _, logits in [*taken, read(llm, ids[:n], n // 2)]}) > 1:
            raise SystemExit(f"prompts of {n} tokens give different bits")
        seconds.append([time for time, _ in taken])
    return [length / statistics.median(times) for times in zip(*seconds, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--lengths", default="200,256,300,511,700")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(arguments)
    lengths = [int(length) for length in args.lengths.split(",")]
    llm = engine.load(args.model, device=args.device, n_ctx=2 * max(lengths))
    llm.compile()
    print(
        "| tokens | the first time | the second time | the third time | later |\n| ---: | ---: | ---: | ---: | ---: |"
    )
    for length in lengths:
        print(f"| {length} | {' | '.join(f'{rate:.0f}' for rate in rates(llm, length))} |", flush=True)


if __name__ == "__main__":
    main()
