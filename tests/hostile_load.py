"""Honest requests to a server with few descriptors, beside clients that do what they can to keep it from answering.

    python -m tests.hostile_load [--minutes 30] [-m MODEL] [-- FLAGS OF bitmirror serve]

The server has 256 descriptors and four slots.  The hostile clients open streams that they do not read, or read slowly, ask
for long answers that they do not read, send headers and bodies byte by byte, hold idle connections, leave before their
answers, and send what is no request or takes long to read.  A table says how long honest requests took, and how many answers
were before them: those that were computed or waited when they were sent, but not those that wait for their clients to read.

Exit status 1: an honest request was not answered, or took more than twice its time alone and that of those before it, each
of which counts as the longest one; the memory grew; or the log has a traceback or is too long.
"""

import argparse
import asyncio
import faulthandler
import json
import logging
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from engine import serve
from engine.serving import process

DESCRIPTORS = 256
FLAGS = ("-np", "4", "-c", "4096", "--device", "cpu", "--chat-template", "chatml")

FACTOR = 2.0
"""How many times the time alone, and that of the answers before it, an honest request may take."""

GRACE_SECONDS = 0.5
"""The time that a request may take in any case: the clients need the same processors."""

SAMPLE_SECONDS = 2.0
"""The time between two looks at the memory of the server."""

GROWTH, GROWTH_BYTES = 1.1, 32e6
"""How much more memory the server may have in the last quarter of the time than in the second one."""

LINES_PER_SECOND = 5.0
"""Lines of the log that are not about one request."""

HONEST = 3
"""Honest clients, each of which sends one request after another."""

Address = tuple[str, int]


def post(path: str, **fields: Any) -> bytes:
    """A request."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def chat(text: str, n: int, **more: Any) -> bytes:
    """A request for n tokens."""
    messages = [{"role": "user", "content": text}]
    return post("/v1/chat/completions", messages=messages, max_tokens=n, ignore_eos=True, temperature=0, **more)


KINDS: dict[str, Callable[[str], bytes]] = {
    "8 tokens": lambda salt: chat("def add(a, b):", 8, cache_salt=salt),
    "32 tokens": lambda salt: chat("class Stack:", 32, cache_salt=salt),
    "32 tokens as a stream": lambda salt: chat("import os\n", 32, stream=True, cache_salt=salt),
    "a prompt of 800 tokens": lambda salt: chat("for i in range(10):\n    print(i)\n" * 64, 4, cache_salt=salt),
    "/tokenize": lambda salt: post("/tokenize", content="def add(a, b):\n    return a + b\n"),
    "/health": lambda salt: b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
}
"""What honest clients ask for, with a salt that lets none find its prompt in the cache."""

COMPUTED = [name for name in KINDS if not name.startswith("/")]
"""Those whose answers are computed, which wait for others."""


class Took(NamedTuple):
    """An honest request: its kind, how long it took, the answers before it, and its status, 0 if it had none."""

    kind: str
    seconds: float
    before: float
    status: int


async def ask(address: Address, request: bytes) -> int:
    """Send a request and read the answer; returns its status."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request)
        data = await reader.read()
    finally:
        writer.close()
    assert data.endswith((b"0\r\n\r\n", b"}", b"]")), data[-40:]
    return int(data.split()[1])


# --- honest clients ------------------------------------------------------------------------------------------------


def counts(address: Address) -> dict[str, float]:
    """What ``/metrics`` says about the model."""
    with urllib.request.urlopen("http://{}:{}/metrics".format(*address), timeout=60) as response:
        text = response.read().decode()
    return {name: float(value) for name, value in re.findall(r"(?m)^\w+:(\w+)\{model_name=[^,\n]*\} (\S+)$", text)}


def before(address: Address) -> float:
    """The answers that are computed or wait to be computed."""
    found = counts(address)
    waiting = found["num_requests_waiting"] - found["num_requests_paused"]
    return max(0.0, found["num_requests_running"] + waiting)


