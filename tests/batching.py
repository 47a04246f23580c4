"""Many requests at once, with everything that may happen to them: each must get the answer that it gets alone.

``python -m tests.batching MODEL ...`` compares a GPU with itself and with the CPU, which CI cannot.  With ``-np 128
--answer 150``, as many threads ask for the answers at once.
"""

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.synthetic.model import make_model
from tests.many_answers import counted


@dataclass
class Ask:
    """One request: what is asked, and after how many pieces its reader goes away (None: never)."""

    ids: list[int]
    options: dict[str, Any]
    pieces: int | None = None


@dataclass
class Answer:
    """What an answer consists of."""

    ids: list[int]
    text: str
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def asks(
    llm: engine.LLM,
    count: int,
    seed: int,
    longest: int,
    drafts: bool = True,
    grammars: bool = False,
    answer: int = 23,
) -> list[Ask]:
    """Random requests, many of which begin alike, with prompts of up to ``longest`` tokens and one of three salts; grammars:
    half of them have a grammar; answer: the most tokens of an answer."""
    rng, salts = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    n_vocab = llm.config.n_vocab
    texts = [rng.integers(0, n_vocab, longest).tolist() for _ in range(3)]
    regex, schema = engine.Grammar.regex, engine.Grammar.json_schema
    given = [schema(PERSON), regex(r"(.|\n)*"), regex("[a-f]{2,30}")] if grammars else []
    found = []
    for _ in range(count):
        ids = texts[int(rng.integers(3))][: int(rng.integers(1, longest + 1))]
        if rng.random() < 0.3:
            ids = [*ids, *rng.integers(0, n_vocab, int(rng.integers(1, 9))).tolist()][-longest:]
        options: dict[str, Any] = {
            "max_tokens": int(rng.integers(1, answer + 1)),
            "seed": int(rng.integers(1 << 30)),
            "temperature": float(rng.choice([0.0, 0.8, 1.3])),
            "top_k": int(rng.choice([0, 8, 40])),
            "repeat_penalty": float(rng.choice([1.0, 1.2])),
            "logprobs": int(rng.choice([0, 0, 2])),
            "ignore_eos": bool(rng.random() < 0.5),
            "cache_salt": str(salts.choice(["", "", "a", "b"])),
        }
        if rng.random() < 0.2:
            options["logit_bias"] = {int(rng.integers(n_vocab)): 3.0}
        if drafts and rng.random() < 0.6:
            accept = str(rng.choice(["exact", "exact", "ratio", "p-min"])) if llm.draft is not None else "exact"
            own = rng.random() < 0.7
            options["speculation"] = engine.SpeculationParams(
                enabled=True, lookup=bool(rng.random() < 0.5), draft_max=int(rng.integers(1, 5)), accept=accept
            )
            if not own and llm.draft is None:
                options["speculation"] = engine.SpeculationParams(enabled=False)
        else:
            options["speculation"] = engine.SpeculationParams(enabled=False)
        if given and rng.random() < 0.5:
            options["grammar"] = given[int(rng.integers(len(given)))]
        found.append(Ask(ids, options, int(rng.integers(1, 9)) if rng.random() < 0.2 else None))
    return found


def answer_of(generation: engine.Generation) -> Answer:
    """The answer so far."""
    ids, logprobs = list(generation.ids), list(generation.logprobs)
    return Answer(ids, generation.text, logprobs, generation.finish_reason)


def alone(llm: engine.LLM, ask: Ask) -> Answer:
    """The answer of a request that has the model for itself, from the beginning."""
    llm.reset()
    return read(llm, ask)


def at_once(llm: engine.LLM, wanted: list[Ask], threads: int) -> list[Answer]:
    """The answers of requests that so many threads read at the same time."""
    llm.reset()
    with ThreadPoolExecutor(threads) as pool:
        answers = list(pool.map(partial(read, llm), wanted))
    llm.check_pages()
    return answers


def read(llm: engine.LLM, ask: Ask) -> Answer:
    """The answer of a request, as far as its reader wants it."""
    generation = llm.generate(ask.ids, **ask.options)
    for n, _ in enumerate(generation, 1):
        if n == ask.pieces:
            break
    generation.close()
    return answer_of(generation)


