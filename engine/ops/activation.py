"""The activations of feed-forward networks, by name.  ``engine/numerics.py`` defines their formulas."""

from dataclasses import dataclass

from engine.errors import ModelError

KINDS = {
    "swiglu": (True, 0),
    "geglu": (True, 0),
    "swiglu_oai": (True, 2),
    "swiglu_clamped": (True, 1),
    "swiglu_limited": (True, 1),
    "gelu": (False, 0),
    "relu2": (False, 0),
    "gelu_erf": (False, 0),
    "xielu": (False, 4),
}
"""The supported kinds: whether the activation has a gate, and how many parameters it has."""


@dataclass(frozen=True)
class Activation:
    """The activation between the matrices of a feed-forward network.

    kind: a name in ``KINDS``.
    parameters: the parameters, in the order of the function of that name in ``engine/numerics.py``.

    Raises ModelError if the kind is unknown or the number of parameters is wrong.
    """

    kind: str
    parameters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            known = ", ".join(KINDS)
            raise ModelError(f"the activation {self.kind!r} is not supported; use a model with one of: {known}.")
        if len(self.parameters) != KINDS[self.kind][1]:
            raise ModelError(
                f"the activation {self.kind} takes {KINDS[self.kind][1]} parameters, not {len(self.parameters)}."
            )

    @property
    def gated(self) -> bool:
        """Whether the activation has a gate, by which the values are multiplied."""
        return KINDS[self.kind][0]

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """The parameters, padded with zeros to four numbers, as kernels expect them."""
        a, b, c, d = (*self.parameters, 0.0, 0.0, 0.0, 0.0)[:4]
        return a, b, c, d


SWIGLU = Activation("swiglu")
GEGLU = Activation("geglu")
GELU_ERF = Activation("gelu_erf")
