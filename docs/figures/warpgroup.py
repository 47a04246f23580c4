"""Where a product of a warpgroup, ``wgmma.m64nNk32`` of int8, finds its operands and leaves its sums."""

from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cuda.products.quantize import block_parts
from engine.cuda.warpgroups import CORE_WORDS, POSITIONS

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "A product of a warpgroup: four warps with their weights, and core matrices of activations in shared memory"
SIZE = (360, 556)
TILES = 4
"""Tiles of eight columns that are drawn."""


def core_matrices(tiles: int) -> np.ndarray:
    """[column, word of four positions]: the place of the word in a unit of a block of activations, int [8 tiles, 64].

    It is the layout of blocks in ``engine/cuda/products/quantize.py``: word (n, j, c, i) has positions 16 j + 4 i .. of
    column c of tile n, and a core matrix is what has the same n and j.
    """
    words = np.arange(block_parts(tiles)[0]).reshape(tiles, POSITIONS // 16, 8, 4)
    return words.transpose(0, 2, 1, 3).reshape(8 * tiles, POSITIONS // 4)


def sums(columns: int) -> list[list[tuple[int, int]]]:
    """[row][column]: the lane and the index in its ``dots``, as the law of the product in the simulator hands sums out."""
    from engine.cuda.runtime.simulated_warpgroups import _fragments

    places = _fragments(np.arange(16 * columns).reshape(16, columns))
    found = [[(-1, -1)] * columns for _ in range(16)]
    for lane, own in enumerate(places):
        for k, place in enumerate(own.tolist()):
            found[place // columns][place % columns] = lane, k
    return found


def facts() -> dict[str, Any]:
    """Words of core matrices, and lanes and indices of sums, for ``TILES`` tiles of eight columns."""
    return {
        "core_words": CORE_WORDS,
        "words": core_matrices(TILES).tolist(),
        "sums": sums(8 * TILES),
    }


LEFT, HIGH, WIDE, TOP = 12, 42, 52, 196


def draw(facts: dict[str, Any], page: "Page") -> None:
    """Warps on the left, core matrices above, sums where they meet; below, one core matrix."""
    words, found = np.array(facts["words"]), facts["sums"]
    tiles, right = words.shape[0] // 8, LEFT + 122
    page.text(LEFT, 20, "One product of a warpgroup: wgmma.m64nNk32", bold=True, size=14)
    page.text(LEFT, 38, "32 positions; every warp reads the same activations", "muted", 12.5)

    page.text(LEFT, 66, "activations", "red", 12.5, bold=True)
    page.text(LEFT, 82, "in shared memory,", "text", 12.5)
    page.text(LEFT, 98, "core matrices by", "text", 12.5)
    page.text(LEFT, 114, "their first word", "text", 12.5)
    for n in range(tiles):
        x = right + n * WIDE
        page.text(x + WIDE / 2, 66, f"{8 * n}–{8 * n + 7}", "muted", 12, "middle")
        for j in range(2):
            y = 74 + j * 46
            page.box(x + 2, y, WIDE - 4, 42, "red", 0.2, 0.8)
            page.text(x + WIDE / 2, y + 26, str(words[8 * n, 4 * j]), "text", 13, "middle", bold=True)
    page.text(right - 8, 136, "positions", "muted", 12, "end")
    page.text(right - 8, 152, "16–31 below", "muted", 12, "end")

    page.text(LEFT, TOP - 10, "weights, registers", "blue", 12.5, bold=True)
    page.text(right, TOP - 10, "sums, registers", "muted", 12.5, bold=True)
    for warp in range(4):
        y = TOP + warp * (HIGH + 4)
        page.box(LEFT, y, 112, HIGH, "blue", 0.2, 0.8)
        page.text(LEFT + 56, y + 18, f"warp {warp}", "text", 13, "middle", bold=True)
        page.text(LEFT + 56, y + 34, f"rows {16 * warp}–{16 * warp + 15}", "text", 12, "middle")
        for n in range(tiles):
            own = {k for row in found for _, k in row[8 * n : 8 * n + 8]}
            assert own == set(range(min(own), max(own) + 1))
            page.box(right + n * WIDE + 2, y, WIDE - 4, HIGH, "muted", 0.14, 0.8)
            page.text(right + n * WIDE + WIDE / 2, y + 26, f"{min(own)}–{max(own)}", "text", 12.5, "middle")
    y = TOP + 4 * (HIGH + 4) + 14
    page.text(right, y, "index in dots of every lane", "muted", 12)

    y += 26
    n, j = 1, 1
    page.text(LEFT, y, f"The words of core matrix {words[8 * n, 4 * j]}", bold=True)
    for c in range(8):
        page.text(LEFT + 74, y + 21 + 14.5 * c, f"column {8 * n + c}", "muted", 12, "end")
        for i in range(4):
            x = LEFT + 84 + 62 * i
            page.box(x, y + 9 + 14.5 * c, 62, 14.5, "red", 0.2, 0.6)
            page.text(x + 31, y + 21 + 14.5 * c, str(words[8 * n + c, 4 * j + i]), "text", 12, "middle")
