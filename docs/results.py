"""The tables of measured speeds: made from ``docs/results.toml``, and written into README and the pages that have them.

    python -m docs.results           write the tables anew
    python -m docs.results --check   only tell which pages are out of date

A page marks the place of a table with comments, which no reader sees::

    <!-- results: depth -->
    ...
    <!-- end of results -->

What is between them is replaced.  Ratios are computed here, so that they always belong to the rates beside them.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
DATA = Path(__file__).with_name("results.toml")

PLACE = re.compile(r"(<!-- results: ([\w-]+) -->\n)(.*?)(<!-- end of results -->)", re.S)


@dataclass(frozen=True)
class Rate:
    """Tokens per second, with a standard deviation if it was measured, and the spelling of both in the data."""

    value: float
    deviation: float | None = None

    def __str__(self) -> str:
        return spaced(self.value) + ("" if self.deviation is None else f" ± {spaced(self.deviation)}")


def spaced(value: float) -> str:
    """A number with a space before each three digits, from five digits on: 13 956."""
    whole, dot, rest = str(value).partition(".")
    groups = [whole[max(0, end - 3) : end] for end in range(len(whole), 0, -3)][::-1]
    return (" ".join(groups) if len(whole) > 4 else whole) + dot + rest


@cache
def data() -> dict[str, Any]:
    """The content of ``docs/results.toml``."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def rate(run: str, model: str, test: str) -> Rate | None:
    """A rate of a run; None if the run did not measure this test.  Raises KeyError if it did not measure the model."""
    given = data()[run]["rates"][model].get(test)
    return None if given is None else Rate(*given) if isinstance(given, list) else Rate(given)


def ratio(ours: Rate | None, theirs: Rate | None, digits: int = 2) -> str:
    """Ours divided by theirs; "" if one of them was not measured."""
    return "" if ours is None or theirs is None else f"{ours.value / theirs.value:.{digits}f}"


def times(ours: Rate | None, theirs: Rate | None) -> str:
    """Ours divided by theirs with a multiplication sign, such as "2.09 ×"; "" if one of them was not measured."""
    found = ratio(ours, theirs)
    return f"{found} ×" if found else ""


def table(header: Sequence[str], rows: Iterable[Sequence[object]], texts: int = 1) -> Iterator[str]:
    """The lines of a Markdown table.  texts: the number of columns of text, at the left; the others are numbers."""
    yield f"| {' | '.join(header)} |"
    yield "|" + " --- |" * texts + " ---: |" * (len(header) - texts)
    for row in rows:
        cells = ["" if cell is None else str(cell) for cell in row]
        yield "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


# --- the tables ------------------------------------------------------------------------------------------------

DEPTHS = ("", "@4096", "@8192", "@16384", "@32768")


def depth() -> Iterator[str]:
    """Qwen3-8B at each depth, with each type of the cache."""
    header = ["Qwen3-8B, depth", *(spaced(int(at[1:] or 0)) for at in DEPTHS)]
    rows: list[list[object]] = []
    for run, kind in (
        ("h200-depth", "f16"),
        ("h200-depth", "q8_0"),
        ("h200-depth", "q4_0"),
        ("h200-i8-answers", "i8"),
        ("h200-integer-caches", "i12"),
    ):
        rates = [rate(run, kind, "tg128" + at) for at in DEPTHS]
        rows.append([f"answer, {kind}" + (", tokens/s" if not rows else ""), *rates])
        rows.append(["relative to depth 0", "1", *(ratio(each, rates[0]) for each in rates[1:])])
    for run, kind in CACHES:
        name = "prompt (pp2048)" if kind == "f16" else "prompt"
        rows.append([f"{name}, {kind}", *(rate(run, kind, "pp2048" + at) for at in DEPTHS)])
    return table(header, rows)


CACHES = (
    ("h200-depth", "f16"),
    ("h200-depth", "q8_0"),
    ("h200-depth", "q4_0"),
    ("h200-integer-caches", "i8"),
    ("h200-integer-caches", "i12"),
)
"""The run that has the prompts with each type of the cache."""


