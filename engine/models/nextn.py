"""The layers after the trunk that draft tokens: their number in a file, and why they cannot be used."""

import re
from dataclasses import dataclass

from engine.gguf.file import GGUF

_NEXTN = re.compile(r"blk\.([0-9]{1,4})\.nextn\.")


@dataclass(frozen=True)
class DraftingLayers:
    """The numbers of layers in a file.

    n_layer: the number of layers of the trunk.
    count: the number of layers after the trunk, which draft.
    problem: why the layers that draft cannot be used; "" if they can, or if there are none.
    """

    n_layer: int
    count: int
    problem: str = ""


def find_drafting_layers(gguf: GGUF, key: str, n_blocks: int, most: int) -> DraftingLayers:
    """Find the layers that draft in a file with ``n_blocks`` layers.

    Tensors whose names contain ``nextn`` belong to layers that draft.  If they contradict the number in the metadata, they
    determine which layers belong to the trunk, and the other layers cannot draft.  Raises GGUFError if no layer belongs to
    the trunk.

    key: the key of the number of layers that draft; most: how many of them models of this architecture can have.
    """
    found = sorted({int(match[1]) for match in map(_NEXTN.match, gguf.tensors) if match})
    if not found:
        told = gguf.get(key, "int", 0, 0, n_blocks - 1)
        problem = f"{key} is {told}, and the file has no tensors of a layer that drafts" if told else ""
        return DraftingLayers(n_blocks - told, told, problem)
    told, first = gguf.get(key, "int", 0, 0), found[0]
    count = max(n_blocks, found[-1] + 1) - first
    if not 0 < first <= n_blocks or (first + told != n_blocks and found != list(range(first, first + count))):
        gguf.refuse(key, f"is {told}, but of {n_blocks} layers, layer {first} drafts: convert the model again")
    if told != count:
        given = f"is {told}" if key in gguf.metadata else "is missing"
        return DraftingLayers(first, count, f"{key} {given}, and the file has {count} such layer{'s' * (count > 1)}")
    problem = f"{key} is {count}, and {_supported(most)} supported" if count > most else ""
    return DraftingLayers(first, count, problem)


def _supported(most: int) -> str:
    return f"drafts by up to {most} layers are" if most > 1 else "drafts by one layer are"