async def honest(address: Address, seconds: float, seed: int) -> list[Took]:
    """One client: its requests, one after another."""
    rng, found, end = random.Random(seed), list[Took](), time.monotonic() + seconds
    while time.monotonic() < end:
        kind = rng.choice(list(KINDS))
        others, begun, status = 0.0, time.monotonic(), 0
        try:
            others = await asyncio.to_thread(before, address) if kind in COMPUTED else 0.0
            begun = time.monotonic()
            status = await asyncio.wait_for(ask(address, KINDS[kind](str(rng.random()))), 600)
        except (OSError, AssertionError, IndexError, TimeoutError) as error:
            print(f"{kind}: {error!r}", flush=True)
        found.append(Took(kind, time.monotonic() - begun, others, status))
        await asyncio.sleep(rng.random())
    return found


def honest_process(address: Address, seconds: float, results: Connection) -> None:
    """The process of the honest clients."""

    async def run() -> list[Took]:
        return [
            took
            for each in await asyncio.gather(*(honest(address, seconds, i) for i in range(HONEST)))
            for took in each
        ]

    results.send(asyncio.run(run()))


def alone(address: Address) -> dict[str, float]:
    """The seconds that each kind of request takes without others."""
    found = {}
    for kind, request in KINDS.items():
        took = []
        for i in range(8):
            begun = time.monotonic()
            assert asyncio.run(ask(address, request(str(i)))) == 200
            took.append(time.monotonic() - begun)
        found[kind] = statistics.median(took[1:])
    found[UNREAD] = asyncio.run(unread_alone(address))
    return found


async def unread_alone(address: Address) -> float:
    """The seconds for which a stream that nobody reads is computed."""
    begun = time.monotonic()
    _, writer = await connected(address, small=True)
    writer.write(LONG)
    while not counts(address)["num_requests_paused"]:
        await asyncio.sleep(0.02)
        assert time.monotonic() < begun + 60, "a stream that nobody reads is not paused"
    writer.close()
    return time.monotonic() - begun


# --- hostile clients -----------------------------------------------------------------------------------------------

Hostile = Callable[[Address, random.Random], Awaitable[None]]