def prompts() -> Iterator[str]:
    """Prompts of each shape beside llama.cpp's."""
    default, first = "h200-prompts-default", "h200-prompts"
    rows = []
    for name, model, run, there_run, key, at in (
        ("Qwen3-8B", "Qwen3-8B", "h200-default", "h200-default", "i8", "4096"),
        ("the same, f16 cache", "Qwen3-8B", "h200-default", "h200-default", "f16", "4096"),
        ("the same, f16 cache, 2026-11-22", "Qwen3-8B", "h200-depth", "h200-depth", "f16", "4096"),
        ("Qwen3.6-27B", "Qwen3.6-27B", default, default, "Qwen3.6-27B", "8192"),
        ("the same, f16 cache, 2026-11-22", "Qwen3.6-27B", "h200-prompts-later", first, "Qwen3.6-27B", "8192"),
        ("Qwen3.6-35B-A3B, f16 cache, 2026-11-22", "Qwen3.6-35B-A3B", first, first, "Qwen3.6-35B-A3B", "8192"),
        ("Gemma 4 12B", "Gemma 4 12B", default, default, "Gemma 4 12B", "8192"),
        ("the same, f16 cache, 2026-11-22", "Gemma 4 12B", first, first, "Gemma 4 12B", "8192"),
    ):
        ours, there = rate(run, key, "pp2048"), rate(there_run, key, f"pp2048@{at}")
        rival, rival_there = (rate("h200-llama-cpp", model, test) for test in ("pp2048", f"pp2048@{at}"))
        own = [None, None] if name.startswith("the same") else [rival, rival_there]
        rows.append([name, ours, own[0], ratio(ours, rival), at, there, own[1], ratio(there, rival_there)])
    return table(["shape", "pp2048", "llama.cpp", "ratio", "at depth", "pp2048 there", "llama.cpp", "ratio"], rows)


def hybrids() -> Iterator[str]:
    """Answers of hybrids and mixtures beside llama.cpp's."""
    rows = []
    for model in ("Qwen3.6-27B", "Qwen3.6-35B-A3B"):
        for test, name in (("tg128", "tg128"), ("tg128@8192", "tg128 at depth 8192")):
            ours, theirs = rate("h200-hybrids", model, test), rate("h200-llama-cpp", model, test)
            rows.append([model, name, ours, theirs, ratio(ours, theirs)])
    return table(["shape", "test", "bitmirror, tokens/s", "llama.cpp", "ratio"], rows, texts=2)


def gemma4() -> Iterator[str]:
    """Answers of Gemma 4 beside llama.cpp's."""
    rows: list[list[object]] = []
    for model, given in data()["h200-gemma4"]["rates"].items():
        shape, _, kind = model.partition(", ")
        for test in given:
            ours = rate("h200-gemma4", model, test)
            theirs = rate("h200-llama-cpp", "Gemma 4 12B", test) if model == "12B, f16" else None
            rows.append([shape, kind, test.replace("@", " at depth "), ours, theirs, ratio(ours, theirs)])
    return table(["shape", "cache", "test", "bitmirror, tokens/s", "llama.cpp", "ratio"], rows, texts=3)


def users() -> Iterator[str]:
    """Rates of many users, beside llama.cpp's."""
    counts = ("1", "8", "16", "32", "64", "96", "128")
    ours, mixtures, theirs = "h200-users", "h200-users-mixture", "h200-users-llama-cpp"
    rows: list[list[object]] = [
        [name, *(rate(ours, name, n) for n in counts)]
        for name in ("Qwen3-8B", "llama.cpp", "prompts", "prompts, llama.cpp")
    ]
    rows.insert(2, ["median from token to token, ms", *data()[ours]["ms_between_tokens"]])
    mixture = "Qwen3-30B-A3B"
    rows.append([mixture, *(rate(mixtures, mixture, n) for n in counts)])
    rows.append(["llama.cpp", *(rate(theirs, mixture, n) for n in counts)])
    rows.append(["prompts", *(rate(mixtures, "prompts", n) for n in counts)])
    return table(["users", *counts], rows)


def short_prompts() -> Iterator[str]:
    """Prompts of a single pass, now and with the kernels of earlier days."""
    tests, rows = ("pp256", "pp512", "pp1024", "pp2048"), []
    for when, run in (("", "h200-short-prompts"), (", f16 cache, 2026-11-22", "h200-short-prompts-before")):
        rows += [[model + when, *(rate(run, model, test) for test in tests)] for model in data()[run]["rates"]]
    return table(["shape", *tests], rows)


