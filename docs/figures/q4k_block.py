"""A block of Q4_K: the first one of a matrix of the bundled model, byte by byte."""

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as reference

from docs.figures import bundled
from engine.cpu.embed import dequantize
from engine.gguf.quants import FORMATS

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "A block of Q4_K, byte by byte"
SIZE = (480, 620)
TENSOR = "blk.0.attn_q.weight"
SHOWN = 8


def facts() -> dict[str, Any]:
    """The bytes of the block, its scales, and its first weights, the same in ``gguf.quants``."""
    kind = GGMLQuantizationType.Q4_K
    entry = FORMATS[kind]
    tensor = bundled.file().tensors[TENSOR]
    assert tensor.type == kind
    data = np.array(tensor.data[: entry.block_bytes])
    weights = dequantize(kind, data)
    assert np.array_equal(weights, reference(data, kind))
    factors = data[:4].view(np.float16).astype(np.float64)
    low, middle, high = data[4:16].astype(int).reshape(3, 4)
    scales = [*(low & 63), *(high & 15 | low >> 6 << 4)]
    minimums = [*(middle & 63), *(high >> 4 | middle >> 6 << 4)]
    pairs = [[int(scale), int(minimum)] for scale, minimum in zip(scales, minimums, strict=True)]
    # The layout that the figure draws gives the same weights.
    nibbles = data[16:].reshape(4, 32)
    numbers = np.stack([nibbles & 15, nibbles >> 4], axis=1).reshape(8, 32)
    scale, minimum = np.array(pairs, np.float64).T[:, :, None]
    expected = factors[0] * scale * numbers - factors[1] * minimum
    assert np.allclose(weights.reshape(8, 32), expected, rtol=1e-5, atol=1e-7)
    return {
        "tensor": TENSOR,
        "weights": entry.block,
        "bytes": [int(byte) for byte in data],
        "factors": [f"{number:.6f}" for number in factors],
        "pairs": pairs,
        "first": [f"{weight:.4f}" for weight in weights[:SHOWN]],
    }


LEFT, CELL, ROW = 28, 27.4, 23


def cell(i: int) -> tuple[float, float]:
    """The upper left corner of byte i in the table of 16 columns."""
    return LEFT + i % 16 * CELL, 54 + i // 16 * ROW


def kind(i: int) -> str:
    """The color of byte i."""
    return "red" if i < 2 else "purple" if i < 4 else "orange" if i < 16 else "blue"


def bits(page: "Page", x: float, y: float, byte: int, runs: list[tuple[int, str]]) -> None:
    """The bits of a byte, high to low, in runs of (count, color)."""
    text = f"{byte:08b}"
    for count, color in runs:
        page.box(x, y - 14, count * 9.2, 19, color, 0.2, 0.7)
        for i, bit in enumerate(text[:count]):
            page.text(x + 9.2 * i + 4.6, y, bit, color, 13, "middle", mono=True)
        text, x = text[count:], x + count * 9.2


def draw(facts: dict[str, Any], page: "Page") -> None:
    """All bytes, then the bit fields of the scales, then the first weights."""
    data, pairs = facts["bytes"], facts["pairs"]
    page.text(LEFT, 22, f"{len(data)} bytes for {facts['weights']} weights", bold=True)
    page.text(LEFT, 40, f"the first block of {facts['tensor']}", "muted", 12.5)
    for i, byte in enumerate(data):
        x, y = cell(i)
        page.box(x, y, CELL, ROW, kind(i), 0.2, 0.7)
        page.text(x + CELL / 2, y + 16, f"{byte:02x}", "text", 13, "middle", mono=True)
        if i % 16 == 0:
            page.text(LEFT - 5, y + 16, str(i), "muted", 12, "end")
    y = 54.0 + 9 * ROW + 20
    names = [("d", "red"), ("dmin", "purple"), ("scales, minimums: 16 × 6 bits", "orange"), ("256 × 4 bits", "blue")]
    for x, (name, color) in zip((0, 40, 104, 330), names, strict=True):
        page.box(LEFT + x, y - 10, 11, 11, color, 0.35, 0.7)
        page.text(LEFT + x + 16, y, name, color)

    y += 34
    page.text(LEFT, y, "Scales and minimums", bold=True)
    d, dmin = facts["factors"]
    page.text(LEFT + 172, y, f"d = {d}, dmin = {dmin}", "muted", 12.5)
    y += 20
    heads = ("bytes 4–7", "bytes 8–11", "bytes 12–15")
    places = (LEFT, LEFT + 96, LEFT + 192)
    for at, head in zip(places, heads, strict=True):
        page.text(at, y, head, "muted", 12.5)
    page.text(LEFT + 290, y, "sub-block: scale, minimum", "muted", 12.5)
    for i in range(4):
        y += 25
        rows = ((data[4 + i], [(2, "green"), (6, "red")]), (data[8 + i], [(2, "green"), (6, "purple")]))
        for at, (byte, runs) in zip(places, rows, strict=False):
            bits(page, at, y, byte, runs)
        bits(page, places[2], y, data[12 + i], [(4, "purple"), (4, "red")])
        for b, at in ((i, 290), (i + 4, 372)):
            scale, minimum = pairs[b]
            page.text(LEFT + at, y, f"{b}:", "muted", 13)
            page.text(LEFT + at + 36, y, str(scale), "red", 13, "end")
            page.text(LEFT + at + 62, y, str(minimum), "purple", 13, "end")
    y += 24
    page.text(LEFT, y, "sub-blocks 0–3: six low bits of one byte.", "muted", 12.5)
    y += 17
    page.text(LEFT, y, "4–7: a nibble of bytes 12–15 and, above it, two green bits of the row.", "muted", 12.5)

    y += 34
    page.text(LEFT, y, f"The first {SHOWN} weights", bold=True)
    page.text(LEFT + 172, y, "d · scale · nibble − dmin · minimum", "muted", 12.5)
    step = 16 * CELL / SHOWN
    for i in range(SHOWN):
        byte, x = data[16 + i], LEFT + i * step
        page.box(x + 4, y + 12, step / 2 - 4, 22, "muted", 0.05, 0.7)
        page.box(x + step / 2, y + 12, step / 2 - 4, 22, "blue", 0.3, 0.7)
        page.text(x + step / 4 + 2, y + 28, f"{byte >> 4:x}", "muted", 13, "middle", mono=True)
        page.text(x + step * 3 / 4 - 2, y + 28, f"{byte & 15:x}", "text", 13, "middle", mono=True)
        page.line([(x + step * 3 / 4 - 2, y + 34), (x + step / 2, y + 48)], "blue", 1)
        page.text(x + step / 2, y + 62, facts["first"][i].replace("-", "−"), "text", 12.5, "middle")
    page.text(LEFT, y + 86, "low nibbles of a run of 32 bytes are one sub-block,", "muted", 12.5)
    page.text(LEFT, y + 103, "its high nibbles the next one", "muted", 12.5)
