"""How the layers of a model are divided between several GPUs."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate

from engine.checks import described
from engine.errors import UsageError
from engine.gguf.file import GGUF
from engine.models.config import ModelConfig
from engine.models.division import EMBEDDING, PER_LAYER, part_of
from engine.models.placement import LayerPart, Placement, parts_of
from engine.ops.operations import Ops

MODES = ("layer", "tensor", "none")
"""The values of ``split_mode``: whole layers on each GPU, a part of every layer on each device, or the first GPU only."""


def parse_split(text: str, n_devices: int) -> tuple[float, ...]:
    """The share of each device in ``"3,1"``, or, as in llama-bench, ``"3/1"``; () for "".  Raises UsageError for anything
    else than one number for each device, of which one is above 0."""
    if not text:
        return ()
    if n_devices < 2:
        raise UsageError(
            'tensor_split says which part of a model each of several GPUs has: name them (device="cuda:0,cuda:1"), or '
            "leave it out."
        )
    try:
        shares = tuple(float(each) for each in text.replace("/", ",").split(","))
    except ValueError:
        shares = ()
    if len(shares) != n_devices or not all(0 <= each < 1e9 for each in shares) or not sum(shares):
        example = ",".join(["3", *"1" * (n_devices - 1)])
        raise UsageError(
            f"tensor_split must be {n_devices} numbers, one for each device, such as {example}, not {described(text)}."
        )
    return shares


def layer_split(
    config: ModelConfig,
    gguf: GGUF,
    devices: Sequence[Ops],
    shares: Sequence[float],
    everything: bool = False,
    elsewhere: Collection[LayerPart] = (),
) -> Placement:
    """The placement with a run of whole layers on each device.

    shares: how much of the model each device has, in any unit, each above 0.
    everything: whether the embedding counts as a part of the first layer, and the output as a part of the last one, so that
        the shares are those of memory; otherwise only layers count, so that the shares are those of the time of a prompt.
    elsewhere: parts that do not count, because they move to the CPU.

    A mixer that reads the keys and values of another layer is on the same device, and so are the layers between both.
    Raises UsageError if there are more devices than parts.
    """
    n = config.n_layer
    sizes = [0] * n
    for name, tensor in gguf.tensors.items():
        part = part_of(name, config)
        if part is not None:
            sizes[part.layer] += tensor.nbytes if part not in elsewhere else 0
        elif everything and name != PER_LAYER:  # which is in host memory
            sizes[0 if name == EMBEDDING else -1] += tensor.nbytes
    sources = [layer.mixer.memory_source for layer in config.layers]
    # The first layer on which each layer depends.
    needed = [il if source is None else source for il, source in enumerate(sources)]
    cuts = [il for il in range(1, n) if min(needed[il:]) >= il]
    if len(cuts) + 1 < len(devices):
        raise UsageError(
            f"{gguf.path.name} can be divided into at most {len(cuts) + 1} parts, and {len(devices)} devices are named: name "
            "fewer (device=...)."
        )
    before = [0, *accumulate(sizes)]
    chosen: list[int] = []
    for i, share in enumerate(accumulate(shares[:-1]), 1):
        wanted = before[-1] * share / sum(shares)
        # Enough cuts must be left for the devices after this one.
        left = cuts[bisect_right(cuts, chosen[-1]) if chosen else 0 : len(cuts) - (len(devices) - 1 - i)]
        chosen.append(min(left, key=lambda cut: abs(before[cut] - wanted)))
    return Placement.in_turn(config, devices, [parts_of(config, il)[0] for il in chosen])
