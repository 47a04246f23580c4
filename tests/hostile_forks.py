"""Forked processes that compile and load different kernels in a shared cache, as many as wanted: all must get the right bits.

    python -m tests.hostile_forks -n 2000
    python -m tests.hostile_forks -n 200 --each 50 --seed 7

A parent with an empty cache forks children, in groups of up to ``TOGETHER`` that begin at the same moment.  Each uses a few
cases in a random order, and compares the bits with those expected: rows of all formats with those of the reference package,
and tokens of a model with each type of cache with those of a process that has a cache of its own.  Every parent has loaded a
model and answered before, so it has threads.  In every second one, a thread goes on answering; a child that uses the parent's
model then gets either the right text or one sentence.

After ``--each`` forks, a fresh process uses all cases from the cache, and another parent begins with an empty one.  At the
end, the files of all caches are copied into one folder, which a fresh process uses, too.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TOGETHER = 4
"""The most children of a group."""

SECONDS = 900
"""A process that takes longer hangs."""

N = 256
"""Elements of a row."""

MODEL = "tiny-qwen3"

CACHE_TYPES = ("f16", "f32", "q8_0", "q4_0", "i8", "i12")

ENDS = ("right", "one sentence", "differing", "an error", "crashed", "hung")
"""How the use of a case may end; the first two are good."""


# --- cases -------------------------------------------------------------------------------------------------------


def rows(folder: Path, name: str) -> bytes:
    """A row of a format, as the kernel computes it."""
    from engine.cpu import embed

    out = np.zeros((1, N), np.float32)
    data = np.load(folder / f"{name}.npy")
    embed.embed_rows(name)(data, np.zeros(1, np.int32), np.float32(1), out, 0, 1)
    return out.tobytes()


def answer(llm: Any) -> bytes:
    """A few tokens of a model and the last logits before them."""
    ids = llm.complete([1, 2, 3, 4], max_tokens=3, temperature=0, ignore_eos=True).ids
    return repr(ids).encode() + llm.logits([1, 2, 3])[-1].tobytes()


def load(folder: Path, cache_type: str) -> Any:
    """The model with a type of cache."""
    import engine

    return engine.load(folder / "model.gguf", device="cpu", n_ctx=64, n_threads=2, parallel=2, cache_type=cache_type)


def use(folder: Path, case: str, llm: Any = None) -> str:
    """A hash of the bits of a case.  llm: the parent's model, for the case "inherited"."""
    kind, _, name = case.partition(" ")
    if kind == "rows":
        data = rows(folder, name)
    elif kind == "inherited":
        data = answer(llm)
    else:
        with load(folder, name) as own:
            data = answer(own)
    return hashlib.sha256(data).hexdigest()


