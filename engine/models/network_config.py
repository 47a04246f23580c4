"""The descriptions of networks: dense ones and mixtures of experts."""

from dataclasses import dataclass

from engine.ops.activation import SWIGLU, Activation


@dataclass(frozen=True)
class DenseConfig:
    """A network of width n_ff that every row uses."""

    n_ff: int
    activation: Activation = SWIGLU


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture: each row uses n_used of n_expert networks of width n_ff, and one shared network of width n_ff_shared unless
    that is 0.

    shared_gated: whether the router decides how much of the shared network is added.
    gating: the probability of an expert is "softmax", "sigmoid" or "sqrt_softplus" of its logit.
    normalized: whether the weights of the chosen experts are divided by their sum; then they are multiplied by weight_scale.
    n_group, n_group_used: experts are chosen from the n_group_used best of n_group groups.
    group_best: the number of best experts of a group, 1 or 2, whose scores add up to that of the group.
    beside: a dense network whose result is added to that of the experts; None: there is none.
    tabled: whether a table gives the experts of each token.
    """

    n_expert: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0
    activation: Activation = SWIGLU
    shared_gated: bool = True
    gating: str = "softmax"
    normalized: bool = True
    weight_scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    group_best: int = 2
    beside: DenseConfig | None = None
    tabled: bool = False