LONG = chat("def f(x):", 3600, stream=True, logprobs=True, top_logprobs=20)
UNREAD = "a stream that nobody reads"
PIECES = post("/tokenize", content="x = 1\n" * 60_000, with_pieces=True)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def connected(address: Address, small: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection; small: of which the system keeps little that has not been read."""
    connection = socket.socket()
    connection.setblocking(False)
    if small:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.get_running_loop().sock_connect(connection, address)
    return await asyncio.open_connection(sock=connection, limit=1024)


async def unread(address: Address, rng: random.Random, request: bytes = LONG) -> None:
    """Ask for an answer and read nothing."""
    _, writer = await connected(address, small=True)
    writer.write(request)
    await asyncio.sleep(rng.uniform(30, 120))
    writer.close()


async def unread_pieces(address: Address, rng: random.Random) -> None:
    await unread(address, rng, PIECES)


async def slow(address: Address, rng: random.Random) -> None:
    """Read a stream slowly."""
    reader, writer = await connected(address, small=True)
    writer.write(LONG)
    while await reader.read(1024):
        await asyncio.sleep(rng.random())
    writer.close()


async def slow_header(address: Address, rng: random.Random) -> None:
    reader, writer = await connected(address)
    for byte in HEAD:
        writer.write(bytes([byte]))
        await asyncio.sleep(rng.random())
        if reader.at_eof():
            break
    writer.close()


async def slow_body(address: Address, rng: random.Random) -> None:
    reader, writer = await connected(address)
    writer.write(HEAD + b'Content-Length: 100000\r\n\r\n{"a": "')
    while not reader.at_eof():
        writer.write(b"a" * 100)
        await writer.drain()
        await asyncio.sleep(rng.random())
    writer.close()


async def idle(address: Address, rng: random.Random) -> None:
    reader, writer = await connected(address)
    await asyncio.wait_for(reader.read(), 120)
    writer.close()


async def leave(address: Address, rng: random.Random) -> None:
    """Leave before an answer, or in the middle of it."""
    _, writer = await connected(address)
    writer.write(chat("class A:\n" * rng.randint(1, 100), 100, stream=rng.random() < 0.5))
    await asyncio.sleep(rng.random())
    writer.close()
    await asyncio.sleep(2 * rng.random())


async def wrong(address: Address, rng: random.Random) -> None:
    """Send what is no request, or what takes long to read."""
    big = "a" * 200_000
    request = rng.choice(
        (
            b"\x16\x03\x01\x00\xee" * 20 + b"\r\n\r\n",
            HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
            post("/v1/chat/completions", messages=3),
            post("/api/generate", keep_alive="1" * 40_000),
            post("/v1/completions", prompt="1" * 400_000, max_tokens=1),
            post("/v1/completions", prompt="a", stop=[big] * 16),
            post("/tokenize", content=" " * 300_000 + "1"),
            post("/v1/responses", input="a", metadata={f"k{i}": "x" for i in range(20_000)}, max_output_tokens=16),
            post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}] * 4000, max_tokens=1),
        )
    )
    await ask(address, request)
    await asyncio.sleep(4 * rng.random())


CROWD: dict[Hostile, int] = {
    unread: 8,
    slow: 8,
    unread_pieces: 4,
    slow_header: 20,
    slow_body: 20,
    idle: 240,
    leave: 2,
    wrong: 2,
}
"""How many of each kind there are at the same time."""


def hostile_process(address: Address, seconds: float) -> None:
    """The process of the hostile clients."""
    os.nice(10)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it reports connections that the server has closed
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0]),) * 2)

    async def again(one: Hostile, seed: int) -> None:
        rng = random.Random(seed)
        while True:
            try:
                await one(address, rng)
            except (OSError, AssertionError, IndexError, ValueError):
                pass
            await asyncio.sleep(rng.random())

    async def run() -> None:
        tasks = [again(one, i) for one, n in CROWD.items() for i in range(n)]
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(each) for each in tasks], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for each in done:
            each.result()
        os._exit(0)  # without a farewell to hundreds of connections

    asyncio.run(run())


# --- the server ----------------------------------------------------------------------------------------------------


def launch() -> None:
    """The process of the server: the system keeps little for clients that do not read, as behind a slow network."""

    def listening(host: str, port: int) -> socket.socket:
        listener = usual(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
        return listener

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    usual = process.listening
    process.listening = listening  # type: ignore[assignment]
    sys.exit(serve.main(sys.argv[1:]))


def started(model: str, flags: Sequence[str], log: Path) -> tuple[subprocess.Popen[bytes], Address]:
    """A server that answers, and its address."""
    words = [
        sys.executable,
        "-c",
        "from tests.hostile_load import launch; launch()",
        "-m",
        model,
        "--port",
        "0",
        *FLAGS,
        *flags,
    ]
    limited = f'ulimit -n {DESCRIPTORS}; exec "$@"'
    with log.open("wb") as stderr:
        server = subprocess.Popen(["sh", "-c", limited, "sh", *words], stderr=stderr)
    while server.poll() is None:
        if found := re.search(r"listening on http://(127\.0\.0\.1):(\d+)", log.read_text()):
            address = found[1], int(found[2])
            urllib.request.urlopen("http://{}:{}/health".format(*address)).close()
            return server, address
        time.sleep(0.05)
    raise SystemExit(log.read_text())


def loaded(address: Address, server: psutil.Process, seconds: float) -> tuple[list[Took], list[int]]:
    """What became of the honest requests, and the memory of the server meanwhile, in bytes."""
    context = multiprocessing.get_context("spawn")
    took, send = context.Pipe(False)
    crowd = context.Process(target=hostile_process, args=(address, seconds))
    clients = context.Process(target=honest_process, args=(address, seconds, send))
    crowd.start()
    clients.start()
    send.close()
    memory = []
    while not took.poll(SAMPLE_SECONDS):
        memory.append(server.memory_info().rss)
    found = took.recv()
    for each in (clients, crowd):
        each.join()
    return found, memory


def table(times: dict[str, float], took: list[Took]) -> list[str]:
    """The lines of a table: what honest requests took, in seconds."""
    by_kind: dict[str, list[Took]] = defaultdict(list)
    for each in took:
        by_kind[each.kind].append(each)
    lines = [
        "| request | answered | alone | p50 | p99 | most | answers before it | most of the time allowed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for kind, found in sorted(by_kind.items()):
        seconds = sorted(each.seconds for each in found)
        share = max(each.seconds / allowed(times, each) for each in found)
        lines.append(
            f"| {kind} | {sum(each.status == 200 for each in found)} of {len(found)} | {times[kind]:.3f} | "
            f"{statistics.median(seconds):.3f} | {seconds[int(0.99 * len(seconds))]:.3f} | {seconds[-1]:.3f} | "
            f"{statistics.mean(each.before for each in found):.1f} | {share:.0%} |"
        )
    return lines


def allowed(times: dict[str, float], each: Took) -> float:
    """The seconds that a request may take."""
    return GRACE_SECONDS + FACTOR * (times[each.kind] + each.before * max(times.values()))


def quarters(memory: list[int]) -> list[float]:
    """The median of the memory in each quarter of the time, in bytes."""
    n = len(memory) // 4
    return [statistics.median(memory[i * n : (i + 1) * n]) for i in range(4)]


def problems(
    times: dict[str, float], took: list[Took], memory: list[int], lines: list[str], seconds: float
) -> list[str]:
    """What is wrong, in sentences."""
    found = []
    statuses = Counter(each.status for each in took if each.status != 200)
    found += [f"{n} honest requests were answered with {status or 'nothing'}" for status, n in statuses.items()]
    if late := [each for each in took if each.seconds > allowed(times, each)]:
        worst = max(late, key=lambda each: each.seconds / allowed(times, each))
        found.append(f"{len(late)} honest requests of {len(took)} took too long, the worst: {worst}")
    _, second, _, last = quarters(memory)
    if last > GROWTH * second + GROWTH_BYTES:
        found.append(f"the memory grew from {second / 1e6:.0f} to {last / 1e6:.0f} MB")
    other = [line for line in lines if not re.search(r" (GET|POST) \S+ \d+ ", line)]
    if len(other) > LINES_PER_SECOND * seconds:
        found.append(f"the log has {len(other)} lines that are not about requests")
    found += [line for line in other if " ERROR " in line or "Traceback" in line][:5]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    parser = argparse.ArgumentParser("python -m tests.hostile_load", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("-m", "--model", default="pycoder")
    parser.add_argument("--log", type=Path, help="where the log of the server is kept")
    parser.add_argument("flags", nargs="*", help="flags of bitmirror serve, after --")
    args = parser.parse_args(argv)
    seconds = 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "log"
        server, address = started(args.model, args.flags, log)
        try:
            times = alone(address)
            took, memory = loaded(address, psutil.Process(server.pid), seconds)
        finally:
            server.terminate()
            status = server.wait(120)
        lines = log.read_text(errors="replace").splitlines()
    print(*table(times, took), "", sep="\n")
    print(f"{UNREAD} is computed for {times[UNREAD]:.1f} s")
    least, most = (f"{value / 1e6:.0f}" for value in (min(memory), max(memory)))
    print(f"{args.minutes:g} minutes, memory {least} to {most} MB, {len(lines)} lines of log, exit status {status}")
    print(f"memory by quarter: {', '.join(f'{n / 1e6:.0f}' for n in quarters(memory))} MB")
    wrong = problems(times, took, memory, lines, seconds) + [f"the server ended with status {status}"] * bool(status)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
