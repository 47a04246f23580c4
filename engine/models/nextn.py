"""The layers behind the trunk that draft tokens: how many of them a file has, and why they cannot be used."""

import re
from dataclasses import dataclass

from engine.gguf.file import GGUF

_NEXTN = re.compile(r"blk\.([0-9]{1,4})\.nextn\.")


@dataclass(frozen=True)
class DraftingLayers:
    """The layers of a file: ``n_layer`` of the trunk, and ``count`` behind it that draft.

    problem: why these cannot draft; "": they can, or there are none.
    """

    n_layer: int
    count: int
    problem: str = ""


def find_drafting_layers(gguf: GGUF, key: str, n_blocks: int) -> DraftingLayers:
    """The layers of a file that has ``n_blocks`` of them, of which ``key`` counts those that draft.

    Tensors whose names contain ``nextn`` belong to layers that draft.  Where they contradict the count, they decide what the
    trunk is, and nothing drafts.  Raises GGUFError if they leave no trunk.
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
    problem = f"{key} is {count}, and drafts by one layer are supported" if count > 1 else ""
    return DraftingLayers(first, count, problem)
