"""What a mixture of experts knows beside its inputs."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A, M
from engine.errors import ModelError

ACTIVATIONS = ("swiglu", "geglu")
"""What may stand between gate, up and down: names of operations."""


def check_activation(name: str) -> None:
    """ModelError unless experts can have the activation ``name``."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"experts with the activation {name!r} are not supported; use a model with {' or '.join(ACTIVATIONS)}."
        )


@dataclass(frozen=True)
class Experts(Generic[A, M]):
    """n_expert feed-forward networks of which a row uses n_used, and perhaps one that every row uses.

    router: matrix [n_expert, n_embd], with one row more for the gate of the shared network; gate, up: the matrices of all
    experts one under the other [n_expert * n_ff, n_embd], down [n_expert * n_embd, n_ff]; shared: (gate, up [n_ff_shared,
    n_embd], down [n_embd, n_ff_shared]), or None.  activation: "swiglu" or "geglu"; scales: float32 [n_expert] by which the
    weights of chosen experts are multiplied, or None.  ModelError for any other activation.
    """

    n_expert: int
    n_used: int
    router: M
    gate: M
    up: M
    down: M
    shared: tuple[M, M, M] | None = None
    activation: str = "swiglu"
    scales: A | None = None

    def __post_init__(self) -> None:
        check_activation(self.activation)
