"""Compare CPU engines, on an idle machine and on a busy one: this engine and llama.cpp, in turn.

    python -m benchmarks.cpu_beside_llama_cpp smollm2-135m MODEL.gguf -t 1,2
    python -m benchmarks.cpu_beside_llama_cpp pycoder --shape qwen3-1.7b:Q4_K_M --busy 0,1,2 --json measured.json
    python -m benchmarks.cpu_beside_llama_cpp pycoder --rival-python native=~/llama/bin/python portable=~/wheel/bin/python

A prompt of 256 random tokens (pp256) and a greedy answer of 64 tokens after a short prompt (tg64) are measured. Each engine
runs in a process of its own for each number of threads; all of them stay alive, and one at a time computes: a round is one
measurement of each, and the order is reversed after every round. llama.cpp runs with and without flash attention, and the
better median counts. Several builds of it are compared in the same rounds. ``--busy`` adds other processes that compute for
ever; an answer then ends after ten seconds. The table has medians of the rounds and their ratios, and from-to the smallest
and largest ratio within one round; "of memory" is the rate at which our answer reads weights, keys and values, as a share of
a plain read with the same number of threads.

Needs ``llama-cpp-python`` (a development tool, not a dependency), in this environment or in those of ``--rival-python``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import engine
from engine.bench import cpu_name, random_model
from engine.cli.parser import Numbers
from engine.cli.report import Report
from engine.errors import EngineError
from engine.hub.resolve import resolve

PLAYER = Path(__file__).with_name("cpu_player.py")

PAUSE = 0.05
"""Seconds between two measurements, in which the threads of the first go to sleep."""

SPIN = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""
"""A process that computes until it is ended, or until the process that started it, whose id it is given, is gone."""

OURS, RIVAL = "ours", "llama.cpp"

FLASH = ", flash attention"
"""What the name of a rival ends with in the rates, if it runs with flash attention."""


class PlayerError(Exception):
    """An engine has ended instead of answering."""


class Player:
    """An engine with a number of threads, in another process."""

    def __init__(self, python: str, task: dict[str, Any]) -> None:
        self.name = f"{task['engine']} with {task['n_threads']} threads"
        # This package is found from any folder; another interpreter imports nothing of it.
        found = [str(Path(engine.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        # A session of its own: Ctrl-C ends this process, which then ends the others.
        self.process = subprocess.Popen(
            [python, str(PLAYER), json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))},
        )

    def reply(self) -> Any:
        """The next line that the engine says; waits for it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PlayerError(f"{self.name} has ended with exit status {self.process.wait()}")
        return json.loads(line)

    def ask(self, measurement: str) -> Any:
        """The result of a measurement: "prompt", "answer" or "facts"."""
        assert self.process.stdin is not None
        self.process.stdin.write(measurement + "\n")
        self.process.stdin.flush()
        return self.reply()


@contextmanager
def ended(process: "subprocess.Popen[Any]") -> Iterator[None]:
    """Kill the process at the end, whatever happens."""
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def spinning(count: int) -> Iterator[None]:
    """So many other processes that compute for ever."""
    with ExitStack() as stack:
        for _ in range(count):
            command = [sys.executable, "-c", SPIN, str(os.getpid())]
            stack.enter_context(ended(subprocess.Popen(command, start_new_session=True)))
        if count:
            time.sleep(0.5)  # until they spin
        yield


@dataclass(frozen=True)
class Row:
    """One line of the table. ``rates`` has tokens per second of every round, by engine."""

    model: str
    test: str
    n_threads: int
    busy: int
    rates: dict[str, list[float]]
    bytes_per_token: float = 0.0
    """Bytes that a token of the answer reads; 0 for prompts, whose tokens share the weights they read."""
    bandwidth: float = 0.0
    """Bytes per second of a plain read with the same number of threads and no other process."""

    @property
    def ours(self) -> float:
        return statistics.median(self.rates[OURS])

    @property
    def rivals(self) -> list[str]:
        """The names of the others: builds of llama.cpp, each with and without flash attention."""
        return list(dict.fromkeys(name.removesuffix(FLASH) for name in self.rates if name != OURS))

    def faster(self, rival: str) -> list[float]:
        """The rates of a build, with or without flash attention, whichever has the better median."""
        return max((self.rates[rival], self.rates[rival + FLASH]), key=statistics.median)

    @property
    def theirs(self) -> float:
        """The median of the fastest build."""
        return max(statistics.median(self.faster(rival)) for rival in self.rivals)

    def ratios(self, rival: str) -> list[float]:
        """Ours divided by theirs, round by round."""
        return [ours / theirs for ours, theirs in zip(self.rates[OURS], self.faster(rival), strict=True)]

    def cells(self) -> list[str]:
        read = self.bytes_per_token * self.ours
        cells = [self.model, self.test, str(self.n_threads), str(self.busy), f"{self.ours:.1f}"]
        for rival in self.rivals:
            ratios, theirs = self.ratios(rival), statistics.median(self.faster(rival))
            cells += [
                f"{theirs:.1f}",
                f"{self.ours / theirs:.2f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
            ]
        return [*cells, f"{read / 1e9:.1f}" if read else "", f"{read / self.bandwidth:.0%}" if read else ""]

    def header(self) -> list[str]:
        """The columns; rates in tokens per second."""
        theirs = [column for rival in self.rivals for column in (rival, "ratio", "from-to")]
        return ["model", "test", "threads", "busy", "ours", *theirs, "GB/s", "of memory"]


