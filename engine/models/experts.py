"""The parameters of a mixture of experts."""

from dataclasses import dataclass
from typing import Generic

from engine.arrays import A, M
from engine.errors import ModelError

ACTIVATIONS = ("swiglu", "geglu")
"""The supported activations: names of operations on gate and up."""


def check_activation(name: str) -> None:
    """Raise ModelError unless the activation ``name`` is supported for experts."""
    if name not in ACTIVATIONS:
        raise ModelError(
            f"experts with the activation {name!r} are not supported; use a model with {' or '.join(ACTIVATIONS)}."
        )


@dataclass(frozen=True)
class Experts(Generic[A, M]):
    """n_expert feed-forward networks, of which each row uses n_used, and optionally a shared one that every row uses.

    router: matrix [n_expert, n_embd], with an additional row for the gate of the shared network.
    gate, up: the stacked matrices of all experts, [n_expert * n_ff, n_embd]; down: [n_expert * n_embd, n_ff].
    shared: gate and up [n_ff_shared, n_embd] and down [n_embd, n_ff_shared], or None.
    activation: "swiglu" or "geglu".
    scales: factors of the weights of chosen experts, float32 [n_expert], or None.

    Raises ModelError for any other activation.
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
