"""The descriptions of networks: dense ones and mixtures of experts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from engine.ops.activation import SWIGLU, Activation


class NetworkConfig(ABC):
    """The sizes and options of a network.  A subclass is a frozen dataclass; ``engine/models/layer.py`` has a table of the
    functions that load them."""

    @abstractmethod
    def row_elements(self, n_embd: int) -> int:
        """An estimate of the number of elements per row of its intermediate results; n_embd: the width of its input."""

    @property
    def share_read(self) -> float:
        """The part of its stacked matrices that one row reads."""
        return 1.0

    @property
    def is_mixture(self) -> bool:
        """Whether it consists of experts."""
        return False


@dataclass(frozen=True)
class DenseConfig(NetworkConfig):
    """A network of width n_ff that every row uses."""

    n_ff: int
    activation: Activation = SWIGLU

    def row_elements(self, n_embd: int) -> int:
        """Gate and up."""
        return 2 * self.n_ff


@dataclass(frozen=True)
class ExpertsConfig(NetworkConfig):
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

    def row_elements(self, n_embd: int) -> int:
        """Gate, up and result of each expert that a row uses, of the shared network and of the dense one."""
        beside = self.beside.row_elements(n_embd) if self.beside is not None else 0
        return beside + self.n_used * (2 * self.n_ff + n_embd) + 2 * self.n_ff_shared

    @property
    def share_read(self) -> float:
        """The part of the experts that a row uses."""
        return self.n_used / self.n_expert

    @property
    def is_mixture(self) -> bool:
        """True."""
        return True