def new_lengths() -> Iterator[str]:
    """Prompts of lengths that come for the first time, for the second time, and later; and before passes were started while
    they are recorded."""
    lines: list[list[object]] = []
    for model, tests in data()["h200-new-lengths"]["rates"].items():
        for n in dict.fromkeys(int(test.partition(",")[0][2:]) for test in tests):
            runs = ("h200-new-lengths-before", "h200-new-lengths")
            found = [[rate(run, model, f"pp{n}, {when}") for when in ("first", "second")] for run in runs]
            lines.append([model, n, *found[0], *found[1], rate(runs[1], model, f"pp{n}, later")])
    header = ["shape", "tokens", "first time, before", "second", "first time", "second", "later"]
    return table(header, lines)


def users_drafts() -> Iterator[str]:
    """Rates of several users with drafts, and relative to none: each request with a number of its own, and all together."""
    runs = {"h200-users-drafts": ("1", "2", "3", "usual"), "h200-users-drafts-together": ("3", "usual")}
    rows: list[list[object]] = []
    for number in data()["h200-users-drafts"]["rates"]:
        row: list[object] = [number]
        for run, counts in runs.items():
            plain = rate(run, number, "none")
            row += [plain, *(f"{rate(run, number, n)} ({times(rate(run, number, n), plain)})" for n in counts)]
        rows.append(row)
    header = ["users", "no drafts", "at most 1", "at most 2", "at most 3", "at most 4, as usual"]
    return table([*header, "no drafts, later", "at most 3", "as usual"], rows)


def many_users() -> Iterator[str]:
    """A sentence about 16 and 128 users."""
    one, sixteen, most = (rate("h200-users", "Qwen3-8B", n) for n in ("1", "16", "128"))
    times_one, theirs = ratio(sixteen, one, 1), ratio(most, rate("h200-users", "llama.cpp", "128"), 1)
    yield f"Several answers at the same time share the weights that a pass reads: 16 users of Qwen3-8B get {sixteen}"
    yield f"tokens per second, {times_one} times what one gets alone, and 128 users {most}, {theirs} times llama.cpp's."
    yield "[Continuous batching](scheduler.md#figures) has the table."


CPU = ("smollm2-135m, Q4_1", "gemma3-270m, Q4_K_M", "pycoder, Q4_K_M")
RANDOM = "random, Qwen3-1.7B's shape, Q4_K_M"
BUILDS = ("llama.cpp, native", "llama.cpp, portable")


def cpu() -> Iterator[str]:
    """Both engines on a CPU."""
    rows: list[list[object]] = []
    for model in (*CPU, RANDOM):
        named = ""
        for test, given in data()["cpu"]["rates"][model].items():
            kind, threads = test.split(", threads: ")
            kind = {"p": "prompt", "t": "answer"}[kind[0]]
            row: list[object] = [model if named == "" else "", kind if kind != named else "", threads, spaced(given)]
            named = kind
            for build in BUILDS:
                theirs = rate("cpu", f"{model}, {build}", test)
                low, high = data()["cpu"]["ratios"][f"{model}, {build}"][test]
                row += [theirs, ratio(Rate(given), theirs), f"{low:.2f}–{high:.2f}"]
            rows.append(row)
    theirs_header = [column for build in BUILDS for column in (build, "ratio", "from–to")]
    return table(["model", "test", "threads", "ours", *theirs_header], rows, texts=2)


def cpu_memory() -> Iterator[str]:
    """What answers on a CPU read, beside a plain read of memory."""
    rows: list[list[object]] = []
    for model, read in data()["cpu"]["answers_read"].items():
        for n, (threads, (gigabytes, share)) in enumerate(read.items()):
            rows.append([model if n == 0 else "", threads, gigabytes, f"{share} %"])
    return table(["model", "threads", "GB/s", "of memory"], rows)


