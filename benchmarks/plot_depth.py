"""Tokens per second of answers and prompts over the number of tokens in the cache, as an SVG.

``python -m engine.bench --shape qwen3-8b:Q4_K_M --device cuda -p 512 -n 128 -d 0,4096,8192,16384,32768 -r 3 -o json >
qwen3-8b.json`` and ``python -m benchmarks.plot_depth qwen3-8b.json > docs/images/depth.svg``

Each length of prompt or answer is a line of its own.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.svg import Axis, colors, curve, decades, dot, image, label, legend, line, measurements

WIDTH, HEIGHT = 780, 400
TOP, BOTTOM = 102, 344
PLOT = 300
PANELS = (("n_gen", 64, "answers"), ("n_prompt", 442, "prompts"))

Test = dict[str, Any]


def lines(tests: Sequence[Test], count: str) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """(depth, tokens per second) of each model and number of tokens, ``count`` being "n_gen" or "n_prompt"."""
    found: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for test in tests:
        if test[count]:
            found.setdefault((test["model"], test[count]), []).append((test["n_depth"], test["avg_ts"]))
    return {key: sorted(places) for key, places in found.items()}


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from low to high."""
    found, power = [], low
    while power <= high:
        found += [step * power for step in (1, 2, 5) if step * power <= high]
        power *= 10
    return found


def panel(
    tests: Sequence[Test], count: str, left: float, title: str, deepest: int, named: dict[str, str]
) -> Iterator[str]:
    """One half: axes, and a line for each model."""
    found = lines(tests, count)
    rates = [rate for places in found.values() for _, rate in places]
    low, high = decades(rates, min(rates, default=100), max(rates, default=1000))
    x, y = Axis(0, deepest, left, left + PLOT, log=False), Axis(low, high, BOTTOM, TOP)
    yield label(left, TOP - 18, title, extra=' font-weight="bold"')
    for rate in ticks(low, high):
        yield line(left, y(rate), left + PLOT, y(rate))
        yield label(left - 8, y(rate) + 4, f"{rate:g}", "end")
    for k in range(5):
        depth = deepest * k // 4
        yield label(x(depth), BOTTOM + 18, str(depth), "middle")
    yield label(left + PLOT / 2, BOTTOM + 40, "tokens in the cache", "middle")
    for (model, _), places in found.items():
        yield curve([(x(depth), y(rate)) for depth, rate in places], named[model])
        yield from (dot(x(depth), y(rate), named[model]) for depth, rate in places)


def figure(tests: Sequence[Test]) -> str:
    """The whole image."""
    named = colors(list(dict.fromkeys(test["model"] for test in tests)))
    deepest = max((test["n_depth"] for test in tests), default=0) or 4
    parts = [
        label(8, 18, "tokens per second over the number of tokens in the cache"),
        *legend(8, 40, WIDTH, named),
    ]
    for count, left, title in PANELS:
        parts += panel(tests, count, left, title, deepest, named)
    return image(WIDTH, HEIGHT, "Tokens per second of answers and prompts, over the depth of the context", parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the image."""
    parser = argparse.ArgumentParser(description="Print a plot of rates over depth, as SVG.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="output of python -m engine.bench -o json")
    print(figure(measurements(parser.parse_args(argv).files)), end="")


if __name__ == "__main__":
    main()
