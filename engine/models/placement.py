"""Where the parts of a model lie: every mixer and every network of a layer is on one device.

Cuts lie before and after every mixer and every network.  A parallel layer, whose network reads the input of the mixer, is one
part, and so is a layer without a mixer or without a network.  A mixer that reads the keys and values of another layer lies
where these are.  Of a mixture of experts on the CPU between two parts on a GPU, decode passes compute the experts only on the
CPU (``engine/models/routed.py``).  The bits of a model do not depend on its placement.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from engine.models.config import ModelConfig
from engine.ops.operations import Ops


@dataclass(frozen=True)
class LayerPart:
    """The mixer of a layer, its network, or both if the layer is parallel.

    layer: the index of the layer in the trunk.
    mixer, network: whether the part has the mixer, and whether it has the network.
    """

    layer: int
    mixer: bool
    network: bool

    @classmethod
    def of(cls, config: ModelConfig, layer: int, network: bool) -> "LayerPart":
        """The part of a model with the network of a layer or, if ``network`` is false, with its mixer; of a layer that has
        only one of both, that one."""
        own = config.layers[layer]
        if own.mixer.exists and own.network.exists:
            return cls(layer, own.parallel or not network, own.parallel or network)
        return cls(layer, own.mixer.exists, own.network.exists)

    def begins(self, config: ModelConfig) -> bool:
        """Whether it is the first part of its layer."""
        return self == LayerPart.of(config, self.layer, False)

    def __str__(self) -> str:
        if self.mixer and self.network:
            return f"layer {self.layer}"
        return f"the {'network' if self.network else 'mixer'} of layer {self.layer}"


def parts_of(config: ModelConfig, layer: int) -> tuple[LayerPart, ...]:
    """The parts of a layer in the order of a pass."""
    return tuple(dict.fromkeys(LayerPart.of(config, layer, network) for network in (False, True)))


@dataclass(frozen=True)
class Placement:
    """The backend of every part of a model.

    first: computes the embedding; last: computes the output, and holds the network that drafts; mixers, networks: those of
    the layers of the trunk, in order, equal for a layer that is one part; relayed: whether each device has one run of parts
    and hands its rows to the next one without the host (``engine/models/relay.py``).
    """

    first: Ops
    mixers: tuple[Ops, ...]
    networks: tuple[Ops, ...]
    last: Ops
    relayed: bool = False

    @classmethod
    def whole(cls, config: ModelConfig, ops: Ops) -> "Placement":
        """Everything on one device."""
        return cls(ops, (ops,) * config.n_layer, (ops,) * config.n_layer, ops)

    @classmethod
    def split(
        cls, config: ModelConfig, mixers: Sequence[Ops], networks: Sequence[Ops], host: Ops, last: Ops
    ) -> "Placement":
        """Parts on several devices; host: the CPU, which computes the embedding.  mixers, networks: the wanted backends, one
        for each layer; a mixer that reads the memory of another layer gets that layer's, and a part with mixer and network
        gets that of the mixer."""
        found: tuple[list[Ops], list[Ops]] = [], []
        for il, layer in enumerate(config.layers):
            source = layer.mixer.memory_source
            wanted = mixers[il if source is None else source], networks[il]
            for network, column in enumerate(found):
                column.append(wanted[0 if LayerPart.of(config, il, bool(network)).mixer else 1])
        return cls(host, tuple(found[0]), tuple(found[1]), last)

    @classmethod
    def in_turn(cls, config: ModelConfig, devices: Sequence[Ops], cuts: Sequence[LayerPart]) -> "Placement":
        """One run of parts on each of several devices; cuts: the part with which each of the devices after the first one
        begins, in the order of a pass.  No mixer may read the memory of a layer on another device."""
        starts, number = set(cuts), 0
        columns: tuple[list[Ops], list[Ops]] = [], []
        for il in range(config.n_layer):
            places = {}
            for part in parts_of(config, il):
                number += part in starts
                places[part] = devices[number]
            for network, column in enumerate(columns):
                column.append(places[LayerPart.of(config, il, bool(network))])
        return cls(devices[0], tuple(columns[0]), tuple(columns[1]), devices[-1], relayed=True)

    @property
    def devices(self) -> tuple[Ops, ...]:
        """Every backend once, in the order in which a pass reaches them."""
        pairs = zip(self.mixers, self.networks, strict=True)
        return tuple(dict.fromkeys((self.first, *(ops for pair in pairs for ops in pair), self.last)))

    @property
    def accelerator(self) -> Ops:
        """The first backend with memory of its own; the last backend if all use that of the host."""
        return next((ops for ops in self.devices if ops.device_memory() is not None), self.last)

    @property
    def n_accelerators(self) -> int:
        """The number of backends with memory of their own."""
        return sum(ops.device_memory() is not None for ops in self.devices)

    def parts(self, config: ModelConfig) -> Iterator[tuple[LayerPart, Ops]]:
        """The parts in the order of a pass, each with its backend."""
        for il, (mixer, network) in enumerate(zip(self.mixers, self.networks, strict=True)):
            for part in parts_of(config, il):
                yield part, mixer if part.mixer else network

    def memory(self, il: int) -> Ops:
        """The backend whose memory holds what layer ``il`` stores; the layer that drafts has the index n_layer."""
        return self.mixers[il] if il < len(self.mixers) else self.last

    def routed(self, config: ModelConfig) -> list[LayerPart]:
        """The networks that are cut in decode passes: mixtures on a device without memory of its own, between parts on one
        with it, if there is only one of these.  Mixtures beside a dense network, and those of models with several residual
        streams, or whose layers share selected positions, are not."""
        if config.streams is not None or config.n_shared or self.n_accelerators > 1:
            return []
        every = list(self.parts(config))
        places = [self.first, *(ops for _, ops in every), self.last]
        found = []
        for i, (part, ops) in enumerate(every):
            around = places[i], places[i + 2]
            is_between = ops.device_memory() is None and all(other.device_memory() is not None for other in around)
            if is_between and not part.mixer and config.layers[part.layer].network.is_divisible:
                found.append(part)
        return found

    def stages(self, config: ModelConfig, alone: Collection[LayerPart] = ()) -> list[tuple[Ops, list[LayerPart]]]:
        """The runs of parts of one backend, in the order of a pass; the first one begins with the embedding, the last one
        ends with the output.  alone: parts that are runs of their own."""
        runs: list[tuple[Ops, list[LayerPart]]] = [(self.first, [])]

        def ends(ops: Ops) -> bool:
            """Whether the last run takes no further part of a backend."""
            last, parts = runs[-1]
            return last is not ops or (bool(parts) and parts[-1] in alone)

        for part, ops in self.parts(config):
            if part in alone or ends(ops):
                runs.append((ops, []))
            runs[-1][1].append(part)
        if ends(self.last):
            runs.append((self.last, []))
        return runs
