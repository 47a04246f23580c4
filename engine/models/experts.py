"""What a mixture of experts knows beside its inputs."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Experts:
    """n_expert feed-forward networks of which a row uses n_used, and perhaps one that every row uses.

    router: matrix [n_expert, n_embd], with one row more for the gate of the shared network; gate, up: the matrices of all
    experts one under the other [n_expert * n_ff, n_embd], down [n_expert * n_embd, n_ff]; shared: (gate, up [n_ff_shared,
    n_embd], down [n_embd, n_ff_shared]), or None.  activation: "swiglu" or "geglu"; scales: float32 [n_expert] by which the
    weights of chosen experts are multiplied, or None.
    """

    n_expert: int
    n_used: int
    router: Any
    gate: Any
    up: Any
    down: Any
    shared: tuple[Any, Any, Any] | None = None
    activation: str = "swiglu"
    scales: Any = None
