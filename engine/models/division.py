"""How a model is divided between a GPU and the CPU: from the options of a user to a placement.

-ngl N keeps the last N layers and the output on the GPU; --n-cpu-moe N keeps the networks of the first N layers that are
mixtures on the CPU; -ot REGEX=DEVICE places the parts whose tensors' names contain a match, and takes precedence.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.checks import described
from engine.errors import UsageError
from engine.gguf.file import GGUF, GGUFTensor
from engine.models.config import ModelConfig
from engine.models.placement import LayerPart, Placement
from engine.ops.operations import Ops

EMBEDDING, POSITIONS, PER_LAYER = "token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight"
"""The tables of embeddings."""

INPUT = ("per_layer_", "altup_proj.")
"""What the names of other tensors begin with that are used before the first layer."""

OUTPUT = ("output.weight", "output_norm.", "token_embd_norm.", "output_hc_", "altup_unembd_proj.weight")
"""What the names of tensors of the output begin with."""

NETWORK = (
    "ffn_",
    "exp_probs_b",
    "post_ffw_",
    "pre_ffw_",
    "hc_ffn_",
    "layer_output_scale",
    "inp_gate.",
    "proj.",
    "post_norm.",
    "altup_correct_",
)
"""What the names of tensors of networks begin with, after that of the layer."""

_MAIN = re.compile(r"blk\.[0-9]+\.(attn_|ssm_|ffn_|shortconv\.)|output\.")
"""Tensors that decide where a part lies; the others go with them."""

_LAYER = re.compile(r"blk\.([0-9]{1,4})\.(.*)")


@dataclass(frozen=True)
class Division:
    """The options of a user.

    n_gpu_layers: the number of last layers on the GPU, the output included unless it is 0; None: all.
    n_cpu_moe: the number of first layers whose mixtures are on the CPU.
    overrides: pairs of a regular expression and "cpu" or "gpu"; the first one that matches the name of a tensor counts.
    """

    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    overrides: tuple[tuple[str, str], ...] = ()

    def divides(self, config: ModelConfig) -> bool:
        """Whether a model may have parts on both devices."""
        layers = self.n_gpu_layers
        return bool(self.n_cpu_moe or self.overrides) or (layers is not None and layers < config.n_layer)

    def placement(self, config: ModelConfig, gguf: GGUF, gpu: Ops, host: Ops) -> Placement:
        """The placement of a model.  Raises UsageError for an override that divides a mixer, a network or a parallel layer,
        or that matches no tensor of a part."""
        n = config.n_layer
        first = 0 if self.n_gpu_layers is None else max(0, n - self.n_gpu_layers)
        mixers = [host if il < first else gpu for il in range(n)]
        mixtures = [layer.network.is_mixture and il < self.n_cpu_moe for il, layer in enumerate(config.layers)]
        networks = [host if kept else ops for kept, ops in zip(mixtures, mixers, strict=True)]
        last = host if self.n_gpu_layers == 0 else gpu
        for part, name in _overridden(config, gguf, self.overrides).items():
            ops = host if name == "cpu" else gpu
            if part is None:
                last = ops
            else:
                (mixers if part.mixer else networks)[part.layer] = ops
        return Placement.split(config, mixers, networks, host, last)

    def beside(self, config: ModelConfig, gguf: GGUF, placement: Placement, host: Ops) -> Placement:
        """A placement on several GPUs with the parts that belong there on the CPU.  Raises UsageError as :meth:`placement`
        does."""
        kept = self.placement(config, gguf, placement.last, host)

        def column(mine: Sequence[Ops], theirs: Sequence[Ops]) -> tuple[Ops, ...]:
            return tuple(host if own is host else gpu for own, gpu in zip(mine, theirs, strict=True))

        last = host if kept.last is host else placement.last
        mixers, networks = column(kept.mixers, placement.mixers), column(kept.networks, placement.networks)
        return Placement(host, mixers, networks, last)


def fitted(config: ModelConfig, gguf: GGUF, gpu: Ops, host: Ops, fits: Callable[[Placement], bool]) -> Placement | None:
    """The placement with as much as possible on the GPU among those for which ``fits`` is true; None if there is none.  The
    mixtures of experts leave the GPU first, one layer after another, then whole layers."""
    n, mixtures = config.n_layer, any(layer.network.is_mixture for layer in config.layers)
    choices = [Division(n_cpu_moe=kept) for kept in range(1, n + 1)] if mixtures else []
    choices += [Division(n - left, n if mixtures else 0) for left in range(1, n + 1)]
    # What the GPU needs falls from one choice to the next.
    at = bisect_left(choices, True, key=lambda choice: fits(choice.placement(config, gguf, gpu, host)))
    return choices[at].placement(config, gguf, gpu, host) if at < len(choices) else None


def parse_overrides(text: str) -> tuple[tuple[str, str], ...]:
    """The overrides of ``REGEX=DEVICE,...`` as in llama.cpp; devices are cpu, gpu, or one GPU by name (cuda:0 or CUDA0).
    Raises UsageError for anything else."""
    found = []
    for each in filter(None, text.split(",")):
        pattern, sign, device = each.rpartition("=")
        name = device.strip().lower()
        if not sign or not pattern or not re.fullmatch(r"cpu|gpu|cuda:?[0-9]{0,4}", name):
            raise UsageError(
                f"the placement of tensors {described(each)} must be REGEX=DEVICE, such as ffn_.*_exps=CPU, with CPU "
                "or GPU as the device."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{described(pattern)} is no regular expression: {error}.") from None
        found.append((pattern, "cpu" if name == "cpu" else "gpu"))
    return tuple(found)


def part_of(name: str, config: ModelConfig) -> LayerPart | None:
    """The part of a model that a tensor of its file belongs to; None for the embedding, the output and layers that draft."""
    found = _LAYER.match(name)
    if found is None or int(found[1]) >= config.n_layer:
        return None
    norms = config.layers[int(found[1])].norms
    own = tuple(f"{norm}." for norm in (norms.before_network, norms.after_network) if norm)
    return LayerPart.of(config, int(found[1]), found[2].startswith((*NETWORK, *own)))


def tensors_of(config: ModelConfig, gguf: GGUF, placement: Placement) -> dict[Ops, list[GGUFTensor]]:
    """The tensors of a file that each device loads.  A divided model whose output is the embedding, or whose layer drafts,
    has the embedding twice, and of mixtures that are cut all but the experts."""
    places, routed = dict(placement.parts(config)), set(placement.routed(config))
    twice = placement.first is not placement.last and ("output.weight" not in gguf.tensors or config.mtp)
    found: dict[Ops, list[GGUFTensor]] = {ops: [] for ops in placement.devices}
    for name, tensor in gguf.tensors.items():
        part = part_of(name, config)
        if part is not None:
            found[places[part]].append(tensor)
            if part in routed and "_exps." not in name:
                found[placement.accelerator].append(tensor)
        elif name in (EMBEDDING, POSITIONS) or name.startswith(INPUT):
            found[placement.first].append(tensor)
        else:
            found[placement.last].append(tensor)
        if name == EMBEDDING and twice:
            found[placement.last].append(tensor)
    return found


def weight_bytes(config: ModelConfig, gguf: GGUF, placement: Placement) -> Counter[Ops]:
    """Bytes of weights in the memory of each device.  A table of per-layer embeddings, of which a pass reads few rows, stays
    in host memory and does not count."""
    found: Counter[Ops] = Counter()
    for ops, tensors in tensors_of(config, gguf, placement).items():
        found[ops] = sum(tensor.nbytes for tensor in tensors if tensor.name != PER_LAYER)
    return found


def streamed_bytes(config: ModelConfig, gguf: GGUF, placement: Placement) -> list[int]:
    """Bytes of the weights of each part on the CPU, which a GPU may copy to read a prompt."""
    found: Counter[LayerPart] = Counter()
    hosts = {part for part, ops in placement.parts(config) if ops.device_memory() is None}
    for name, tensor in gguf.tensors.items():
        part = part_of(name, config)
        if part in hosts:
            found[part] += tensor.nbytes
    return list(found.values())


def _overridden(
    config: ModelConfig, gguf: GGUF, overrides: tuple[tuple[str, str], ...]
) -> Mapping[LayerPart | None, str]:
    """The device of each part that overrides place, None being the output."""
    if not overrides:
        return {}
    patterns = [(re.compile(pattern), device) for pattern, device in overrides]
    chosen: dict[LayerPart | None, dict[str, str | None]] = {}
    for name, tensor in gguf.tensors.items():
        part = part_of(name, config)
        if part is None and not name.startswith(OUTPUT):
            continue
        device = next((place for pattern, place in patterns if pattern.search(name)), None)
        # Norms, biases and scales follow the matrices; a model whose output is the embedding has only a norm there.
        if part is None or (len(tensor.shape) > 1 and not name.endswith("norm.weight")):
            chosen.setdefault(part, {})[name] = device
    for pattern, _ in patterns:
        if not any(pattern.search(name) for name in gguf.tensors):
            raise UsageError(
                f"no tensor of {gguf.path.name} has a name that {pattern.pattern!r} matches; check the pattern."
            )
    found: dict[LayerPart | None, str] = {}
    for part, devices in chosen.items():
        # The experts are almost all of a mixture: its router and its shared network go with them.
        experts = {name: device for name, device in devices.items() if "_exps." in name}
        main = experts or {name: device for name, device in devices.items() if _MAIN.match(name)} or devices
        places = set(main.values())
        if len(places) > 1:
            named = next(name for name, device in main.items() if device is not None)
            what = "the output" if part is None else str(part)
            whole = ", ".join(sorted(main))
            raise UsageError(
                f"the tensors of {what} stay together, and {named} would be separated from others of these: {whole}; "
                "place all of them or none."
            )
        (only,) = places
        if only is not None:
            found[part] = only
    return found
