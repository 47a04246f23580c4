"""The configurations of networks: dense networks and mixtures of experts."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from engine.ops.activation import SWIGLU, Activation


class NetworkConfig(ABC):
    """The sizes and options of a network.  A subclass is a frozen dataclass.  ``engine/models/layer.py`` has a table of the
    functions that load networks."""

    @abstractmethod
    def row_elements(self, n_embd: int) -> int:
        """An estimate of the number of elements per row of the intermediate results.

        n_embd: the number of elements per row of the input.
        """

    @property
    def exists(self) -> bool:
        """Whether layers have the network; False only for :class:`NoNetwork`."""
        return True

    @property
    def can_be_shared(self) -> bool:
        """Whether several devices can share the network, each with some rows of its matrices."""
        return True

    @property
    def share_read(self) -> float:
        """The fraction of the network's stacked matrices that one row reads."""
        return 1.0

    @property
    def is_mixture(self) -> bool:
        """Whether the network is a mixture of experts."""
        return False

    @property
    def is_divisible(self) -> bool:
        """Whether the experts of a mixture can be computed apart from its router and its shared network."""
        return False


@dataclass(frozen=True)
class NoNetwork(NetworkConfig):
    """The place of the network in a layer that only has a mixer."""

    def row_elements(self, n_embd: int) -> int:
        """0: there are no intermediate results."""
        return 0

    @property
    def exists(self) -> bool:
        """False: the layer has no network."""
        return False


@dataclass(frozen=True)
class DenseConfig(NetworkConfig):
    """A dense network of width n_ff, which every row uses.

    sparsity: the number of standard deviations above the mean of a row's gates below which gates are 0; None: they are used
        as they are.
    """

    n_ff: int
    activation: Activation = SWIGLU
    sparsity: float | None = None

    def row_elements(self, n_embd: int) -> int:
        """An estimate of the number of elements per row of gate and up."""
        return 2 * self.n_ff


@dataclass(frozen=True)
class ExpertsConfig(NetworkConfig):
    """A mixture of experts: each row uses n_used of n_expert networks of width n_ff.

    n_ff_shared: the width of a shared network, which all rows use; 0: there is none.
    activation: the activation of the experts.
    shared_activation: the activation of the shared network; None: that of the experts.
    shared_gated: whether the output of the shared network is multiplied by a gate that the router computes.
    gating: the function that turns logits into probabilities: "softmax", "sigmoid" or "sqrt_softplus".
    normalized: whether the weights of the chosen experts are divided by their sum.
    weight_scale: a factor of all weights, applied after this division.
    n_group, n_group_used: experts are chosen from the n_group_used best of n_group groups.
    group_best: the number of best experts, 1 or 2, whose scores are added to get the score of a group.
    n_latent: the width of latents that the experts, but not the router and the shared network, read and compute, between two
        further matrices; 0: they have the width of the residual stream.
    beside: a dense network whose result is added to that of the experts; None: there is none.
    tabled: whether the experts of each token are given by a table.
    averaged: whether the result is half the sum of that of the experts and that of the shared network, which must be gated:
        its gate is 1 / 2.
    weighs_inputs: whether the input of an expert is multiplied by its weight, instead of its output.
    """

    n_expert: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0
    activation: Activation = SWIGLU
    shared_activation: Activation | None = None
    shared_gated: bool = True
    gating: str = "softmax"
    normalized: bool = True
    weight_scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    group_best: int = 2
    n_latent: int = 0
    beside: DenseConfig | None = None
    tabled: bool = False
    weighs_inputs: bool = False
    averaged: bool = False

    def row_elements(self, n_embd: int) -> int:
        """An estimate of the number of elements per row of gate, up and result of each chosen expert, of the shared network
        and of the dense network."""
        beside = self.beside.row_elements(n_embd) if self.beside is not None else 0
        return beside + self.n_used * (2 * self.n_ff + n_embd) + 2 * self.n_ff_shared + 2 * self.n_latent

    @property
    def share_read(self) -> float:
        """The fraction of the experts that a row uses."""
        return self.n_used / self.n_expert

    @property
    def can_be_shared(self) -> bool:
        """Whether the weights of experts are those of their outputs."""
        return not self.weighs_inputs

    @property
    def is_mixture(self) -> bool:
        """Whether the network is a mixture of experts: True."""
        return True

    @property
    def is_divisible(self) -> bool:
        """Whether the experts can be computed apart from the router and the shared network: not if there is a dense network
        beside them, or if they have latents."""
        return self.beside is None and not self.n_latent
