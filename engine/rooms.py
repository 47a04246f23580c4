"""The memory in which the parts of a model have to fit: that of each GPU, and that of the host."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from engine.arrays import Batch
from engine.cache.types import CHUNK, Types
from engine.gguf.file import GGUF
from engine.group.backend import DeviceGroup
from engine.group.ledger import Ledger
from engine.models.config import ModelConfig
from engine.models.placement import Placement
from engine.models.registry import build, load_layer_that_drafts
from engine.ops.operations import Ops


class PlacedOwner(NamedTuple):
    """What is in the memory of one device: the backend of parts of a model, and the number of its owner."""

    ops: Ops
    owner: int


class MemoryRoom(NamedTuple):
    """The places that share memory, and the bytes that are free there beside the weights; 0 if unknown."""

    places: Sequence[PlacedOwner]
    free: int


def rooms(placement: Placement, weights: Mapping[Ops, int], owned: Sequence[int] = ()) -> list[MemoryRoom]:
    """The memory of all devices of a placement.

    weights: the bytes of the weights on each device.
    owned: those of each of several devices that share the layers.
    """
    places = [PlacedOwner(ops, i) for ops in placement.devices for i in range(len(ops.owners))]
    sharing: list[list[PlacedOwner]] = []
    for place in places:
        own = place.ops.owners[place.owner]
        alike = (room for room in sharing if own.shares_memory_with(room[0].ops.owners[room[0].owner]))
        if (room := next(alike, None)) is not None:
            room.append(place)
        else:
            sharing.append([place])

    def held(place: PlacedOwner) -> int:
        return owned[place.owner] if len(place.ops.owners) > 1 else weights[place.ops]

    return [MemoryRoom(room, room[0].ops.owners[room[0].owner].free_memory(sum(map(held, room)))) for room in sharing]


def owned_bytes(config: ModelConfig, gguf: GGUF, ops: Ops, types: Types, layer: GGUF | None) -> tuple[int, ...]:
    """The bytes that each of several devices (``ops.owners``) loads of a model whose layers they share.

    layer: the file of the layer that drafts, if it has one of its own.
    """
    ledgers = [Ledger(owner) for owner in ops.owners]
    group = DeviceGroup(ledgers)  # type: ignore[arg-type]
    model = build(config, gguf, Placement.whole(config, group), CHUNK, types, 1)  # type: ignore[arg-type]
    if layer is not None:
        model.drafter = load_layer_that_drafts(model, layer)
    drafts = [] if model.drafter is None else [forward for forward, _ in model.drafter.listed]
    row = np.zeros(1, np.int32)
    for forward in (model.compute, *drafts):
        group.of_all(forward)(Batch(row, row, row), 1)
    return tuple(ledger.n_bytes for ledger in ledgers)
