"""A record of the CPU: how the bytes of eight blocks of Q4_K of the bundled model are arranged."""

from typing import TYPE_CHECKING, Any

import numpy as np

from docs.figures import bundled
from engine.cpu.products.repack import ROWS, fields_of, make_records
from engine.gguf.quants import format_of
from engine.ops.weight import Weight

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "Eight blocks of Q4_K as one record"
SIZE = (480, 622)
TENSOR = "blk.0.attn_q.weight"


def facts() -> dict[str, Any]:
    """The first blocks of eight rows, and the record that they become."""
    tensor = bundled.file().tensors[TENSOR]
    entry = format_of(tensor.type)
    rows, columns = tensor.shape
    data = tensor.data.reshape(rows, -1)
    weight = Weight(TENSOR, entry, columns, data)
    records = make_records(weight, 1, lambda kernel, *given, items: kernel(*given, 0, items))
    record = records.data[0, 0, : ROWS * entry.block_bytes]
    return {
        "tensor": TENSOR,
        "format": entry.name,
        "fields": [[source, pieces * size, size] for source, pieces, size, _ in fields_of(entry).tolist()],
        "blocks": np.array(data[:ROWS, : entry.block_bytes]).tolist(),
        "record": record.tolist(),
    }


LEFT, CELL, ROW = 52, 26, 20
PARTS = (("d", "red"), ("dmin", "purple"), ("scales and minimums", "orange"), ("nibbles", "blue"))


def cells(page: "Page", y: float, found: list[int], color: str, each: int, first: int = 0) -> None:
    """Bytes in a row, in groups of ``each``, whose numbers are those of weight rows from ``first`` on."""
    for i, byte in enumerate(found):
        x, row = LEFT + i * CELL, first + i // each
        page.box(x, y, CELL, ROW, color, 0.12 + 0.2 * (row % 2), 0.7)
        page.text(x + CELL / 2, y + 15, f"{byte:02x}", "text", 13, "middle", mono=True)
    for group in range(len(found) // each):
        x = LEFT + (group + 0.5) * each * CELL
        page.text(x, y - 4, str(first + group), "muted", 12, "middle")


def draw(facts: dict[str, Any], page: "Page") -> None:
    """The beginnings of the blocks, the record to scale, and its first pieces."""
    blocks, record = facts["blocks"], facts["record"]
    n = len(blocks[0])
    scales_at, quants_at = (field[0] for field in facts["fields"][1:])
    page.text(LEFT - 24, 22, f"{len(blocks)} rows of the file, a block of {n} bytes each", bold=True)
    page.text(LEFT - 24, 40, f"the first blocks of {facts['tensor']}", "muted", 12.5)
    y = 52.0
    for r, block in enumerate(blocks):
        page.text(LEFT - 8, y + 15, str(r), "muted", 12, "end")
        x = float(LEFT)
        parts = (block[:2], block[2:4], block[scales_at : scales_at + 2], block[quants_at : quants_at + 8])
        for (name, color), part in zip(PARTS, parts, strict=True):
            for byte in part:
                page.box(x, y, CELL, ROW, color, 0.12 + 0.2 * (r % 2), 0.7)
                page.text(x + CELL / 2, y + 15, f"{byte:02x}", "text", 13, "middle", mono=True)
                x += CELL
            if name not in ("d", "dmin"):
                page.text(x + 9, y + 14, "…", "muted", 13, "middle")
                x += 18
        y += ROW

    y += 36
    page.text(LEFT - 24, y, f"The record: the same {len(record)} bytes", bold=True)
    y += 12
    sizes = (2 * ROWS, 2 * ROWS, facts["fields"][1][1] * ROWS, facts["fields"][2][1] * ROWS)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    x, scale = float(LEFT), 16 * CELL / len(record)
    for (_, color), size in zip(PARTS, sizes, strict=True):
        page.box(x, y, size * scale, 16, color, 0.35, 0.7)
        x += size * scale
    page.text(LEFT + 50, y + 32, f"to scale: {sizes[0]}, {sizes[1]}, {sizes[2]} and {sizes[3]} bytes", "muted", 12.5)

    says = (
        f"bytes {starts[0]}–{starts[1] - 1}: d of rows",
        f"bytes {starts[1]}–{starts[2] - 1}: dmin of rows",
        f"bytes {starts[2]}–{starts[2] + ROWS - 1}: the first of {sizes[2] // ROWS} planes of scales, one byte of rows",
        f"bytes {starts[3]}–{starts[3] + 31}: the first of {sizes[3] // 32} vectors, four bytes of rows",
    )
    y += 62
    for (_, color), start, text in zip(PARTS, starts, says, strict=True):
        page.text(LEFT - 24, y, text, color, 12.5)
        each = {starts[0]: 2, starts[1]: 2, starts[2]: 1, starts[3]: 4}[start]
        for first in range(0, ROWS, 16 // each):
            count = min(ROWS - first, 16 // each) * each
            y += 22
            at = start + first * each
            cells(page, y, record[at : at + count], color, each, first)
            y += ROW
        y += 22