def glance() -> Iterator[str]:
    """Speeds relative to llama.cpp's."""
    rows: list[list[object]] = []
    latest = "h200-default", "i8"
    for model, at, answers, prompt, prompt_there in (
        ("Qwen3-8B", "4096", latest, latest, latest),
        ("Qwen3.6-27B", "8192", ("h200-hybrids", ""), ("h200-prompts-default", ""), ("h200-prompts", "")),
        ("Qwen3.6-35B-A3B", "8192", ("h200-hybrids", ""), ("h200-prompts", ""), ("h200-prompts", "")),
        (
            "Gemma 4 12B",
            "8192",
            ("h200-gemma4", "12B, f16"),
            ("h200-prompts-default", ""),
            ("h200-prompts-default", ""),
        ),
    ):
        row: list[object] = [model, "H200"]
        for (run, key), test in (
            (answers, "tg"),
            (answers, f"tg@{at}"),
            (prompt, "pp2048"),
            (prompt_there, f"pp2048@{at}"),
        ):
            rival = (run, "llama.cpp", "tg64") if answers is latest else ("h200-llama-cpp", model, "tg128")
            each = test.replace("tg", rival[2])
            row.append(times(rate(run, key or model, each), rate(*rival[:2], each)))
        rows.append([*row[:3], at, *row[3:]])
    for model in CPU:
        tests = ("tg64, threads: 2", "pp256, threads: 2")
        answer, prompt_ratio = (
            times(rate("cpu", model, test), rate("cpu", f"{model}, {BUILDS[0]}", test)) for test in tests
        )
        rows.append([model.partition(",")[0], "CPU", answer, "", "", prompt_ratio, ""])
    return table(["model", "device", "answer", "at depth", "answer there", "prompt", "prompt there"], rows, texts=2)


def readme_cpu() -> Iterator[str]:
    """Both engines on a CPU with two threads."""
    rows = [
        [model, *(rate("cpu", each, f"{test}, threads: 2") for test in ("pp256", "tg64") for each in engines(model))]
        for model in CPU
    ]
    theirs = [build.removeprefix("llama.cpp, ") for build in BUILDS]
    header = ["model", "prompt: ours", f"llama.cpp, {theirs[0]}", theirs[1]]
    return table([*header, "answer: ours", f"llama.cpp, {theirs[0]}", theirs[1]], rows)


def engines(model: str) -> list[str]:
    """The names of the rates of a model on a CPU: ours, and those of each build of llama.cpp."""
    return [model, *(f"{model}, {build}" for build in BUILDS)]


def readme_gpu() -> Iterator[str]:
    """Qwen3-8B on a GPU, with the default cache and with float16."""
    rows: list[list[object]] = []
    for name, test in (
        ("answer, at the start", "tg64"),
        ("answer, after 4096 tokens", "tg64@4096"),
        ("answer, after 32 768 tokens", "tg64@32768"),
        ("prompt of 2048 tokens, at the start", "pp2048"),
        ("prompt of 2048 tokens, after 4096 others", "pp2048@4096"),
        ("prompt of 2048 tokens, after 32 768 others", "pp2048@32768"),
    ):
        ours, wide, theirs = (rate("h200-default", kind, test) for kind in ("i8", "f16", "llama.cpp"))
        rows.append([name, *(each and spaced(round(each.value)) for each in (ours, wide, theirs)), ratio(ours, theirs)])
    return table(["tokens per second", "ours", "with an `f16` cache", "llama.cpp", "ratio"], rows)


def divided() -> Iterator[str]:
    """Models divided between a GPU and the CPU."""
    rows: list[list[object]] = []
    for name, key, answer in (
        ("Qwen3-8B, half of the layers (`-ngl 18`)", "8B", "tg64"),
        ("Qwen3-30B-A3B, the experts (`-cmoe`)", "30B-A3B", "tg64"),
        ("Qwen3.6-27B, half of the layers (`-ngl 32`)", "27B", "tg32"),
    ):
        row: list[object] = [name]
        for test in ("pp512", answer):
            ours, theirs = (rate("h200-divided", f"{key}, {engine}", test) for engine in ("ours", "llama.cpp"))
            row += [ours, theirs, ratio(ours, theirs)]
        rows.append(row)
    header = ["on the CPU", "prompt: ours", "llama.cpp", "ratio", "answer: ours", "llama.cpp", "ratio"]
    return table(header, rows)


