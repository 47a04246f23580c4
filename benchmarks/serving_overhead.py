"""What the server adds to the computation: tokens per second and time to the first token, with and without it.

``python -m benchmarks.serving_overhead MODEL.gguf -np 1,16,64`` measures users without a server, as ``bitmirror bench -np``
does and with all requests at once, then starts a server with the same model and lets as many clients ask at the same time,
each with a connection of its own and a stream.  Rates count all tokens of prompts and answers over the whole time; each is
the median of ``-r`` repetitions, after two that compile and record what is missing.
"""

import argparse
import asyncio
import json
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

import engine
from engine.cli.users import measure
from engine.decode.request import Request
from engine.sampling.sampler import Sampler, SamplerParams

WARM_UP = 2
"""Repetitions that are not counted: kernels may be missing, and passes are recorded when they are started again."""

FIRSTS = 20
"""Requests whose median time to the first token is reported."""


def main() -> None:
    """Print one line per number of users, and the time to the first token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-np", "--users", default="1,16,64", help="numbers of users")
    parser.add_argument("-p", "--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("-n", "--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("-r", "--repetitions", type=int, default=3, help="repetitions of each case (3)")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    users, n_ctx = [int(n) for n in args.users.split(",")], args.prompt + args.answer
    # A process of its own, so that the memory is free when the server starts.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        label, inside, first = pool.apply(without, (args, users))
    flags = ["-m", str(args.model), "-np", str(max(users)), "-c", str(n_ctx), "--device", args.device, "--port", "0"]
    server = subprocess.Popen([sys.executable, "-m", "engine.serve", *flags], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        found = None
        while found is None:
            found = re.search(r"http://[\d.]+:(\d+)", server.stderr.readline())
        # Its log must be read, or it waits.
        threading.Thread(target=server.stderr.read, daemon=True).start()
        print(f"{label}: prompts of {args.prompt} tokens, answers of {args.answer}")
        print("| users | bench, tokens/s | all at once | with the server | of bench | of all at once |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: |")
        port = int(found[1])
        for n, (bench, rate) in zip(users, inside, strict=True):
            times = [asyncio.run(ask(port, n, args.prompt, args.answer))[0] for _ in range(WARM_UP + args.repetitions)]
            served = n * (args.prompt + args.answer) / float(np.median(times[WARM_UP:]))
            ratios = f"{served / bench:.1%} | {served / rate:.1%}"
            print(f"| {n} | {bench:.0f} | {rate:.0f} | {served:.0f} | {ratios} |", flush=True)
        firsts = [asyncio.run(ask(port, 1, args.prompt, 1))[1][0] for _ in range(FIRSTS)]
        print(f"\nfirst token: {1e3 * first:.2f} ms without, {1e3 * float(np.median(firsts)):.2f} ms with the server")
    finally:
        server.terminate()
        server.wait()


def without(args: argparse.Namespace, users: list[int]) -> tuple[str, list[tuple[float, float]], float]:
    """The device; tokens per second for each number of users, as the bench measures them and if all ask at once for prompt
    and answer; and the median time to a first token in seconds."""
    n_prompt, n_gen = args.prompt, args.answer
    llm = engine.load(args.model, n_ctx=n_prompt + n_gen, parallel=max(users), device=args.device)
    rates = []
    for n in users:
        apart, together = [], []
        for _ in range(WARM_UP + args.repetitions):
            apart.append(measure(llm, "", n, n_prompt, n_gen).per_second)
            together.append(n * (n_prompt + n_gen) / at_once(llm, n, n_prompt, n_gen))
        rates.append((float(np.median(apart[WARM_UP:])), float(np.median(together[WARM_UP:]))))
    firsts = [measure(llm, "", 1, n_prompt, 2).first_s for _ in range(FIRSTS)]
    return llm.model.ops.label, rates, float(np.median(firsts))


def at_once(llm: engine.LLM, n: int, n_prompt: int, n_gen: int) -> float:
    """Seconds until ``n`` requests that are submitted at once have their answers."""
    rng, n_vocab = np.random.default_rng(), llm.config.n_vocab
    llm.reset()
    begun = time.perf_counter()
    for _ in range(n):
        greedy = Sampler(SamplerParams(temperature=0.0, seed=0), n_vocab)
        llm.core.submit(Request(rng.integers(1000, 4000, n_prompt).tolist(), greedy, n_gen))
    while llm.core.step():
        pass
    return time.perf_counter() - begun


async def ask(port: int, n: int, n_prompt: int, n_gen: int) -> tuple[float, list[float]]:
    """Let ``n`` clients ask at once.  Returns the seconds until the last of them has its answer, and those until each has
    its first token."""
    rng = np.random.default_rng()
    bodies = [
        json.dumps(
            {
                "prompt": rng.integers(1000, 4000, n_prompt).tolist(),
                "max_tokens": n_gen,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        for _ in range(n)
    ]
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in bodies]
    begun = time.perf_counter()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> float:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"the server answered {status!r}: {await reader.read()!r}")
        await reader.readuntil(b"data: ")
        first = time.perf_counter() - begun
        end = b""
        while piece := await reader.read(1 << 16):
            end = (end + piece)[-64:]
        if b"[DONE]" not in end:
            raise SystemExit("an answer of the server has no end")
        writer.close()
        return first

    firsts = await asyncio.gather(*(client(*pair, body) for pair, body in zip(connections, bodies, strict=True)))
    return time.perf_counter() - begun, list(firsts)


if __name__ == "__main__":
    main()
