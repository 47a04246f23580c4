"""What the caches of one model on two devices hold, compared."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.cache.shared import SharedLayer
from engine.cache.spec import StoredRows, of_sequence
from engine.llm import LLM
from engine.ops.operations import Ops
from engine.verify.check import Check


def cache_checks(cpu: LLM, other: LLM) -> Iterator[Check]:
    """Comparisons of the keys, values and states that the next token of the sequence in slot 0 can see.  A part of ``other``
    may be on any device, and several devices may share its layers; both models have read the same tokens."""
    n, models = other.sequence.length, (cpu.model, other.model)
    for (what, mine), (_, theirs) in zip(*(remembered(model, n) for model in models), strict=True):
        yield Check(f"{what}: ", mine, theirs)
    for index, il in enumerate(cpu.config.owners):
        for (what, mine), (_, theirs) in zip(*(_seen(model, index, n) for model in models), strict=True):
            yield Check(f"{what} of layer {il}, among the visible positions", mine, theirs)


def remembered(model: Any, length: int) -> Iterator[tuple[str, np.ndarray]]:
    """What recurrent layers, and the layer that drafts, need after ``length`` tokens: names and arrays."""
    sequence = model.sequence
    for index, il in enumerate(model.config.owners):
        of_owners = []
        for ops, layer in _owned(model, index):
            rows = layer.needed(sequence.slot, length, sequence.pages)
            of_owners.append([(each.name, found) for each in rows if (found := _entries(ops, each)) is not None])
        for what, array in _joined(model, index, of_owners):
            yield f"{what} of layer {il}", array
    if model.drafter is not None and model.drafter.hidden is not None:
        hidden = of_sequence(model.drafter.hidden, sequence.slot)
        found = _entries(model.ops, StoredRows("output", hidden, max(0, length - 1), length))
        if found is not None:
            yield "output of the trunk", found


def _seen(model: Any, index: int, length: int) -> Iterator[tuple[str, np.ndarray]]:
    """What else the next token sees in cache ``index`` after ``length`` tokens: names and arrays."""
    return _joined(model, index, [list(layer.contents(length, ops.download)) for ops, layer in _owned(model, index)])


def _owned(model: Any, index: int) -> Iterator[tuple[Ops, Any]]:
    """Each owner of cache ``index``, with its part."""
    layer, ops = model.cache.layers[index], model.placement.memory(model.config.owners[index])
    yield from zip(ops.owners, layer.parts if isinstance(layer, SharedLayer) else [layer], strict=True)


def _entries(ops: Ops, rows: StoredRows[Any]) -> np.ndarray | None:
    """The entries of a ring or of pages, in host memory; None if there are none."""
    found = [ops.download(rows.ring[run]) for run in rows.runs()]
    return np.concatenate(found) if found else None


def _joined(model: Any, index: int, of_owners: list[list[tuple[str, np.ndarray]]]) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of cache ``index`` as a single device has them."""
    for named in zip(*of_owners, strict=True):
        what, arrays = named[0][0], [array for _, array in named]
        yield what, arrays[0] if len(arrays) == 1 else model.cache.specs[index].joined(what, arrays)
