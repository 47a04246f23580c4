"""Damaged files by the thousand: headers that are read, and models that are loaded and answer four tokens.

    python -m tests.hostile --headers 1000000 --loads 20000 -j 2
    python -m tests.hostile --loads 500 --seed 7 --minutes 10

Each case is a valid file with a few changes: bits, fields of the header with values at the edges of their types, texts, parts
that are cut out, doubled or exchanged; for loads also bits of the data.  ``tests/hostile_files.py`` changes whole values.
A case may work, or end with one sentence.  A traceback, a warning, a message that is long or controls a terminal, and a case
that takes more than ``MOST_SECONDS`` of processor time or ``MOST_BYTES`` of memory are findings; the exit status is 1 then.
"""

import argparse
import multiprocessing
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import EngineError
from engine.gguf.file import read_gguf
from engine.synthetic.model import make_model
from engine.synthetic.shapes import shapes
from tests.ggufs import SMALL, Field, fields
from tests.hostile_files import LONGEST

MOST_SECONDS = 20.0
"""CPU seconds of a case; compiling kernels that no case before has needed counts, too."""

MOST_BYTES = 2 << 30
"""Bytes by which the memory of the process may grow beyond that at its beginning."""

EDGES = (0, 1, 2, 7, 8, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
"""Values of numbers, cut to the width of their field."""

TEXTS = (b"", b"\0", b"\xff\xfe", b"\x1b[31m\n", b"a" * 300, "\u202e".encode(), b"general.architecture", b"llama")


@dataclass
class Report:
    """What cases did: how many ended in which way, the findings with the seeds of their cases, and the slowest case."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    slowest: float = 0.0
    sentences: set[str] = field(default_factory=set)

    def add(self, other: "Report") -> None:
        """Add what other cases did."""
        self.outcomes += other.outcomes
        self.findings += other.findings
        self.slowest = max(self.slowest, other.slowest)
        self.sentences |= other.sentences


# --- changes -----------------------------------------------------------------------------------------------------


def damaged(data: bytes, places: Sequence[Field], rng: random.Random, *, header: int = 0) -> bytes:
    """The file with one to three changes.  places: the fields of its header; header: where that ends, if changes are to be in
    the data after it, too."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.choice(places)
        kind = rng.randrange(8 if header else 7)
        if kind == 0:  # bits
            for _ in range(rng.randint(1, 4)):
                at = place.pos + rng.randrange(max(1, place.size))
                if at < len(out):
                    out[at] ^= 1 << rng.randrange(8)
        elif kind in (1, 2) and 0 < place.size <= 8:  # a number
            value = rng.choice(EDGES) % (1 << 8 * place.size)
            out[place.pos : place.pos + place.size] = value.to_bytes(place.size, "little")
        elif kind == 3:  # a text of the same length
            text = rng.choice(TEXTS)[: place.size].ljust(place.size, b"x")
            out[place.pos : place.pos + place.size] = text
        elif kind == 4:  # the end is missing
            del out[max(1, rng.randrange(max(1, len(out)))) :]
        elif kind == 5:  # a part is missing or doubled
            first = rng.randrange(max(1, len(out)))
            part = out[first : first + rng.choice((1, 4, 8, 64))]
            out[first : first + rng.choice((0, len(part)))] = part * rng.choice((0, 2))
        elif kind == 6:  # two fields of one size are exchanged
            other = rng.choice([each for each in places if each.size == place.size])
            a, b = (bytes(data[each.pos : each.pos + each.size]) for each in (place, other))
            out[place.pos : place.pos + place.size] = b
            out[other.pos : other.pos + other.size] = a
        else:  # bits of weights
            for _ in range(rng.randint(1, 64) if header < len(data) else 0):
                at = rng.randrange(header, len(data))
                if at < len(out):
                    out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


# --- cases -------------------------------------------------------------------------------------------------------


def tried(report: Report, name: str, call: Callable[[], str]) -> None:
    """Add what a case did to a report.  call: returns how it ended, or raises an error."""
    begun = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            end = call()
    except EngineError as error:
        end, text = "one sentence", str(error)
        report.sentences.add(type(error).__name__ + " " + " ".join(w for w in text.split() if w.isalpha())[:60])
        if len(text) > LONGEST or not text.isprintable():
            report.findings.append(f"{name}: a message of {len(text)} characters: {text[:100]!r}")
    except Exception as error:
        end = "an error of Python"
        report.findings.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    seconds = time.process_time() - begun
    report.outcomes[end] += 1
    report.slowest = max(report.slowest, seconds)
    if seconds > MOST_SECONDS:
        report.findings.append(f"{name}: {seconds:.1f} s")


def read_header(path: Path) -> str:
    """Read a header as ``engine.load`` begins."""
    read_gguf(path)
    return "read"


def answer(path: Path) -> str:
    """Load a model and let it continue a text by four tokens, without and with a seed."""
    import engine

    llm = engine.load(path, n_ctx=64, device="cpu", n_threads=1)
    try:
        for temperature in (0.0, 1.0):
            llm.complete("def f(x):", max_tokens=4, temperature=temperature, seed=1)
        llm.check_pages()
    finally:
        llm.close()
    return "four tokens"


def work(arguments: tuple[str, int, int, int, float]) -> Report:
    """The cases of one process: (kind, seed, first, count, deadline of ``time.monotonic``)."""
    kind, seed, first, count, deadline = arguments
    report, begun = Report(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = Path(folder) / "model.gguf"
        files = headers() if kind == "headers" else models(Path(folder))
        for k in range(first, first + count):
            if time.monotonic() > deadline:
                break
            rng = random.Random(f"{kind} {seed} {k}")
            name, data, places, end = files[k % len(files)]
            path.unlink(missing_ok=True)
            path.write_bytes(damaged(data, places, rng, header=0 if kind == "headers" else end))
            call = read_header if kind == "headers" else answer
            tried(report, f"{kind} --seed {seed}, case {k} ({name})", lambda call=call: call(path))  # type: ignore[misc]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begun) << 10
    if grown > MOST_BYTES:
        report.findings.append(f"{kind}: the memory of a process grew by {grown >> 20} MiB")
    return report


Case = tuple[str, bytes, list[Field], int]
"""The name of a valid file, its bytes, the fields of its header, and where its data begin."""


def headers() -> list[Case]:
    """A small file with every type of value."""
    return [("small", SMALL, list(fields(SMALL).values()), 0)]


def models(folder: Path) -> list[Case]:
    """A small model of each architecture.  Few texts and numbers of a vocabulary are changed: they are most fields."""
    found = []
    for shape in sorted(name for name in shapes() if name.startswith("tiny-")):
        path = make_model(folder / "valid.gguf", shape, "Q8_0")
        data = path.read_bytes()
        path.unlink()
        named = fields(data)
        places = [place for name, place in named.items() if "value[" not in name or name.endswith("[7]")]
        found.append((shape, data, places, max(place.pos + place.size for place in named.values())))
    return found


def shares(kind: str, seed: int, total: int, deadline: float, size: int) -> Iterator[tuple[str, int, int, int, float]]:
    """The cases of a kind in shares that processes take one after the other."""
    for first in range(0, total, size):
        yield kind, seed, first, min(size, total - first), deadline


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser("python -m tests.hostile", description="Read and load damaged files.")
    parser.add_argument("--headers", type=int, default=0, metavar="N", help="headers to read")
    parser.add_argument("--loads", type=int, default=0, metavar="N", help="models to load, with four tokens each")
    parser.add_argument("--seed", type=int, default=1, help="another seed gives other cases")
    parser.add_argument("--minutes", type=float, default=1e6, help="end after so long")
    parser.add_argument("-j", type=int, default=1, metavar="N", help="processes")
    args = parser.parse_args(argv)
    deadline, found = time.monotonic() + 60 * args.minutes, []
    print("| cases | number | worked | one sentence | different sentences | findings | slowest, s | minutes |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    with multiprocessing.get_context("spawn").Pool(args.j) as pool:
        for kind, total, size in (("headers", args.headers, 20_000), ("loads", args.loads, 250)):
            begun, report = time.monotonic(), Report()
            for share in pool.imap_unordered(work, shares(kind, args.seed, total, deadline, size)):
                report.add(share)
                for line in share.findings:
                    print(line, file=sys.stderr, flush=True)
            if total:
                n, refused = report.outcomes.total(), report.outcomes["one sentence"]
                bad = report.outcomes["an error of Python"]
                row = (kind, n, n - refused - bad, refused, len(report.sentences), len(report.findings))
                minutes = (time.monotonic() - begun) / 60
                print(f"| {' | '.join(map(str, row))} | {report.slowest:.1f} | {minutes:.1f} |", flush=True)
            found += report.findings
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
