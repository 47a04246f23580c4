"""The bytes of a GGUF file, to scale: the bundled model."""

import mmap
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

from docs.figures import bundled
from engine.gguf.header import HEADER_BYTES, read_header

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "The bytes of the bundled model's file, to scale"
SIZE = (480, 690)


def facts() -> dict[str, Any]:
    """Where each part of the file begins."""
    path = bundled.file().path
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        header, size = read_header(path, buffer), len(buffer)
    first = header.tensors[0]
    # Before the field of its offset, an entry has a name with its length, a count, dimensions, and a type.
    table = first.field_offset - (8 + len(first.name.encode()) + 4 + 8 * len(first.shape) + 4)
    keys = list(header.offsets)
    ends = [header.offsets[key] for key in keys[1:]] + [table]
    arrays = [
        [key, header.kinds[key], len(header.metadata[key]), header.offsets[key], end]  # type: ignore[arg-type]
        for key, end in zip(keys, ends, strict=True)
        if header.kinds[key].endswith("[]")
    ]
    return {
        "name": path.name,
        "size": size,
        "fixed": HEADER_BYTES,
        "keys": len(keys),
        "arrays": arrays,
        "table": table,
        "table_end": header.tensors[-1].field_offset + 8,
        "alignment": header.alignment,
        "data": header.data_start,
        "tensors": [
            [t.name, t.type.name, list(t.shape), header.data_start + t.offset, t.nbytes] for t in header.tensors
        ],
    }


def group(name: str) -> str:
    """The part of the model that a tensor belongs to: a layer, or the tensor itself."""
    return ".".join(name.split(".")[:2]) if name.startswith("blk.") else name.removesuffix(".weight")


TYPES = {"Q4_K": "blue", "Q6_K": "purple"}
WHOLE, INSET, WIDE, NARROW = 20, 190, 92, 46
TOP, BOTTOM = 66.0, 660.0


def bar(
    page: "Page",
    x: float,
    width: float,
    top: float,
    bottom: float,
    low: int,
    high: int,
    parts: list[tuple[int, int, str]],
) -> Any:
    """Bytes low .. high as a bar whose colored parts are (begin, end, color).  Returns the function from bytes to y."""

    def place(byte: float) -> float:
        return top + (bottom - top) * (byte - low) / (high - low)

    for begin, end, color in parts:
        page.box(x, place(begin), width, place(end) - place(begin), color, 0.3, 0.6)
    page.box(x, top, width, bottom - top, "muted", 0)
    return place


def labels(page: "Page", x: float, low: float, high: float, found: list[tuple[float, str, str]]) -> None:
    """Texts to the right of a bar, top to bottom, each with a line from its place; moved apart where they would overlap."""
    places = page.spread([y for y, _, _ in found], 17, low, high)
    for (y, text, color), at in zip(found, places, strict=True):
        page.line([(x, y), (x + 6, y), (x + 13, at)], "muted", 0.8)
        page.text(x + 17, at + 4.5, text, color, 12.5)


def zoom(page: "Page", place: Any, begin: int, end: int, top: float, bottom: float) -> None:
    """Lines from a part of the left bar to the inset that enlarges it."""
    for y, to in ((place(begin), top), (place(end), bottom)):
        page.line([(WHOLE + WIDE, y), (INSET, to)], "muted", 0.8, dash=True)


def draw(facts: dict[str, Any], page: "Page") -> None:
    """The whole file on the left, two parts of it enlarged on the right."""
    size, data, tensors = facts["size"], facts["data"], facts["tensors"]
    page.text(WHOLE, 20, facts["name"], bold=True)
    page.text(WHOLE, 38, f"{size:,}".replace(",", " ") + " bytes, to scale", "muted")
    groups = [(name, list(of)) for name, of in groupby(tensors, lambda tensor: group(tensor[0]))]
    spans = [(name, of[0][3], of[-1][3] + of[-1][4]) for name, of in groups]
    colors = {name: "blue" if name.startswith("blk.") else "purple" for name, *_ in spans}
    parts = [(0, data, "orange")] + [(begin, end, colors[name]) for name, begin, end in spans]
    place = bar(page, WHOLE, WIDE, TOP, BOTTOM, 0, size, parts)
    for name, begin, end in spans:
        if place(end) - place(begin) > 14:
            page.text(WHOLE + WIDE / 2, (place(begin) + place(end)) / 2 + 5, name, colors[name], 13, "middle")

    # What precedes the tensors.
    top, bottom = TOP + 8, TOP + 226
    zoom(page, place, 0, data, top, bottom)
    page.text(INSET, top - 12, "what precedes the tensors", "orange", bold=True)
    arrays, table, table_end = facts["arrays"], facts["table"], facts["table_end"]
    inner = [(begin, end, "green") for *_, begin, end in arrays]
    gaps = zip([0, *(end for _, end, _ in inner)], [*(begin for begin, *_ in inner), table], strict=True)
    parts = [(begin, end, "orange") for begin, end in gaps]
    at = bar(page, INSET, NARROW, top, bottom, 0, data, [*parts, *inner, (table, data, "red")])
    found = [(at(0) + 1, f"{facts['fixed']} bytes: GGUF, version, counts", "text")]
    found += [(at(0) + 1.5, f"{facts['keys']} keys with values, among them", "orange")]
    for key, kind, count, begin, end in arrays:
        found.append((at((begin + end) / 2), f"{key.rpartition('.')[2]}: {count} × {kind[:-2]}", "green"))
    found.append((at((table + table_end) / 2), f"table of {len(tensors)} tensors", "red"))
    padding = data - table_end
    found.append((bottom - 0.5, f"{padding} bytes of padding, to {data}", "muted"))
    labels(page, INSET + NARROW, top + 2, bottom + 22, found)
    page.text(
        INSET + 63, bottom + 43, f"= {data // facts['alignment']} × {facts['alignment']}, the alignment", "muted", 12.5
    )

    # One layer.
    name, begin, end = next(span for span in spans if span[0].startswith("blk."))
    top, bottom = bottom + 92, BOTTOM
    zoom(page, place, begin, end, top, bottom)
    page.text(INSET, top - 12, f"{name}: one layer", "blue", bold=True)
    own = [tensor for tensor in tensors if group(tensor[0]) == name]
    at = bar(page, INSET, NARROW, top, bottom, begin, end, [(t[3], t[3] + t[4], TYPES.get(t[1], "muted")) for t in own])
    found = []
    for tensor, kind, shape, first, n_bytes in own:
        text = f"{tensor.split('.')[2]}: {' × '.join(map(str, shape))}, {kind}"
        found.append((at(first + n_bytes / 2), text, TYPES.get(kind, "muted")))
    labels(page, INSET + NARROW, top + 4, bottom - 2, found)
    kinds = Counter(tensor[1] for tensor in tensors)
    page.text(
        WHOLE, BOTTOM + 22, "tensors by type: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common()), "muted"
    )
