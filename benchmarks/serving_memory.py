"""The memory of a server, when it has opened a model, under requests, and at rest.  Linux only.

    python -m benchmarks.serving_memory [--wait 15] [-- FLAGS OF bitmirror serve]

MB in physical memory: all; of them what is mapped of the model's file; libraries; and the rest, which only this process has.
Then what ``/metrics`` says of the cache: pages that are held or kept for texts.  Prompts are parts of the sources of this
package.  ``--wait``: seconds without requests before a line "at rest".
"""

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine
from benchmarks.serving_load import started

FLAGS = ("-m", "smollm2-135m", "-np", "4", "-c", "8192")

PROMPT = 2500
"""Letters of a prompt: some 700 tokens."""


def resident(pid: int) -> Counter[str]:
    """Bytes of physical memory of a process, by what is mapped."""
    found: Counter[str] = Counter()
    kind = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            name = words[5] if len(words) > 5 else ""
            kind = "file" if name.endswith(".gguf") else "libraries" if name.startswith("/") else "rest"
        elif words[0] == "Rss:":
            found[kind] += int(words[1]) << 10
    return found


def pages(url: str) -> float:
    """Bytes of pages of the cache that are held or kept; nan for a server that does not say."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    found = [float(line.split()[-1]) for line in lines if 'kind="pages_held"' in line or 'kind="pages_kept"' in line]
    return sum(found) if found else float("nan")


def ask(url: str, prompt: str, max_tokens: int) -> None:
    """Send a request, and wait for its answer."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": 1}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request).close()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.serving_memory", description=__doc__)
    parser.add_argument("--wait", type=float, default=15, help="seconds without requests before memory is given back")
    parser.add_argument("flags", nargs="*", help=f"flags of bitmirror serve, after -- (default: {' '.join(FLAGS)})")
    args = parser.parse_args(argv)
    text = (Path(engine.__file__).parent / "llm.py").read_text()
    with tempfile.TemporaryDirectory() as folder:
        process, url = started(args.flags or FLAGS, Path(folder) / "log")

        def show(stage: str) -> None:
            kinds = resident(process.pid)
            numbers = (kinds.total(), kinds["file"], kinds["libraries"], kinds["rest"], pages(url))
            print(f"| {stage} | {' | '.join(f'{n / 1e6:.0f}' for n in numbers)} |", flush=True)

        def rest() -> None:
            time.sleep(args.wait)
            show("at rest")

        def many(n: int) -> None:
            prompts = [f"{i} {text[500 * i : 500 * i + PROMPT]}" for i in range(n)]
            threads = [threading.Thread(target=ask, args=(url, prompt, 32)) for prompt in prompts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        print("| | resident | file | libraries | rest | pages |\n| --- | ---: | ---: | ---: | ---: | ---: |")
        try:
            show("open")
            rest()
            ask(url, "def add(a, b):", 8)
            show("one short request")
            many(1)
            show("one prompt of 700 tokens")
            rest()
            many(16)
            show("16 such prompts at once")
            rest()
        finally:
            process.terminate()
            process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