def together(llm: engine.LLM, wanted: list[Ask], seed: int, reuse: bool = True, hold: int = 0) -> list[Answer]:
    """The answers of requests that arrive at random times, and whose readers take turns at random.

    reuse: whether pages and states of others may be taken over; hold: pages of each pool that cannot be used, so that they
    run short.
    """
    rng = np.random.default_rng(seed)
    llm.reset()
    held = {}
    for paging, pool in llm.cache.pools.items():
        # A single answer must still fit.
        spare = 0 if paging.window else pool.n_free - paging.chunks(llm.n_ctx)
        held[pool] = [pool.take() for _ in range(max(0, min(hold, spare)))]
    waiting, running = list(range(len(wanted))), dict[int, tuple[engine.Generation, int]]()
    answers: dict[int, Answer] = {}
    while waiting or running:
        if waiting and (not running or rng.random() < 0.3):
            i = waiting.pop(0)
            running[i] = llm.generate(wanted[i].ids, **wanted[i].options), 0
        if not reuse:
            for pool in llm.cache.pools.values():
                pool.clear()
            llm.states.clear()
        if rng.random() < 0.01:
            llm.logits(wanted[int(rng.integers(len(wanted)))].ids[:5])  # takes a slot away
        i = int(rng.choice(list(running)))
        generation, n = running[i]
        piece = next(generation, None)
        running[i] = generation, n + 1
        if piece is None or n + 1 == wanted[i].pieces:
            generation.close()
            answers[i] = answer_of(generation)
            del running[i]
    for pool, pages in held.items():
        for page in pages:
            pool.give_back(page)
    llm.check_pages()
    return [answers[i] for i in range(len(wanted))]


def differing(expected: list[Answer], found: list[Answer]) -> list[int]:
    """The numbers of requests whose answers differ."""
    return [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]


def main() -> None:
    """Compare answers alone and together on a GPU, and alone on the CPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", help="NAME, or NAME:QUANT of a random model, perhaps with +DRAFT")
    parser.add_argument("-n", type=int, default=200)
    parser.add_argument("-np", type=int, default=8)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cpu", type=int, default=40, help="requests that are also computed on the CPU")
    parser.add_argument("--answer", type=int, default=23, help="the most tokens of an answer (23)")
    parser.add_argument("--grammars", action="store_true", help="half of the requests have a grammar")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:

        def file(name: str) -> str:
            shape, _, quant = name.partition(":")
            return str(make_model(Path(folder) / f"{shape}.gguf", shape, quant)) if quant else name

        for name in args.models:
            target, _, draft = name.partition("+")
            given: dict[str, Any] = {"n_ctx": 512, "cache_type": os.environ.get("CACHE_TYPE", "f16")}
            given["draft_model"] = file(draft) if draft else None
            path, started = file(target), time.perf_counter()
            load = partial(engine.load, path, **given)
            with load(device=args.device) as one:
                wanted = asks(one, args.n, 1, 200, grammars=args.grammars, answer=args.answer)
                expected = [alone(one, ask) for ask in wanted]
            with load(device="cpu") as cpu:
                on_cpu = [alone(cpu, ask) for ask in wanted[: args.cpu]]
            lines = [f"CPU {len(differing(expected[: args.cpu], on_cpu))} of {args.cpu}"]
            with load(device=args.device, parallel=args.np) as many:
                for reuse, hold in ((True, 0), (False, 0), (True, 30)):
                    wrong = differing(expected, together(many, wanted, 2, reuse, hold))
                    lines.append(f"together (reuse {reuse}, {hold} pages held) {len(wrong)} of {args.n} {wrong[:5]}")
                with counted() as batches:
                    wrong = differing(expected, at_once(many, wanted, args.np))
                lines.append(f"at once (up to {max(batches)} in a batch) {len(wrong)} of {args.n} {wrong[:5]}")
            print(f"{name}: differing answers: {'; '.join(lines)}; {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
