"""The tests that need a GPU, in parts, and a table of what they did.

    python -m tests.gpu                 all parts, one after the other
    python -m tests.gpu --part 2/2      the second of two parts of about equal duration
    python -m tests.gpu -o table.md     where the table is written, in Markdown

The exit status is that of pytest.  Kernels are compiled anew for each part, unless BITMIRROR_CACHE names a folder.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PARTS = 2
"""Parts, each of which should take less than ten minutes on 16 cores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description="Run the tests that need a GPU, in parts.")
    parser.add_argument("--part", metavar="K/N", help=f"one part only; default: each of {PARTS}")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the table is written; default: stdout")
    parser.add_argument("words", nargs="*", help="arguments of pytest, after --")
    args = parser.parse_args(argv)
    status = 0
    rows = []
    for part in [args.part] if args.part else [f"{k + 1}/{PARTS}" for k in range(PARTS)]:
        code, row = run(part, args.words)
        status = max(status, code)
        rows.append(row)
        if code == pytest.ExitCode.INTERRUPTED:
            break
    table = "| part | passed | failed | skipped | seconds | cores |\n| --- | ---: | ---: | ---: | ---: | ---: |\n"
    table += "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)
    if args.output:
        Path(args.output).write_text(table, encoding="utf-8")
    print(table)
    return status


def run(part: str, words: Sequence[str]) -> tuple[int, tuple[str | int, ...]]:
    """(exit status, row of the table) of a part."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = {"BITMIRROR_CACHE": folder} | os.environ
        command = [sys.executable, "-m", "pytest", "--gpu", "--part", part, *words]
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        # An interrupt of the terminal reaches pytest too, which then still says what it did.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            if re.search(r"\d+ (passed|failed|skipped|error)", line):
                last = line
        code = process.wait()
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failed = counts.get("failed", 0) + counts.get("error", 0)
    seconds = round(time.monotonic() - begun)
    return code, (part, counts.get("passed", 0), failed, counts.get("skipped", 0), seconds, os.cpu_count() or 1)


if __name__ == "__main__":
    sys.exit(main())
