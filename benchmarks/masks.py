"""What grammars cost: tokens per second of some users without grammars and with them.

    python -m benchmarks.masks [MODEL | --shape NAME:QUANT] [-np 1,32] [-p 128] [-n 128] [-r 3] [--device cuda]

For each number of users it measures answers without a grammar, with one that permits every text, with one that permits every
JSON value of a kind and with a strict schema, and, of several users, with that schema for one of them only.  They take turns,
``-r`` times; the table has the median of each, its share of the rate without grammars, the time from one token to the next,
and the time that the host takes for a mask of such an answer by itself.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import engine
from engine.bench import random_model
from engine.cli import users
from engine.grammar.grammar import Grammar
from engine.grammar.matcher import Matcher
from engine.hub.resolve import resolve

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue", None]}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}

ANYTHING = Grammar.regex(r"(.|\n)*")
JSON = Grammar.json_schema({"type": "array", "items": {}, "minItems": 500})
RECORDS = Grammar.json_schema({"type": "array", "items": RECORD, "minItems": 500})


def cases(n_users: int) -> dict[str, list[Grammar | None]]:
    """The grammars of the users, by the name of the case."""
    found: dict[str, list[Grammar | None]] = {"none": []}
    found |= {"every text": [ANYTHING] * n_users, "every JSON": [JSON] * n_users, "a schema": [RECORDS] * n_users}
    return found | ({"a schema for one": [RECORDS]} if n_users > 1 else {})


def seconds_per_mask(llm: engine.LLM, grammar: Grammar, n: int = 200) -> float:
    """The median time of a mask and the step to it, in seconds, of an answer of random permitted tokens."""
    matcher, rng = Matcher(grammar, llm.tokenizer, 0, ends_late=True), np.random.default_rng(1)
    tokens: list[int] = []
    times = []
    for _ in range(n):
        begun = time.perf_counter()
        mask = matcher.mask(tokens)
        times.append(time.perf_counter() - begun)
        permitted = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: llm.tokenizer.n_vocab])
        tokens.append(int(rng.choice(permitted)))
    return statistics.median(times)


def measure(llm: engine.LLM, n_users: int, args: argparse.Namespace) -> Iterator[str]:
    """The lines of the table for a number of users."""
    given, rates, waits = cases(n_users), dict[str, list[float]](), dict[str, list[float]]()
    for i in range(args.r + 1):
        for name, grammars in given.items():
            found = users.measure(llm, name, n_users, args.p, args.n, grammars=grammars)
            if i:  # the first run compiles and records
                rates.setdefault(name, []).append(found.answer_per_second)
                waits.setdefault(name, []).append(1e3 * found.next_s)
    plain = statistics.median(rates["none"])
    for name, grammars in given.items():
        rate, wait = statistics.median(rates[name]), statistics.median(waits[name])
        mask = f"{1e6 * seconds_per_mask(llm, grammars[0]):.0f}" if grammars and grammars[0] else "-"
        yield f"| {n_users:>5} | {name:<16} | {rate:>9.1f} | {rate / plain:>7.1%} | {wait:>7.2f} | {mask:>7} |"


@contextmanager
def file_of(args: argparse.Namespace) -> Iterator[Path]:
    """The file of the model."""
    if args.shape:
        with random_model(args.shape, args.keep) as (_, path):
            yield path
    else:
        yield resolve(args.model)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="a model; by default the bundled one")
    parser.add_argument("--shape", help="a random model, such as qwen3-8b:Q4_K_M")
    parser.add_argument("--keep", action="store_true", help="keep the file of a random model, and reuse it")
    parser.add_argument("-np", default="1,32", help="numbers of users (1,32)")
    parser.add_argument("-p", type=int, default=128, help="tokens of each prompt (128)")
    parser.add_argument("-n", type=int, default=128, help="tokens of each answer (128)")
    parser.add_argument("-r", type=int, default=3, help="runs of each case (3)")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args(argv)
    counts = [int(count) for count in args.np.split(",")]
    with (
        file_of(args) as path,
        engine.load(path, device=args.device, n_ctx=args.p + args.n, parallel=max(counts), mtp=False) as llm,
    ):
        print(f"{llm.config.name}, {llm.model.ops.label}, prompts of {args.p} tokens, answers of {args.n}")
        print("| users | grammar          |       t/s |   share | next ms | mask µs |")
        print("| ----: | ---------------- | --------: | ------: | ------: | ------: |")
        for count in counts:
            for line in measure(llm, count, args):
                print(line, flush=True)


if __name__ == "__main__":
    main()
