"""The parameters of a mixture of experts."""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from engine.arrays import A, M
from engine.errors import ModelError
from engine.ops.activation import SWIGLU, Activation

T = TypeVar("T")

GATINGS = ("chosen", "softmax", "sigmoid", "sqrt_softplus")
"""The functions that turn logits into probabilities.  "chosen" is a softmax over the chosen experts only."""

MOST_USED = 32
"""The maximum number of experts that a row uses, which is the number of lanes in a warp."""


class Routing(NamedTuple):
    """The law by which experts and their weights are computed from logits (``engine/cpu/products/router.py``).

    gating: the function that turns logits into probabilities, one of ``GATINGS``.
    biased: whether a bias is added to the logits.
    selected: whether a bias is added to the probabilities for the selection.
    normalized: whether the weights of the chosen experts are divided by their sum.
    floor: the minimum of that sum.
    weight_scale: a factor of all weights.
    n_group, n_group_used: experts are chosen from the n_group_used best of n_group groups.
    tabled: whether the experts are given by a table.
    group_best: the number of best experts whose scores are added to get the score of a group.
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
        """The fields that differ from their defaults, which most models use.  The string becomes part of a file name."""
        fields = (f"{name}={value}" for name, value in self._asdict().items() if value != self._field_defaults[name])
        return f"Routing({', '.join(fields)})"


class ChosenExperts(NamedTuple, Generic[A]):
    """The experts that rows use.

    ids: int32 [rows, n_used]; weights: float32 [rows, n_used]; logits: those of the router, float32 [rows, router rows].
    """

    ids: A
    weights: A
    logits: A


@dataclass(frozen=True)
class Experts(Generic[A, M]):
    """n_expert feed-forward networks, of which each row uses n_used, and optionally a shared network, which all rows use.

    router: matrix [n_expert, n_embd], with an additional row for the gate of the shared network if it has one.
    gate, up: the stacked matrices of all experts, [n_expert * n_ff, n_embd]; down: [n_expert * n_embd, n_ff].  gate is None
        if the activation has none.
    shared: gate (or None) and up [n_ff_shared, n_embd] and down [n_embd, n_ff_shared], or None.
    activation: the activation of the experts.
    scales: factors of the weights of the chosen experts, float32 [n_expert], or None.
    shared_gated: whether the output of the shared network is multiplied by sigmoid(the router's last output).
    gating: the function that turns logits into probabilities: "softmax", "sigmoid" or "sqrt_softplus".
    router_bias: added to the logits, float32 [n_expert], or None.
    selection_bias: added to the probabilities for the selection only, float32 [n_expert], or None.
    normalized: whether the weights of the chosen experts are divided by their sum, or by ``floor`` if that is larger.
    weight_scale: a factor of all weights.
    n_group, n_group_used: experts are chosen from the n_group_used best of n_group groups of consecutive experts.
    group_best: the number of best experts, 1 or 2, whose scores are added to get the score of a group.
    given: the experts of each token, int32 [n_vocab, n_used], which are used instead of the best experts, or None.
    gate_bias, up_bias, down_bias: added to the products of an expert, float32 [n_expert, n_ff], [n_expert, n_ff] and
        [n_expert, n_embd], or None.
    gate_scale, up_scale, down_scale: factors of the products of an expert before the biases, float32 [n_expert], or None.
    shared_activation: the activation of the shared network; None: that of the experts.
    weighs_inputs: whether the input of an expert is multiplied by its weight, instead of its output.  Kernels multiply the
        products with gate and up, which are linear.

    Raises ModelError for combinations that are not supported.
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
    shared_activation: Activation | None = None
    weighs_inputs: bool = False

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
        check(not self.weighs_inputs or self.up_bias is None, "biases and weighted inputs")

    @property
    def common(self) -> Activation:
        """The activation of the shared network."""
        return self.activation if self.shared_activation is None else self.shared_activation

    @property
    def routing(self) -> Routing:
        """The law by which experts are chosen and weighted.

        A softmax over all experts that is renormalized over the chosen ones equals a softmax over the chosen ones.
        """
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
    """The matrices that are not None."""
    return [matrix for matrix in matrices if matrix is not None]