def table(rows: Iterable[Row]) -> Iterator[str]:
    """The lines of a Markdown table."""
    for n, row in enumerate(rows):
        if n == 0:
            yield f"| {' | '.join(row.header())} |"
            yield "|" + "".join(" --- |" if name in ("model", "test") else " ---: |" for name in row.header())
        yield f"| {' | '.join(row.cells())} |"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """For each test and load, our rate with the most threads: beside ours with the fewest, and beside the best of theirs."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.test, row.busy), []).append(row)
    for (model, test, busy), group in groups.items():
        if len(group) > 1:
            fewest, most = min(group, key=lambda r: r.n_threads), max(group, key=lambda r: r.n_threads)
            best = max(row.theirs for row in group)
            yield (
                f"{model} {test}, {busy} busy: {most.n_threads} threads are {most.ours / fewest.ours:.2f} times as fast as "
                f"{fewest.n_threads}, and {most.ours / best:.2f} times as fast as llama.cpp with the best number of threads"
            )


def compare(name: str, path: Path, args: argparse.Namespace, facts: dict[str, Any]) -> Iterator[Row]:
    """Every row of one model: all numbers of threads, in each load. ``facts`` receives those of each rival, by its name."""
    with ExitStack() as stack:
        players: dict[tuple[int, str], Player] = {}
        for n_threads in args.threads:
            task = {"path": str(path), "n_threads": n_threads, "n_prompt": args.n_prompt, "n_answer": args.n_gen}
            engines: list[tuple[str, str, dict[str, Any]]] = [(OURS, sys.executable, {"engine": "ours"})]
            for rival, python in args.rival_python:
                more: dict[str, Any] = {"engine": "llama.cpp"}
                engines += [
                    (rival + FLASH, python, more | {"flash_attn": True}),
                    (rival, python, more | {"flash_attn": False}),
                ]
            for who, python, more in engines:
                player = Player(python, task | more)
                stack.enter_context(ended(player.process))
                player.reply()  # one at a time: what they do to warm up does not disturb another
                players[n_threads, who] = player
        ours = {n: players[n, OURS].ask("facts") for n in args.threads}
        facts |= {rival: players[args.threads[0], rival + FLASH].ask("facts") for rival, _ in args.rival_python}
        for busy in args.busy:
            with spinning(busy):
                rates = rounds(players, args.rounds)
            for measurement, test in (("prompt", f"pp{args.n_prompt}"), ("answer", f"tg{args.n_gen}")):
                for n in args.threads:
                    mine = {who: rates[measurement, n, who] for who, *_ in engines}
                    read = ours[n]["bytes_per_token"] if measurement == "answer" else 0.0
                    yield Row(name, test, n, busy, mine, read, ours[n]["bandwidth"])


def rounds(players: dict[tuple[int, str], Player], count: int) -> dict[tuple[str, int, str], list[float]]:
    """Tokens per second of each round, by measurement, number of threads and engine."""
    rates: dict[tuple[str, int, str], list[float]] = {}
    order = list(players)
    for _ in range(count):
        for measurement in ("prompt", "answer"):
            for key in order:
                time.sleep(PAUSE)
                result = players[key].ask(measurement)
                rates.setdefault((measurement, *key), []).append(result["tokens"] / result["seconds"])
        order.reverse()
    return rates


def load() -> float | None:
    """The mean number of processes that wanted to run in the last minute, where the system counts them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def build(word: str) -> tuple[str, str]:
    """The name of a build of llama.cpp, and the interpreter that has it."""
    name, _, python = word.rpartition("=")
    return (f"{RIVAL}, {name}" if name else RIVAL), os.path.expanduser(python)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="cpu_beside_llama_cpp", description=(__doc__ or "").splitlines()[0])
    add = top.add_argument
    add("models", nargs="*", metavar="MODEL", help="a GGUF file, or the name of a model")
    add("--shape", action="append", default=[], metavar="NAME:QUANT", help="a random model, in a temporary file")
    add("-t", "--threads", type=Numbers(1), default=[1, 2], metavar="N,...", help="numbers of threads (1,2)")
    add("--busy", type=Numbers(), default=[0], metavar="N,...", help="numbers of other processes that compute (0)")
    add("-p", "--n-prompt", type=int, default=256, metavar="N", help="tokens of the prompt (256)")
    add("-n", "--n-gen", type=int, default=64, metavar="N", help="tokens of the answer (64)")
    add("-r", "--rounds", type=int, default=5, metavar="N", help="measurements of each kind (5)")
    add(
        "--rival-python",
        type=build,
        nargs="+",
        default=[(RIVAL, sys.executable)],
        metavar="[NAME=]FILE",
        help="interpreters that have llama-cpp-python, with names for its builds if there are several",
    )
    add("--json", type=Path, metavar="FILE", help="also write all rounds to this file")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints each row as soon as it is known. Returns the exit status."""
    top = parser()
    args = top.parse_args(argv)
    if not args.models and not args.shape:
        top.error("name a model, or a shape with --shape")
    if len({rival for rival, _ in args.rival_python}) < len(args.rival_python):
        top.error("name the builds of --rival-python, each differently: native=FILE portable=FILE")
    if min(args.n_prompt, args.n_gen, args.rounds) < 1:
        top.error("-p, -n and -r must be 1 or more")
    about: dict[str, Any] = {"cpu": cpu_name(), "cores": os.cpu_count(), "load": load(), "llama.cpp": {}}
    rows: list[Row] = []

    def measured() -> Iterator[Row]:
        for name, path in models:
            for row in compare(name, path, args, about["llama.cpp"]):
                rows.append(row)
                yield row

    try:
        with ExitStack() as stack:
            models = [(path.stem, path) for path in (resolve(model, Report().progress) for model in args.models)]
            models += [stack.enter_context(random_model(shape, keep=False)) for shape in args.shape]
            for line in table(measured()):
                print(line, flush=True)
    except (EngineError, PlayerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("", *summary(rows), sep="\n")
    if args.json:
        args.json.write_text(
            json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
