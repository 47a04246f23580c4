"""How much a long prompt delays the answers beside it, and how much these slow it down.

``python -m benchmarks.prompt_beside_answers MODEL.gguf`` lets 16 answers run, lets a prompt of 4000 tokens arrive, and
compares with the answers alone and with the prompt alone.  The answers are the likeliest tokens of random prompts.
"""

import argparse
import time
from pathlib import Path

import numpy as np

import engine
from engine.decode.request import Request
from engine.sampling.sampler import Sampler, SamplerParams


def main() -> None:
    """Print one line per repetition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-np", "--users", type=int, default=16, help="the number of answers that run")
    parser.add_argument("-p", "--prompt", type=int, default=4000, help="the number of tokens of the prompt")
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    llm = engine.load(args.model, n_ctx=args.prompt + 1024, parallel=args.users + 1, device=args.device)
    n_vocab, rng = llm.config.n_vocab, np.random.default_rng(0)

    def submit(n_prompt: int, count: int) -> Request:
        ids = rng.integers(0, n_vocab, n_prompt).tolist()
        request = Request(ids, Sampler(SamplerParams(temperature=0.0, seed=0), n_vocab), count)
        llm.core.submit(request)
        return request

    print(f"{llm.model.ops.label}: {args.users} answers, a prompt of {args.prompt} tokens")
    print(
        "| prompt alone, s | beside, s | speed | next token, ms (99 %) | beside the prompt, ms (99 %) | ratio (99 %) |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for _ in range(args.repetitions):
        llm.reset()
        begun = time.perf_counter()
        submit(args.prompt, 1)
        while llm.core.step():
            pass
        alone = time.perf_counter() - begun
        answers = [submit(64, 800) for _ in range(args.users)]
        while not all(request.items for request in answers):
            llm.core.step()
        usual = intervals(llm, answers, answers[0], 200)
        begun = time.perf_counter()
        prompt = submit(args.prompt, 1)
        delayed = intervals(llm, answers, prompt, 1)
        beside = time.perf_counter() - begun
        for request in answers:
            llm.core.close(request)
        (m, m99), (d, d99) = ((np.median(times), np.percentile(times, 99)) for times in (usual, delayed))
        print(
            f"| {alone:.3f} | {beside:.3f} | {alone / beside:.0%} | {1e3 * m:.2f} ({1e3 * m99:.2f}) "
            f"| {1e3 * d:.2f} ({1e3 * d99:.2f}) | {d / m:.2f} ({d99 / m:.2f}) |",
            flush=True,
        )


def intervals(llm: engine.LLM, answers: list[Request], awaited: Request, count: int) -> np.ndarray:
    """Seconds from one token to the next of each answer, until another request has ``count`` tokens."""
    counts = [len(request.items) for request in answers]
    latest, found = [time.perf_counter()] * len(answers), []
    while len(awaited.items) < count:
        llm.core.step()
        now = time.perf_counter()
        for i, request in enumerate(answers):
            if len(request.items) > counts[i]:
                found.append(now - latest[i])
                counts[i], latest[i] = len(request.items), now
    return np.array(found)


if __name__ == "__main__":
    main()
