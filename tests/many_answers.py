"""As many answers in each pass as a backend takes, which must have the bits of each answer alone.

``python -m tests.many_answers NAME:QUANT ... --device cuda`` compares random models on a GPU, which CI cannot.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import engine
from engine.decode.running_batch import RunningBatch
from engine.synthetic.model import make_model

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "repeat_penalty": 1.2},
    {"temperature": 0.9, "top_k": 20, "grammar": engine.Grammar.regex("[a-f]{2,60}")},
]
"""Greedy answers, drawn ones with edited logits, and ones with masks."""


@contextmanager
def counted() -> Iterator[Counter[int]]:
    """The number of batches by the number of their answers."""
    found, propose = Counter[int](), RunningBatch.propose

    def noted(self: RunningBatch, *given: Any) -> Any:
        batch = propose(self, *given)
        found[len(batch)] += bool(batch)
        return batch

    with patch.object(RunningBatch, "propose", noted):
        yield found


def differing_answers(llm: engine.LLM, count: int, n_tokens: int, options: dict[str, Any]) -> tuple[int, Counter[int]]:
    """How many of ``count`` answers together differ from each alone, and how many answers the batches had."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, llm.config.n_vocab - 3, int(n)).tolist() for n in rng.integers(2, 90, count)]
    given = {"max_tokens": n_tokens, "seed": 7, "ignore_eos": "grammar" not in options, **options}
    llm.reset()
    alone = [llm.complete(prompt, **given).ids for prompt in prompts]
    llm.reset()
    with counted() as batches:
        together = [answer.ids for answer in llm.complete(prompts, **given)]
    llm.check_pages()
    return sum(a != b for a, b in zip(alone, together, strict=True)), batches


def differing_bits(llm: engine.LLM, count: int, n_tokens: int) -> tuple[int, int]:
    """How many bits of logits of passes of ``count`` sequences differ from those of passes of each alone, and of how many
    logits."""
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, llm.config.n_vocab - 3, n_tokens + int(n)).tolist() for n in rng.integers(2, 90, count)]
    differing, total, found = 0, 0, []
    for width in (1, count):
        llm.reset()
        sequences = llm.model.sequences[:count]
        for sequence, text in zip(sequences, texts, strict=True):
            llm.hold(sequence.slot, text[:-n_tokens])
        logits = []
        for i in range(n_tokens):
            parts = [(sequence, [text[i - n_tokens]]) for sequence, text in zip(sequences, texts, strict=True)]
            rows = [row for at in range(0, count, width) for row in llm.model.step(parts[at : at + width])]
            for sequence, tokens in parts:
                sequence.commit(tokens)
                sequence.settle()
            logits += [row.view(np.uint32) for row in rows]
        found.append(np.concatenate(logits))
    llm.reset()
    differing += int(np.bitwise_count(found[0] ^ found[1]).sum())
    total += found[0].size
    return differing, total


def main() -> None:
    """Compare answers together with each alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", help="NAME:QUANT of a random model")
    parser.add_argument("-np", type=int, default=128)
    parser.add_argument("-n", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache-type", default="f16")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            shape, _, quant = name.partition(":")
            path, started = make_model(Path(folder) / f"{shape}.gguf", shape, quant), time.perf_counter()
            given: dict[str, Any] = {"n_ctx": 256, "parallel": args.np, "cache_type": args.cache_type}
            with engine.load(path, device=args.device, **given) as llm:
                differing, total = differing_bits(llm, args.np, 3)
                lines = [f"{differing} bits of {total} logits"]
                for options in OPTIONS:
                    wrong, batches = differing_answers(llm, args.np, args.n, options)
                    widths = ", ".join(f"{n} of {width}" for width, n in sorted(batches.items())[-3:])
                    lines.append(f"{wrong} of {args.np} answers (batches: {sum(batches.values())}; {widths})")
            print(f"{name} differs in {'; '.join(lines)}; {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
