"""The rate at which a conversation is taken up from files, beside the raw rate of the disk and the time to read its text.

    python -m benchmarks.conversations MODEL [--device cuda] [--tokens 30000] [--folder FOLDER] [--runs 3]

A text of random tokens is read, saved by ``save_state`` and kept in a cache on disk.  Each run drops the files from the
system's page cache (Linux) and measures, in turns: ``raw``, reading the state with as many threads and nothing else;
``state``, taking it up by ``load_state``; ``pages``, taking up the prompt from the cache on disk.  The last two include
hashing, and copying to the memory of the device.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import engine
from benchmarks.loading import drop
from engine.cache.disk import SUFFIX
from engine.machine.cores import available_cores
from engine.machine.records import MOST_READERS

STEP = 8 << 20
"""Bytes of a read."""


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.conversations", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="a GGUF file, such as bitmirror synthetic writes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=30000)
    parser.add_argument(
        "--folder", type=Path, help="where the files are written; default: a folder for temporary files"
    )
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args(given)


def raw(path: Path) -> float:
    """The seconds to read a file with several threads."""
    n_bytes = path.stat().st_size

    def read(at: int) -> None:
        with path.open("rb", buffering=0) as file:
            file.seek(at)
            file.readinto(np.empty(min(STEP, n_bytes - at), np.uint8).data)

    drop(path)
    begun = time.perf_counter()
    with ThreadPoolExecutor(min(MOST_READERS, available_cores())) as threads:
        list(threads.map(read, range(0, n_bytes, STEP)))
    return time.perf_counter() - begun


def measured(options: argparse.Namespace, folder: Path) -> dict[str, tuple[float, float]]:
    """The median seconds and the bytes of each way."""
    n, path = options.tokens, folder / "state"
    given = {"device": options.device, "n_ctx": n + 256, "cache_disk": "100G", "cache_disk_path": folder / "pages"}
    seconds: dict[str, list[float]] = {"text": [], "raw": [], "state": [], "pages": []}
    with engine.load(options.model, **given) as llm:
        llm.compile()
        ids = np.random.default_rng(1).integers(3, llm.config.n_vocab, n).tolist()
        begun = time.perf_counter()
        llm.complete(ids, max_tokens=1, temperature=0, ignore_eos=True)
        seconds["text"].append(time.perf_counter() - begun)
        llm.save_state(path)
        assert llm.disk is not None
        llm.disk.flush()
        n_bytes = {"state": path.stat().st_size, "raw": path.stat().st_size, "text": 0}
        files = [*(folder / "pages").glob(f"*{SUFFIX}")]
        n_bytes["pages"] = sum(each.stat().st_size for each in files)
        for _ in range(options.runs):
            seconds["raw"].append(raw(path))
            drop(path)
            llm.reset()
            begun = time.perf_counter()
            llm.load_state(path)
            seconds["state"].append(time.perf_counter() - begun)
            for each in files:
                drop(each)
            llm.reset()
            llm.disk.per_byte.seconds = 0.0  # read them whatever is faster
            answer = llm.complete(ids, max_tokens=1, temperature=0, ignore_eos=True)
            # Without the tokens after the last whole page, which are computed.
            seconds["pages"].append(llm.disk.per_byte.seconds * n_bytes["pages"])
            assert answer.timings.cache_n >= n - 128, "the pages were not used"
    return {name: (statistics.median(each), n_bytes[name]) for name, each in seconds.items()}


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measured(options, Path(folder))
        gc.collect()
    rate = found["raw"][1] / found["raw"][0]
    print(f"{options.model.name}, {options.tokens} tokens, {os.cpu_count()} cores")
    print("what\tseconds\tMB\tGB/s\tof the disk's rate")
    for name, (seconds, n_bytes) in found.items():
        own = n_bytes / seconds
        print(f"{name}\t{seconds:.3f}\t{n_bytes / 1e6:.3f}\t{own / 1e9:.2f}\t{own / rate:.0%}")


if __name__ == "__main__":
    main()
