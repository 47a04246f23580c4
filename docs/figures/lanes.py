"""Which lane of a warp holds what in one product of the tensor cores, ``mma.m16n8k32`` of int8."""

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType as T

from engine.cuda.products.repack import TILE, record
from engine.cuda.products.unpack import unpack
from engine.gguf.quants import FORMATS

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "The lanes of a warp that hold the operands and the sums of one product of the tensor cores"
SIZE = (360, 690)
SHOWN = 6

Place = tuple[int, int]
"""A lane and one of its registers."""


def weights() -> list[list[Place]]:
    """[row][word of four positions]: the lane, and the register a0 .. a3.

    They follow from a record of Q8_0, of which a lane reads its four registers as one vector.
    """
    entry, source = FORMATS[T.Q8_0], record(T.Q8_0)
    assert unpack(T.Q8_0).pieces[0] == (4, 0, "lane")
    first = next(field.start for field in entry.fields if field.name == "quants")
    found = [[(-1, -1)] * 8 for _ in range(TILE)]
    for word in range(4 * 32):
        row, byte = divmod(int(source[4 * word]), entry.block_bytes)
        assert source[4 * word : 4 * word + 4].tolist() == [row * entry.block_bytes + byte + k for k in range(4)]
        found[row][(byte - first) // 4] = divmod(word, 4)
    return found


def activations() -> list[list[Place]]:
    """[column][word of four positions]: the lane, and the register b0 or b1.

    They follow from the layout of units of 32 in ``engine/cuda/products/quantize.py``, words [32, 2], of which a lane reads
    its two as one vector: word (4 c + i, h) has positions 16 h + 4 i .. of column c.
    """
    return [[(4 * c + i, h) for h in range(2) for i in range(4)] for c in range(8)]


def operands(a: np.ndarray, b: np.ndarray, of_a: list[list[Place]], of_b: list[list[Place]]) -> list[tuple[int, ...]]:
    """The six registers of each lane for weights a, int8 [16, 32], and activations b, int8 [8, 32]."""
    given = np.zeros((32, 6), np.uint32)
    for first, matrix, places in ((0, a, of_a), (4, b, of_b)):
        words = np.ascontiguousarray(matrix).view(np.uint32)
        for row, line in enumerate(places):
            for word, (lane, register) in enumerate(line):
                given[lane, first + register] = words[row, word]
    return [tuple(int(word) for word in lane) for lane in given]


def sums(of_a: list[list[Place]], of_b: list[list[Place]]) -> list[list[Place]]:
    """[row][column]: the lane, and which of its four sums.

    They are where the law of the product in the simulator puts a 1 whose factors are in this row and this column.
    """
    from engine.cuda.runtime.simulator import _mma_law

    found = [[(-1, -1)] * 8 for _ in range(16)]
    for row in range(16):
        for column in range(8):
            a, b = np.zeros((16, 32), np.int8), np.zeros((8, 32), np.int8)
            a[row, 0] = b[column, 0] = 1
            ((lane, k),) = np.argwhere(_mma_law(operands(a, b, of_a, of_b))).tolist()
            found[row][column] = lane, k
    return found


def facts() -> dict[str, Any]:
    """Lane and register of each word of the operands, and of each sum."""
    of_a, of_b = weights(), activations()
    return {"weights": of_a, "activations": of_b, "sums": sums(of_a, of_b), "shown": SHOWN}


WORD, ROW, LEFT, TOP = 19, 17, 28, 238
OPERANDS = ("blue", "green", "purple", "orange")
"""Colors of the registers a0 .. a3."""


def draw(facts: dict[str, Any], page: "Page") -> None:
    """Weights on the left, activations above, and where a row and a column meet, their sum."""
    right, shown = LEFT + 8 * WORD + 12, facts["shown"]
    above = TOP - 12 - 8 * ROW

    def cell(x: float, y: float, width: float, lane: int, color: str) -> None:
        page.box(x, y, width, ROW, color, 0.6 if lane == shown else 0.13, 0.6)
        color = "text" if lane == shown else "muted"
        page.text(x + width / 2, y + 13, str(lane), color, 12, "middle", bold=lane == shown)

    page.text(8, 20, "One product of a warp: mma.m16n8k32", bold=True, size=14)
    page.text(8, 38, f"The numbers in cells are lanes. Lane {shown} is marked.", "muted", 12.5)
    page.text(8, above + 12, "8 activation rows →", "red", 12.5, bold=True)
    page.text(8, above + 29, "32 positions, downwards,", "text", 12.5)
    page.text(8, above + 46, "four to a cell", "text", 12.5)
    page.text(8, TOP - 43, "16 weight rows ↓", "blue", 12.5, bold=True)
    page.text(8, TOP - 26, "the same 32 positions,", "text", 12.5)
    page.text(8, TOP - 9, "four to a cell", "text", 12.5)
    for row, line in enumerate(facts["weights"]):
        y = TOP + row * ROW
        page.text(LEFT - 5, y + 13, str(row), "muted", 12, "end")
        for word, (lane, register) in enumerate(line):
            cell(LEFT + word * WORD, y, WORD, lane, OPERANDS[register])
    for column, line in enumerate(facts["activations"]):
        x = right + column * WORD
        page.text(x + WORD / 2, above - 5, str(column), "muted", 12, "middle")
        for word, (lane, _) in enumerate(line):
            cell(x, above + word * ROW, WORD, lane, "red")
    own = []
    for row, line in enumerate(facts["sums"]):
        for column in range(0, 8, 2):
            (lane, k), (other, following) = line[column : column + 2]
            assert lane == other and following == k + 1  # two sums of a lane are side by side
            cell(right + column * WORD, TOP + row * ROW, 2 * WORD, lane, "muted")
            if lane == shown:
                own.append((row, column))

    y = TOP + 16 * ROW + 26
    page.text(8, y, f"Lane {shown} holds", bold=True)
    named = (("a", "weight", facts["weights"], OPERANDS), ("b", "activation", facts["activations"], ("red", "red")))
    for name, kind, lines, colors in named:
        words = [
            (register, row, 4 * word)
            for row, line in enumerate(lines)
            for word, (lane, register) in enumerate(line)
            if lane == shown
        ]
        for register, row, first in sorted(words):
            y += 17
            page.text(8, y, f"{name}{register}", colors[register], 12.5, mono=True, bold=True)
            page.text(38, y, f"{kind} row {row}, positions {first} to {first + 3}", "text", 12.5)
    for row, column in own:
        y += 17
        page.text(38, y, f"two sums: weight row {row}, activation rows {column}, {column + 1}", "text", 12.5)