def prepare(folder: Path) -> dict[str, str]:
    """Write the data of all cases; returns the expected hash of each."""
    import gguf

    from engine.cpu.products.unpack import UNPACK
    from engine.gguf.quants import FORMATS
    from engine.synthetic.model import make_model

    expected = {}
    for entry in FORMATS.values():
        if entry.name not in UNPACK and entry.name not in ("F32", "F16", "BF16"):
            continue
        kind = gguf.GGMLQuantizationType(entry.type)
        values = np.random.default_rng(1).standard_normal((1, N)).astype(np.float32)
        try:
            data = gguf.quants.quantize(values, kind)
        except NotImplementedError:  # random bytes, whose factors are finite numbers
            data = np.random.default_rng(2).integers(0, 60, (1, N // entry.block * entry.block_bytes)).astype(np.uint8)
        try:
            wanted = gguf.quants.dequantize(data, kind).astype(np.float32)
        except NotImplementedError:
            continue
        if np.isfinite(wanted).all():
            np.save(folder / f"{entry.name}.npy", data.view(np.uint8).reshape(1, -1))
            expected[f"rows {entry.name}"] = hashlib.sha256(wanted.tobytes()).hexdigest()
    make_model(folder / "model.gguf", MODEL, "Q8_0")
    for cache_type in CACHE_TYPES:
        case = f"model {cache_type}"
        found = run(folder, folder / f"alone-{cache_type}", "alone", {"cases": [case]})
        assert found["error"] == "", found["error"]
        expected[case] = found["hashes"][case]
    expected["inherited"] = expected["model f16"]
    return expected


# --- processes ---------------------------------------------------------------------------------------------------


def run(folder: Path, cache: Path, task: str, arguments: dict[str, Any], seconds: float = SECONDS) -> dict[str, Any]:
    """What a fresh process with a cache reports; with the key ``error`` if it fails, else "" there."""
    environment = os.environ | {"BITMIRROR_CACHE": str(cache), "TMPDIR": str(folder)}
    environment.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-m", "tests.hostile_forks", "--task", task, "--folder", str(folder)]
    try:
        done = subprocess.run(
            command, env=environment, input=json.dumps(arguments), capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"error": "hung"}
    if done.returncode:
        return {"error": f"status {done.returncode}: {done.stderr[-300:]}"}
    return {"error": "", **json.loads(done.stdout.splitlines()[-1])}


def alone(folder: Path, cases: Sequence[str]) -> dict[str, Any]:
    """The hashes of cases, and the number of kernels that had to be compiled."""
    compiled = counted()
    hashes = {case: use(folder, case) for case in cases}
    return {"hashes": hashes, "compiled": compiled()}


def counted() -> Callable[[], int]:
    """A function that returns the number of kernels that this process has stored since."""
    from engine.compile import cache as kernel_cache

    stored: list[str] = []
    write = kernel_cache.write

    def count(part: Any, name: str, data: bytes) -> None:
        stored.append(name)
        write(part, name, data)

    vars(kernel_cache)["write"] = count
    return lambda: len(stored)


def child(folder: Path, cases: Sequence[str], expected: dict[str, str], llm: Any, go: int, report: int) -> None:
    """What a forked process does: it waits until the others of its group exist, and uses its cases."""
    from engine.errors import EngineError

    signal.alarm(SECONDS)
    os.read(go, 1)
    ends: Counter[str] = Counter()
    errors: list[str] = []
    compiled = counted()
    for case in cases:
        try:
            end = "right" if use(folder, case, llm) == expected[case] else "differing"
        except EngineError as error:
            # Only a model that another thread was using may be refused.
            end = "one sentence" if case == "inherited" else "an error"
            errors += [f"{case}: {error}"] * (end == "an error")
        except BaseException as error:
            end = "an error"
            errors.append(f"{case}: {error!r}"[:300])
        if end == "differing":
            errors.append(f"{case}: differing bits")
        ends[end] += 1
    os.write(report, json.dumps({"ends": ends, "errors": errors[:3], "compiled": compiled()}).encode() + b"\n")


def parent(folder: Path, groups: list[list[list[str]]], expected: dict[str, str], busy: bool) -> dict[str, Any]:
    """Fork the children of all groups; returns the counts of what became of them.  groups: for each child its cases."""
    llm = load(folder, "f16")
    own = hashlib.sha256(answer(llm)).hexdigest()
    counts: Counter[str] = Counter({"differing": int(own != expected["inherited"])})
    errors: list[str] = []
    stop = threading.Event()

    def keep_answering() -> None:
        while not stop.is_set():
            if hashlib.sha256(answer(llm)).hexdigest() != own:
                counts["differing"] += 1
                errors.append("the parent: differing bits")
            time.sleep(0.01)

    thread = threading.Thread(target=keep_answering)
    if busy:
        thread.start()
    for group in groups:
        go, begin = os.pipe()
        reading, report = os.pipe()
        children = {}
        for cases in group:
            pid = os.fork()
            if pid == 0:
                try:
                    os.close(begin)
                    child(folder, cases, expected, llm, go, report)
                finally:
                    os._exit(0)
            children[pid] = cases
        for fd in (go, report, begin):  # the last one lets them begin
            os.close(fd)
        with open(reading) as file:
            for line in file:
                found = json.loads(line)
                counts.update(found["ends"])
                counts["compiled"] += found["compiled"]
                errors += found["errors"]
        for pid, cases in children.items():
            status = os.waitpid(pid, 0)[1]
            counts["forks"] += 1
            counts["at once"] += len(group) > 1
            if status:
                end = "hung" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else "crashed"
                counts[end] += 1
                errors.append(f"{', '.join(cases)}: {end}, status {status}")
    stop.set()
    if busy:
        thread.join()
    if hashlib.sha256(answer(llm)).hexdigest() != own:
        counts["differing"] += 1
        errors.append("the parent at its end: differing bits")
    llm.check_pages()
    return {"counts": counts, "errors": errors}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"alone": alone, "parent": parent}


# --- all of it ---------------------------------------------------------------------------------------------------


def plan(n: int, cases: Sequence[str], rng: random.Random) -> list[list[list[str]]]:
    """Groups of children, each with cases: mostly kernels alone, because a model takes a second to load."""
    kernels = [case for case in cases if case.startswith("rows")]
    models = [case for case in cases if case.startswith("model")]
    groups = []
    while n > 0:
        size = min(n, rng.randint(1, TOGETHER))
        group = []
        for _ in range(size):
            chosen = rng.sample(kernels, 3)
            if rng.random() < 0.08:
                chosen.insert(rng.randrange(3), rng.choice(models))
            if rng.random() < 0.2:
                chosen.insert(rng.randrange(3), "inherited")
            group.append(chosen)
        groups.append(group)
        n -= size
    return groups


def judged(found: dict[str, Any], expected: dict[str, str], counts: Counter[str], errors: list[str], name: str) -> None:
    """Add what a fresh process has found in a cache."""
    if found["error"]:
        counts["an error"] += 1
        errors.append(f"{name}: {found['error']}")
        return
    for case, value in found["hashes"].items():
        counts["right" if value == expected[case] else "differing"] += 1
        if value != expected[case]:
            errors.append(f"{name}: {case}: differing bits")
    counts["compiled afterwards"] += found["compiled"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m tests.hostile_forks", description="Fork processes that compile kernels."
    )
    parser.add_argument("-n", type=int, default=2000, metavar="N", help="processes to fork")
    parser.add_argument("--each", type=int, default=250, metavar="N", help="processes per cache")
    parser.add_argument("--seed", type=int, default=1, help="another seed gives another order")
    parser.add_argument("--task", choices=[*TASKS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.task:
        print(json.dumps(TASKS[args.task](args.folder, **json.load(sys.stdin))), flush=True)
        return 0
    total: Counter[str] = Counter()
    errors: list[str] = []
    rng, begun = random.Random(args.seed), time.monotonic()
    columns = ("forks", "at once", "compiled", *ENDS)
    print(f"| caches | {' | '.join(columns)} | minutes |")
    print("| --- |" + " ---: |" * (len(columns) + 1), flush=True)

    def row(name: str, counts: Counter[str]) -> None:
        minutes = (time.monotonic() - begun) / 60
        print(f"| {name} | {' | '.join(str(counts[c]) for c in columns)} | {minutes:.1f} |", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = prepare(folder)
        fresh = [case for case in expected if case != "inherited"]
        caches = -(-args.n // args.each)
        for k in range(caches):
            n = min(args.each, args.n - k * args.each)
            arguments = {"groups": plan(n, fresh, rng), "expected": expected, "busy": k % 2 == 1}
            seconds = SECONDS + 20 * n
            cache = folder / f"cache-{k}"
            found = run(folder, cache, "parent", arguments, seconds)
            counts: Counter[str] = Counter(found.get("counts", {"crashed": 1}))
            messages = [found["error"]] if found["error"] else found["errors"]
            judged(run(folder, cache, "alone", {"cases": fresh}, seconds), expected, counts, messages, "afterwards")
            row(f"{k + 1}, {'busy' if k % 2 else 'idle'} parent", counts)
            for message in messages[:10]:
                print(message, file=sys.stderr, flush=True)
            total.update(counts)
            errors += messages
        for k in range(caches):
            shutil.copytree(folder / f"cache-{k}", folder / "all", dirs_exist_ok=True)
        counts = Counter()
        judged(run(folder, folder / "all", "alone", {"cases": fresh}), expected, counts, errors, "all caches in one")
        row("all in one", counts)
        total.update(counts)
    row("sum", total)
    for message in errors[-10:]:
        print(message, file=sys.stderr)
    return int(bool(errors) or any(total[end] for end in ENDS[2:]))


if __name__ == "__main__":
    sys.exit(main())
