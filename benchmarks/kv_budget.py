"""What a budget of positions costs and gains (``engine/cache/thinning.py``).

    python -m benchmarks.kv_budget speed MODEL.gguf --depth 32768 --budget 4096 [-n 128] [-r 3] [--cache-type f16]
    python -m benchmarks.kv_budget quality MODEL --depth 8192 --budget 1024 2048 [-n 128]

``speed``: tokens per second of answers after a prompt of random tokens, without and with a budget, one after the other.

``quality``: the prompt is English text of Python's own help (``pydoc_data.topics``).  The divergence of the next tokens,
those of the text itself, is KL(all positions || budget) in nats, and top-1 is the share of places with the same most likely
token.  A needle is a sentence with a number of six digits somewhere in the text, whose beginning ends the prompt; it is found
if the six digits follow, at temperature 0.
"""

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

import engine
from engine.decode.request import Request
from engine.sampling.sampler import Sampler, SamplerParams

NEEDLE = "The secret number of the town of {town} is"
TOWNS = ("Lisbon", "Oslo", "Kyoto", "Quito", "Dakar", "Riga", "Perth", "Turin", "Delhi", "Cork")


def speed(args: argparse.Namespace) -> None:
    """Prints the rates of answers."""
    rng = np.random.default_rng(0)
    for budget in (0, *args.budget):
        with engine.load(
            args.model,
            device=args.device,
            n_ctx=args.depth + args.n,
            kv_budget=budget,
            cache_type=args.cache_type,
            parallel=1,
        ) as llm:
            ids = rng.integers(0, llm.config.n_vocab, args.depth - 1).tolist()
            rates, prompts = [], []
            for _ in range(args.r):
                llm.reset()
                answer = llm.complete(ids, max_tokens=args.n, temperature=0, ignore_eos=True)
                rates.append(answer.timings.predicted_per_second)
                prompts.append(answer.timings.prompt_s)
            span = f"({min(rates):.1f} to {max(rates):.1f})"
            print(
                f"budget {budget or 'none':>6}: {statistics.median(rates):8.1f} tokens/s {span}, "
                f"prompt {statistics.median(prompts):.2f} s, {answer.timings.dropped_n} positions dropped",
                flush=True,
            )


def english() -> str:
    """The texts of Python's own help, one after another."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def logits_along(llm: engine.LLM, ids: Sequence[int], following: Sequence[int]) -> np.ndarray:
    """The logits from which an answer that consists of the tokens ``following`` is chosen, float32 [n, n_vocab]."""
    turn = iter(following)

    def force(history: Sequence[int], logits: np.ndarray) -> np.ndarray:
        forced = np.full_like(logits, -np.inf)
        forced[next(turn)] = 0.0
        return forced

    sampler = Sampler(SamplerParams(temperature=0.0, logits_processors=[force]), llm.config.n_vocab)
    request = Request(ids, sampler, len(following), with_logits=True)
    rows = []
    for (token, logits), wanted in zip(llm.tokens(request), following, strict=True):
        assert token == wanted
        rows.append(np.array(logits))
    return np.array(rows)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """The logarithm of the softmax of each row, float64."""
    x = x.astype(np.float64)
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))


def quality(args: argparse.Namespace) -> None:
    """Prints divergences and needles."""
    text, whole = english(), None
    for budget in (0, *args.budget):
        with engine.load(
            args.model, device=args.device, n_ctx=args.depth + args.n, kv_budget=budget, cache_type=args.cache_type
        ) as llm:
            ids = llm.tokenize(text)[: args.depth + args.n]
            rows = log_softmax(logits_along(llm, ids[: args.depth], ids[args.depth :]))
            whole = rows if whole is None else whole
            kl = (np.exp(whole) * (whole - rows)).sum(1)
            same = (whole.argmax(1) == rows.argmax(1)).mean()
            loss = -rows[np.arange(args.n), ids[args.depth :]].mean()
            found = sum(needle(llm, ids[: args.depth], i) for i in range(args.needles))
            print(
                f"budget {budget or 'none':>6}: KL {kl.mean():.4f}, top-1 {same:.1%}, loss {loss:.4f}, "
                f"needles {found} of {args.needles}",
                flush=True,
            )


def needle(llm: engine.LLM, ids: Sequence[int], number: int) -> bool:
    """Whether needle ``number`` is found in a text of as many tokens as ``ids``."""
    beginning = NEEDLE.format(town=TOWNS[number % len(TOWNS)])
    digits = str(np.random.default_rng(number).integers(100_000, 1_000_000))
    own, question = llm.tokenize(f"\n\n{beginning} {digits}.\n\n"), llm.tokenize("\n\n" + beginning)
    hay = list(ids[: len(ids) - len(own) - len(question)])
    at = len(hay) * (2 * number + 1) // (2 * len(TOWNS))
    answer = llm.complete([*hay[:at], *own, *hay[at:], *question], max_tokens=8, temperature=0, ignore_eos=True)
    return answer.text.strip().startswith(digits)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("speed", "quality"))
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--depth", type=int, default=8192)
    parser.add_argument("--budget", type=int, nargs="+", default=[1024])
    parser.add_argument("--cache-type", default="f16")
    parser.add_argument("--needles", type=int, default=len(TOWNS))
    parser.add_argument("-n", type=int, default=128, help="tokens of an answer (128)")
    parser.add_argument("-r", type=int, default=3, help="answers that are timed (3)")
    args = parser.parse_args()
    run: Any = speed if args.what == "speed" else quality
    run(args)


if __name__ == "__main__":
    main()