def pair() -> Iterator[str]:
    """Answers of one user, of models whose layers two GPUs share."""
    rows: list[list[object]] = []
    for name in data()["h200-pair"]["rates"]:
        one, two = (rate("h200-pair", name, how) for how in ("one", "two"))
        rows.append([name, one, two, ratio(two, one)])
    return table(["model", "one GPU", "two GPUs", "ratio"], rows)


STEPS = (
    "a thread for each row, byte by byte",
    "four weights at a time",
    "a warp for each row",
    "sixteen bytes in each load",
    "a warp for each chain",
    "tensor cores",
    "two records",
    "the kernel of the engine",
)
STEPS_OF_ATTENTION = (
    "a block for each head",
    "a block for each chunk",
    "keys as threads read them",
    "heads that share keys share a block",
    "factors before sums",
    "a whole chunk in flight",
)
"""The steps of ``examples/ladder``."""


def ladder() -> Iterator[str]:
    """The time of each step of the product, and the speed at which it reads weights, for two matrices."""
    found = data()["h200-ladder"]["microseconds"]
    shapes = [(rows, found[f"{rows} x 4096"]) for rows in (24576, 4096)]
    rows = [
        [i + 1, name, *(cell for n, us in shapes for cell in (us[i], round(n * 4096 * 144 / 256 / us[i] / 1e3)))]
        for i, name in enumerate(STEPS)
    ]
    return table(["", "step", "µs, 24 576 rows", "GB/s", "µs, 4096 rows", "GB/s"], rows, 2)


def ladder_attention() -> Iterator[str]:
    """The time of each step of attention, and the speed at which it reads keys and values."""
    found = data()["h200-ladder"]["microseconds"]["attention"]
    n_bytes = 2 * 2 * 8 * 128 * 8192
    rows = [[i + 1, STEPS_OF_ATTENTION[i], us, round(n_bytes / us / 1e3)] for i, us in enumerate(found)]
    return table(["", "step", "µs", "GB/s"], rows, 2)


def quick_tests() -> Iterator[str]:
    """What the quick tests take, in round numbers."""
    found = data()["quick-tests"]
    count, minutes = round(found["n_tests"], -2), max(1, round(found["seconds"] / 60))
    yield f"This runs the quick tests, about {spaced(count)}, in about {minutes} minutes on two cores."


def first_runs() -> Iterator[str]:
    """The least processor time of a first run and of a later one, before the default cache changed, after it, and now."""
    found = data()["cpu-first-run"]["seconds"]
    rows = [[name, *(f"{min(seconds[kind]):.2f} s" for kind in ("first", "later"))] for name, seconds in found.items()]
    return table(["pycoder, 16 tokens", "first run ever", "every later run"], rows)


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "glance": glance,
    "depth": depth,
    "prompts": prompts,
    "hybrids": hybrids,
    "gemma4": gemma4,
    "users": users,
    "many-users": many_users,
    "short-prompts": short_prompts,
    "new-lengths": new_lengths,
    "users-drafts": users_drafts,
    "cpu": cpu,
    "cpu-memory": cpu_memory,
    "first-runs": first_runs,
    "readme-cpu": readme_cpu,
    "readme-gpu": readme_gpu,
    "divided": divided,
    "pair": pair,
    "ladder": ladder,
    "ladder-attention": ladder_attention,
    "quick-tests": quick_tests,
}
"""What the places of pages are filled with, by name."""


def pages() -> list[Path]:
    """README and the pages of the book."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """The text of a page with its tables made anew.  Raises KeyError for a name that is not in ``TABLES``."""
    return PLACE.sub(lambda place: place[1] + "".join(f"{line}\n" for line in TABLES[place[2]]()) + place[4], text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or with ``--check`` only tell which pages are out of date.  Returns the exit status."""
    top = argparse.ArgumentParser(prog="python -m docs.results", description="Write the tables of measured speeds.")
    top.add_argument(
        "--check", action="store_true", help="write nothing; the exit status is 1 if a page is out of date"
    )
    check = top.parse_args(argv).check
    stale = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            stale += 1
            print(f"{page.relative_to(REPOSITORY)} {'is out of date' if check else 'was written'}")
            if not check:
                page.write_text(new, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
