"""The time to load a model and the time to its first token, in new processes, with the code of one or several checkouts.

    python -m benchmarks.loading MODEL [--code FOLDER ...] [--device cuda] [--runs 5] [--cold]
    python -m benchmarks.loading MODEL --digest

For each folder and run, in turns: ``load`` is ``LLM.load_seconds`` of ``engine.load``, from opening the file to the last
weight in memory; ``first token`` is the time from the start of ``bitmirror run -c 4096 -p Once -n 1`` to its first byte on
stdout, and ``end`` to the end of that process.  A run of each that is not counted comes first, so that kernels are compiled,
and the modules of the checkout, as pip does.  The file is in the system's page cache, or with ``--cold``, dropped from it
before each run.
"""

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine.gguf.digest import LEAF, model_digest
from engine.gguf.file import read_gguf
from engine.machine.cores import available_cores

CONTEXT = 4096
LOAD = r"""
import sys
import engine
with engine.load(sys.argv[1], device=sys.argv[2], n_ctx=int(sys.argv[3])) as llm:
    print(engine.__file__, llm.load_seconds, sep="\n")
"""
STEP = 16 << 20
"""Bytes of a read that brings the file into the page cache."""


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.loading", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file, such as bitmirror synthetic writes")
    parser.add_argument("--code", type=Path, nargs="+", default=[Path(__file__).parent.parent], help="checkouts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--digest", action="store_true", help="measure model_digest of this checkout instead")
    parser.add_argument("--cold", action="store_true", help="drop the file from the page cache before each run (Linux)")
    return parser.parse_args(given)


def warm(path: Path) -> float:
    """Read a file, so that it is in the page cache; returns the seconds."""
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(STEP):
            pass
    return time.perf_counter() - started


def drop(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(code: Path, words: list[str]) -> tuple[str, float, float]:
    """What ``python`` with these arguments prints, with the package of a checkout, and the seconds to the first byte of that
    and to the end of the process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=tempfile.gettempdir(),  # Python looks for packages there first
            env=environment | {"PYTHONPATH": str(code.resolve())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
        )
        assert process.stdout is not None
        printed = process.stdout.read(1)
        first = time.perf_counter() - started
        with process.stdout as rest:
            printed += rest.read()
        if process.wait():
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            sys.exit(f"{' '.join(words[:3])} failed with the code of {code}:\n{said}")
        return printed.decode(), first, time.perf_counter() - started


def measure(args: argparse.Namespace) -> dict[tuple[Path, str], list[float]]:
    """Seconds of each run, by checkout and by what was measured."""
    path = str(args.model.resolve())
    loading = ["-c", LOAD, path, args.device, str(CONTEXT)]
    command = ["-m", "bitmirror", "run", "-m", path, "-c", str(CONTEXT), "--device", args.device]
    command += ["-p", "Once", "-n", "1", "--no-cnv"]
    found: dict[tuple[Path, str], list[float]] = {}
    for number in range(args.runs + 1):
        for code in args.code:
            for name, words in (("load", loading), ("first token", command)):
                if args.cold:
                    drop(args.model)
                printed, first, end = run(code, words)
                seconds = {"first token": first, "end": end}
                if name == "load":
                    used, seconds = Path(printed.split("\n")[0]), {"load": float(printed.split("\n")[1])}
                    assert used.is_relative_to(code.resolve()), f"{used} is not of {code}"
                for what, each in seconds.items():
                    if number:
                        found.setdefault((code, what), []).append(each)
    return found


def measure_digest(path: Path, gigabytes: float, runs: int) -> None:
    """Print the speed of the digest of a file by its number of threads, and that of two hashes of a leaf in memory."""
    gguf, leaf = read_gguf(path), os.urandom(LEAF)
    for name in ("sha256", "blake2b"):
        started = time.perf_counter()
        for _ in range(64):
            hashlib.new(name, leaf).digest()
        print(f"{name} of a leaf in memory: {64 * LEAF / (time.perf_counter() - started) / 1e9:.2f} GB/s")
    threads = sorted({2**k for k in range(5) if 2**k <= available_cores()} | {available_cores()})
    print("| threads | s: least | median | most | GB/s (median) |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for n_threads in threads:
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            model_digest(gguf, n_threads)
            times.append(time.perf_counter() - started)
        median = statistics.median(times)
        print(f"| {n_threads} | {min(times):.2f} | {median:.2f} | {max(times):.2f} | {gigabytes / median:.2f} |")


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    gigabytes = args.model.stat().st_size / 1e9
    if args.cold:
        drop(args.model)
    seconds = warm(args.model), warm(args.model)
    print(f"{args.model.name}, {gigabytes:.2f} GB; read by one thread in {seconds[0]:.2f} s, then {seconds[1]:.2f} s")
    if args.digest:
        measure_digest(args.model, gigabytes, args.runs)
        return
    print("| code | measured | s: least | median | most | GB/s (median) |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for (code, name), times in measure(args).items():
        median = statistics.median(times)
        rate = f"{gigabytes / median:.2f}" if name == "load" else ""
        print(f"| {code} | {name} | {min(times):.2f} | {median:.2f} | {max(times):.2f} | {rate} |")


if __name__ == "__main__":
    main()
