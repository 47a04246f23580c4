"""A server under load: many clients of which some leave, some read slowly and some send what is no request.

    python -m benchmarks.serving_load [--requests 2000] [--connections 256] [--rounds 2] [-- FLAGS OF bitmirror serve]

A server with a bundled model runs in a process of its own, the clients in another one at low priority, and a third one asks
for ``/health`` every 20 ms, over a connection of its own, and measures the time to the first byte of the answer.  The report
says which statuses there were, how long ``/health`` took, and how the memory of the server and the pages of its cache grew
from round to round.  Exit status 1: a page was lost, an answer had a status that the server must not give, or a stream that
nobody left did not end.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

FLAGS = ("-m", "pycoder", "--device", "cpu", "-c", "512", "--chat-template", "chatml")

EXPECTED = (200, 400, 408, 413, 415, 503)
"""The statuses that a server may give under this load."""

PROBE_SECONDS = 0.02
TIDY_SECONDS = 13
"""The time in which a server that has nothing to do gives memory back."""

SLOW_SECONDS = 0.02
"""The time that a slow reader waits before each kilobyte."""

JSON = "application/json"

TEXTS = ("def add(a, b):", "class Stack:", "import os\n", "for i in range(10):", "x = [1, 2,", "# naïve → 😀\n")

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

LONG = json.dumps({"prompt": "word " * 1_600_000}).encode()
"""The body of a request with a prompt that no context has room for."""


@dataclass(frozen=True)
class Sent:
    """A request: path, body, its type, and whether more is announced than is sent."""

    path: str
    body: bytes
    kind: str = JSON
    short: bool = False

    def data(self) -> bytes:
        """The bytes of the request."""
        length = len(self.body) + 100 * self.short
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {self.kind}\r\n"
        return f"{head}Content-Length: {length}\r\n\r\n".encode() + self.body


def valid(rng: random.Random) -> Sent:
    """A request that is answered."""
    text = rng.choice(TEXTS) * rng.randint(1, 20)
    n = rng.choice((1, 4, 16, 48))
    body: dict[str, Any] = {"max_tokens": n, "seed": rng.randrange(1 << 30), "stream": rng.random() < 0.6}
    kind = rng.randrange(8)
    if kind == 0:
        body |= {"prompt": text, "echo": True, "logprobs": 2}
        return Sent("/v1/completions", json.dumps(body).encode())
    if kind == 1:
        return Sent("/completion", json.dumps(body | {"prompt": text, "n_predict": n}).encode())
    body["messages"] = [{"role": "user", "content": text}]
    if kind == 2:
        return Sent("/v1/messages", json.dumps(body).encode())
    if kind == 3:
        body |= {"n": rng.randint(2, 4), "logprobs": True, "top_logprobs": 3}
    if kind == 4 and rng.random() < 0.2:
        body |= {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
    return Sent("/v1/chat/completions", json.dumps(body).encode())


def malformed(rng: random.Random) -> Sent:
    """A request that is refused."""
    path = rng.choice(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/completion", "/tokenize"))
    if rng.random() < 0.02:
        # Nearly as large as a body may be.
        return rng.choice(
            (Sent("/v1/completions", LONG), Sent("/tokenize", LONG), Sent(path, b"[" + b"[]," * 2_600_000 + b"[]]"))
        )
    return rng.choice(
        (
            Sent(path, b"{"),
            Sent(path, b"\xff\xfe{}"),
            Sent(path, b"[" * 50_000),
            Sent(path, b'{"a": ' * 100 + b"1" + b"}" * 100),
            Sent(path, b'{"temperature": NaN}'),
            Sent(path, b'{"messages": 3, "prompt": {}, "content": []}'),
            Sent(path, b'{"prompt": "a", "content": "a", "n": 100000}', "text/plain"),
            Sent(path, b'{"prompt": "' + b"word " * 40_000),
            Sent(path, b'{"prompt": "a"', JSON, short=True),
        )
    )


@dataclass
class Tally:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0
    broken: list[str] = field(default_factory=list)


async def client(address: tuple[str, int], work: list[int], seed: int, tally: Tally) -> None:
    """Send requests, one after another over the same connection as long as it lasts, until ``work`` is empty."""
    rng, reader, writer = random.Random(seed), None, None
    while work:
        work.pop()
        behaviour = rng.random()
        sent = malformed(rng) if behaviour < 0.1 else valid(rng)
        if writer is None:
            reader, writer = await asyncio.open_connection(*address, limit=1024)
        assert reader is not None and writer is not None
        try:
            writer.write(sent.data())
            await writer.drain()
            if sent.short or behaviour > 0.8:
                # Leave before the answer, or in the middle of it.
                await asyncio.sleep(rng.choice((0.0, 0.05, 0.5, 2.0)))
                if rng.random() < 0.5 and not sent.short:
                    await reader.read(200)
                tally.left += 1
                writer.close()
                writer = None
                continue
            whole = await answer(reader, tally, slow=behaviour < 0.2)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            tally.broken.append(f"{sent.path} {sent.body[:60]!r}: {error!r}")
            whole = False
        if not whole and writer is not None:
            writer.close()
            writer = None
    if writer is not None:
        writer.close()


async def answer(reader: asyncio.StreamReader, tally: Tally, slow: bool) -> bool:
    """Read an answer; returns whether the connection can be used again."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    tally.statuses[int(head.split()[1])] += 1
    if length := re.search(r"content-length: (\d+)", head):
        await reader.readexactly(int(length[1]))
    else:
        while size := int((await reader.readuntil(b"\r\n")).strip() or b"0", 16):
            if slow:
                await asyncio.sleep(SLOW_SECONDS * -(-size // 1024))
            await reader.readexactly(size + 2)
        await reader.readuntil(b"\r\n")
    return "connection: close" not in head


def clients(address: tuple[str, int], n_requests: int, n_connections: int, seed: int, results: Connection) -> None:
    """The process of the clients."""
    os.nice(10)

    async def run() -> Tally:
        tally, work = Tally(), list(range(n_requests))
        await asyncio.gather(*(client(address, work, seed * 10_000 + i, tally) for i in range(n_connections)))
        return tally

    results.send(asyncio.run(run()))


def probe(address: tuple[str, int], path: str, stop: Any, results: Connection) -> None:
    """The process that asks for ``/health``: sends the seconds of each answer."""
    seconds, due = [], time.perf_counter()
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not stop.is_set():
            begun = time.perf_counter()
            connection.sendall(request)
            got = connection.recv(1 << 16)
            seconds.append(time.perf_counter() - begun)
            assert got.startswith(b"HTTP/1.1 200"), got
            while not got.endswith(b"}"):
                got += connection.recv(1 << 16)
            due += PROBE_SECONDS
            time.sleep(max(0.0, due - time.perf_counter()))
            due = max(due, time.perf_counter())
    results.send(seconds)


def counts(url: str) -> Mapping[str, float]:
    """The counts of ``/metrics`` without labels."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    return {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if not line.startswith("#")}


def settled(url: str) -> Mapping[str, float]:
    """The counts when nothing is computed any more."""
    deadline = time.monotonic() + 60
    while True:
        found = counts(url)
        if not found["vllm:num_requests_running"] and not found["vllm:num_requests_waiting"]:
            return found
        if time.monotonic() > deadline:
            raise SystemExit("answers are still computed a minute after the last client left")
        time.sleep(0.1)


def started(flags: Sequence[str], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server that answers, and its address."""
    with log.open("wb") as stderr:
        words = [sys.executable, "-m", "engine.serve", "--port", "0", *FLAGS, *flags]
        process = subprocess.Popen(words, stderr=stderr)
    while process.poll() is None:
        if found := re.search(r"listening on (http://127\.0\.0\.1:\d+)", log.read_text()):
            urllib.request.urlopen(f"{found[1]}/v1/models").close()
            return process, found[1]
        time.sleep(0.05)
    raise SystemExit(log.read_text())


def loaded(url: str, args: argparse.Namespace, seed: int) -> tuple[Tally, list[float]]:
    """One round of load: what the clients saw, and the seconds that ``/health`` took meanwhile."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    address, context = (host, int(port)), multiprocessing.get_context("spawn")
    stop = context.Event()
    probed, send_probed = context.Pipe(False)
    tallied, send_tally = context.Pipe(False)
    watcher = context.Process(target=probe, args=(address, args.path, stop, send_probed))
    load = context.Process(target=clients, args=(address, args.requests, args.connections, seed, send_tally))
    watcher.start()
    load.start()
    # What a process that has failed does not send is not waited for.
    send_probed.close()
    send_tally.close()
    tally = tallied.recv()
    load.join()
    stop.set()
    seconds = probed.recv()
    watcher.join()
    return tally, seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.serving_load", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="requests of a round")
    parser.add_argument("--connections", type=int, default=256, help="connections at the same time")
    parser.add_argument("--rounds", type=int, default=2, help="rounds, between which nothing is asked")
    parser.add_argument("--path", default="/health", help="what is asked for every 20 ms")
    parser.add_argument("flags", nargs="*", help="flags of bitmirror serve, after --")
    args = parser.parse_args(argv)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process, url = started(args.flags, log)
        memory = psutil.Process(process.pid)
        print(f"idle: {memory.memory_info().rss / 1e6:.0f} MB")
        for i in range(args.rounds):
            begun = time.monotonic()
            tally, seconds = loaded(url, args, i)
            found = settled(url)
            took = time.monotonic() - begun
            time.sleep(TIDY_SECONDS)
            shown = " ".join(f"{status}:{n}" for status, n in sorted(tally.statuses.items()))
            print(f"round {i + 1}: {took:.1f} s, statuses {shown}, {tally.left} clients left")
            cuts = statistics.quantiles(seconds, n=100)
            print(
                f"  {args.path}: {len(seconds)} answers, p50 {1e3 * cuts[49]:.1f} ms, p99 {1e3 * cuts[98]:.1f} ms, "
                f"most {1e3 * max(seconds):.1f} ms"
            )
            share = found["vllm:kv_cache_usage_perc"]
            print(f"  server: {memory.memory_info().rss / 1e6:.0f} MB, pages in use {100 * share:.1f} %")
            problems += [f"{n} answers with status {s}" for s, n in tally.statuses.items() if s not in EXPECTED]
            problems += tally.broken[:5]
        process.terminate()
        process.wait()
        problems += [line for line in log.read_text().splitlines() if " ERROR " in line]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
