"""The table of ``engine/parity.py``: the comparisons and the number of bits that differ."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.verify.check import Check, Site


@dataclass
class Line:
    """A line of the table: the subject, its shapes and layers (each once, in order), the number of values, the number of
    differing bits, and the seconds between these comparisons and the ones before each."""

    compared: dict[str, None] = field(default_factory=dict)
    shapes: dict[str, None] = field(default_factory=dict)
    layers: dict[str, None] = field(default_factory=dict)
    values: int = 0
    bits: int = 0
    seconds: float = 0.0


class Tally:
    """The comparisons so far, as lines of a table in order; comparisons of the same subject share a line."""

    HEAD = ("operation", "tensors", "kernel", "compared", "shape of a row", "layers", "values", "differing bits")

    def __init__(self, verbose: bool = False) -> None:
        self.values = 0
        self._verbose = verbose
        self._lines: dict[tuple[str, ...], Line] = {}
        self._last = time.perf_counter()

    def note(self, site: "Site", check: "Check") -> None:
        """Add a comparison of a kernel's output."""
        layer = "-" if site.layer is None else str(site.layer)
        key = (
            site.operation,
            site.tensors,
            site.variant if self._verbose else site.kernel,
            layer if self._verbose else "",
        )
        self._add(key, check, check.what, " x ".join(map(str, check.cpu.shape[1:])), layer)

    def whole(self, what: str, how: str, check: "Check") -> None:
        """Add a comparison of whole passes."""
        self._add((what, "", "", ""), check, how, "", "-")

    def _add(self, key: tuple[str, ...], check: "Check", what: str, shape: str, layer: str) -> None:
        line = self._lines.setdefault(key, Line())
        line.compared[what] = line.shapes[shape] = line.layers[layer] = None
        values, bits = check.values, int(check.differing.sum())
        line.values += values
        line.bits += bits
        self.values += values
        now = time.perf_counter()
        line.seconds += now - self._last
        self._last = now

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines as plain values, for a program."""
        for (operation, tensors, kernel, _), line in self._lines.items():
            yield {
                "operation": operation,
                "tensors": tensors,
                "kernel": kernel,
                "compared": list(line.compared),
                "shapes": list(line.shapes),
                "layers": list(line.layers),
                "values": line.values,
                "differing_bits": line.bits,
                "seconds": round(line.seconds, 3),
            }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The cells of each line, in the order of ``HEAD``."""
        for (operation, tensors, kernel, _), line in self._lines.items():
            layers = next(iter(line.layers)) if self._verbose or "-" in line.layers else str(len(line.layers))
            words = (operation, tensors, kernel, ", ".join(line.compared), ", ".join(line.shapes))
            yield (*words, layers, str(line.values), str(line.bits))
