"""Arrays of two devices that must have the same bits, and what is raised if they have not."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Site:
    """The place of a computation in the model; ``layer`` is None before the first layer and after the last."""

    layer: int | None
    operation: str
    tensors: str
    kernel: str
    variant: str

    def __str__(self) -> str:
        layer = "outside of the layers" if self.layer is None else f"layer {self.layer}"
        return f"{layer}, {self.operation} {self.tensors}".rstrip() + f", kernel {self.variant}"


@dataclass(frozen=True)
class Check:
    """Two arrays that must have the same bits where ``where`` is true (None: everywhere); ``what`` describes them, and
    ``devices`` what has computed them."""

    what: str
    cpu: np.ndarray
    gpu: np.ndarray
    where: np.ndarray | None = None
    devices: tuple[str, str] = field(default=("CPU", "GPU"), kw_only=True)

    @classmethod
    def of_tokens(cls, what: str, cpu: list[int], gpu: list[int]) -> "Check":
        """A comparison of two lists of tokens, of which the shorter one is continued by -1."""
        n = max(len(cpu), len(gpu))
        return cls(what, *(np.array(ids + [-1] * (n - len(ids)), np.int32) for ids in (cpu, gpu)))

    @property
    def values(self) -> int:
        """Number of values compared."""
        return self.cpu.size if self.where is None else int(np.broadcast_to(self.where, self.cpu.shape).sum())

    @property
    def differing(self) -> np.ndarray:
        """The number of differing bits of each value."""
        bits = np.bitwise_count(bits_of(self.cpu) ^ bits_of(self.gpu))
        return bits if self.where is None else bits * self.where

    def show(self) -> str:
        """The first value that differs, in hexadecimal and decimal."""
        differing = self.differing
        index = tuple(int(i) for i in np.argwhere(differing)[0])
        lines = [
            f"{self.what}{list(index)} differs, as do {np.count_nonzero(differing)} of {self.values} values in all:"
        ]
        width = max(map(len, self.devices))
        for device, array in zip(self.devices, (self.cpu, self.gpu), strict=True):
            value = array[index]
            lines.append(f"  {device:<{width}}  0x{int(bits_of(value)):0{2 * value.itemsize}x}  {value!s}")
        return "\n".join(lines)


class Difference(Exception):
    """Bits that differ.  ``site``: where; ``check``: the arrays; ``verdict``: the result of running the kernel again."""

    def __init__(self, site: Site | None, check: Check, verdict: str) -> None:
        super().__init__(f"{site or 'whole pass'}: {check.show()}\n{verdict}")
        self.site, self.check, self.verdict = site, check, verdict


def bits_of(x: np.ndarray) -> np.ndarray:
    """A NumPy array or scalar as unsigned integers."""
    return np.ascontiguousarray(x).view(f"u{np.dtype(x.dtype).itemsize}").reshape(np.shape(x))
