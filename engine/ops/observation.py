"""The intermediate values that a backend reports to an observer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias

from engine.arrays import A


@dataclass(frozen=True)
class Observation(Generic[A]):
    """Intermediate values of an operation, by name.

    kernel: the GPU kernel that wrote the values, such as "rope"; "" on the CPU.
    variant: the kernel with its constants, such as "rope[f16, f16, 64, 64, ...]"; "" on the CPU.
    values: the arrays by name.
    """

    kernel: str
    variant: str
    values: dict[str, A]


Observer: TypeAlias = Callable[[Observation[A]], None]
