"""Where plots get their numbers: output of ``engine.bench``, or tables of a page of the book."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engine.errors import UsageError

BOOK = Path(__file__).parent.parent / "docs"


COUNTS = ("n_prompt", "n_gen", "n_depth")


def measurements(paths: Iterable[str]) -> list[dict[str, Any]]:
    """Read the output of ``python -m engine.bench``: arrays of tests, or tests in sequence (``-o json``, ``-o jsonl``), or
    lines of text (``-o csv``), also of a run that was interrupted."""
    tests: list[dict[str, Any]] = []
    decoder = json.JSONDecoder()
    for path in paths:
        text = Path(path).read_text(encoding="utf-8").strip()
        if text.startswith('"'):
            rows = csv.DictReader(text.splitlines())
            tests += [
                row | {name: int(row[name]) for name in COUNTS} | {"avg_ts": float(row["avg_ts"])} for row in rows
            ]
            continue
        while text:
            value, end = decoder.raw_decode(text)
            tests += value if isinstance(value, list) else [value]
            text = text[end:].lstrip()
    return tests


def measured(model: str, rate: float, prompt: int = 0, answer: int = 0, depth: int = 0) -> dict[str, Any]:
    """A test of ``engine.bench`` with the fields that plots use; rate: tokens per second."""
    return {"model": model, "n_prompt": prompt, "n_gen": answer, "n_depth": depth, "avg_ts": rate}


def table(page: str, *header: str) -> list[list[str]]:
    """The rows of the first table of a page of the book whose header begins with these cells.  Raises UsageError if there is
    none."""
    lines = (BOOK / page).read_text(encoding="utf-8").splitlines()
    split = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else [] for line in lines
    ]
    for i, cells in enumerate(split):
        if tuple(cells[: len(header)]) == header:
            rows = split[i + 2 :]
            ends = [n for n, row in enumerate(rows) if not row]
            return rows[: ends[0]] if ends else rows
    raise UsageError(f"docs/{page} has no table whose header begins with {' | '.join(header)}.")


def number(cell: str) -> float:
    """The number in a cell such as "13 956 ± 9"."""
    return float(cell.partition("±")[0].replace(" ", "").replace("\N{NO-BREAK SPACE}", ""))
