"""The parameters of a mixture of experts."""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from engine.arrays import A, M
from engine.errors import ModelError
from engine.ops.activation import SWIGLU, Activation

T = TypeVar("T")

GATINGS = ("chosen", "softmax", "sigmoid", "sqrt_softplus")
"""How logits become probabilities; "chosen": by a softmax over the chosen experts only."""

MOST_USED = 32
"""The most experts of a row: the lanes of a warp."""


class Routing(NamedTuple):
    """The law by which logits become experts and weights (``engine/cpu/products/router.py``).

    gating: one of ``GATINGS``; biased, selected: whether logits have a bias, and probabilities one for the selection;
    normalized, floor, weight_scale, n_group, n_group_used, group_best: those of ``Experts``; tabled: whether a table gives
        the experts.
    """

    gating: str = "chosen"
    biased: bool = False
    selected: bool = False
    normalized: bool = True
    floor: float = 0.0
    weight_scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    tabled: bool = False
    group_best: int = 2

    def __str__(self) -> str:
        """What differs from the law of most models: it becomes part of the name of a file."""
        fields = (f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults[name])
        return f"Routing({', '.join(fields)})"


@dataclass(frozen=True)
class Experts(Generic[A, M]):
    """n_expert feed-forward networks, of which each row uses n_used, and optionally a shared one that every row uses.

    router: matrix [n_expert, n_embd], with an additional row for the gate of the shared network if that has one.
    gate, up: the stacked matrices of all experts, [n_expert * n_ff, n_embd]; down: [n_expert * n_embd, n_ff].  gate is None
        if the activation has none.
    shared: gate (or None) and up [n_ff_shared, n_embd] and down [n_embd, n_ff_shared], or None.
    activation: between gate and up, and down.
    scales: factors of the weights of chosen experts, float32 [n_expert], or None.
    shared_gated: whether the shared network is multiplied by sigmoid(the router's last output); otherwise it is added.
    gating: "softmax", "sigmoid" or "sqrt_softplus": how logits become probabilities.
    router_bias: added to the logits, float32 [n_expert], or None.
    selection_bias: added to the probabilities for the selection only, float32 [n_expert], or None.
    normalized: whether the weights of the chosen are divided by their sum, which is at least ``floor``.
    weight_scale: a factor of all weights.
    n_group, n_group_used: experts are chosen from the n_group_used best of n_group groups of consecutive experts.
    group_best: the number of best experts of a group, 1 or 2, whose scores add up to that of the group.
    given: the experts of each token, int32 [n_vocab, n_used], which are chosen instead of the best, or None.
    gate_bias, up_bias, down_bias: added to the products of an expert, float32 [n_expert, n_ff], [n_expert, n_ff] and
        [n_expert, n_embd], or None.
    gate_scale, up_scale, down_scale: factors of the products of an expert before the biases, float32 [n_expert], or None.

    Raises ModelError for combinations that no law describes.
    """

    n_expert: int
    n_used: int
    router: M
    gate: M | None
    up: M
    down: M
    shared: tuple[M | None, M, M] | None = None
    activation: Activation = SWIGLU
    scales: A | None = None
    shared_gated: bool = True
    gating: str = "softmax"
    router_bias: A | None = None
    selection_bias: A | None = None
    normalized: bool = True
    floor: float = 6.103515625e-05
    weight_scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    group_best: int = 2
    given: A | None = None
    gate_bias: A | None = None
    up_bias: A | None = None
    down_bias: A | None = None
    gate_scale: A | None = None
    up_scale: A | None = None
    down_scale: A | None = None

    def __post_init__(self) -> None:
        def check(holds: bool, what: str) -> None:
            if not holds:
                raise ModelError(f"experts with {what} are not supported.")

        gated, group = self.activation.gated, self.n_expert // max(self.n_group, 1)
        check(self.gating in GATINGS[1:], f"the gating {self.gating!r}")
        check(self.n_used <= min(MOST_USED, self.n_expert), f"{self.n_used} of {self.n_expert} experts in use")
        check(gated == (self.gate is not None), f"{'no' if gated else 'a'} gate and {self.activation.kind}")
        check(self.shared is None or gated == (self.shared[0] is not None), "a shared network with another activation")
        divided = 1 <= self.n_group_used <= self.n_group <= 32 and group * self.n_group == self.n_expert
        check(self.group_best in (1, 2), f"groups that score the sum of their best {self.group_best}")
        enough = divided and group * self.n_group_used >= self.n_used
        check(enough, f"{self.n_used} of {self.n_expert} experts from {self.n_group_used} of {self.n_group} groups")
        both = (self.gate_bias is None) == (self.up_bias is None) and (self.gate_scale is None) == (
            self.up_scale is None
        )
        check(not gated or both, "biases or scales of gate or up alone")

    @property
    def routing(self) -> Routing:
        """The law of the choice.  A softmax over all, renormalized over the chosen, is one over the chosen only."""
        plain = self.selection_bias is None and self.given is None and self.n_group == self.n_group_used
        chosen = plain and self.normalized and self.gating == "softmax"
        normalizes = self.normalized and not chosen
        groups = (
            (1, 1) if self.n_group == self.n_group_used or self.given is not None else (self.n_group, self.n_group_used)
        )
        return Routing(
            "chosen" if chosen else self.gating,
            self.router_bias is not None,
            self.selection_bias is not None and self.given is None,
            self.normalized,
            self.floor if normalizes else 0.0,
            self.weight_scale,
            *groups,
            self.given is not None,
            self.group_best if groups[0] > 1 else 2,
        )


def present(*matrices: T | None) -> list[T]:
    """The matrices that exist."""
    return [matrix for matrix in matrices if matrix is not None]
