"""A placement in words, for reports."""

from collections.abc import Sequence

from engine.cli.parser import listed
from engine.models.placement import Placement
from engine.ops.operations import Ops


def describe(placement: Placement) -> str:
    """Which layers lie on which device, such as "layers 0-17 on cpu; layers 18-35 and the output on cuda:0 NVIDIA H100"."""
    words: dict[Ops, list[str]] = {ops: [] for ops in placement.devices}
    columns = placement.mixers, placement.networks
    both = [mixer if mixer is network else None for mixer, network in zip(*columns, strict=True)]
    single = [[None if whole else ops for ops, whole in zip(column, both, strict=True)] for column in columns]
    for what, column in zip(("", "the mixer{} of ", "the network{} of "), (both, *single), strict=True):
        for ops in words:
            layers = [il for il, each in enumerate(column) if each is ops]
            if layers:
                plural = "s" * (len(layers) > 1)
                words[ops].append(f"{what.format(plural)}layer{plural} {_ranges(layers)}")
    words[placement.last].append("the output")
    return "; ".join(f"{listed(what, 'and')} on {ops.label}" for ops, what in words.items() if what)


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers, such as "0-3, 8"."""
    ends = [i for i in range(len(numbers)) if i + 1 == len(numbers) or numbers[i + 1] != numbers[i] + 1]
    begins = [0, *(end + 1 for end in ends[:-1])]
    pairs = [(numbers[begin], numbers[end]) for begin, end in zip(begins, ends, strict=True)]
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in pairs)
