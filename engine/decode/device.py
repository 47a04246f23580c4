"""Backends whose devices choose tokens themselves, so that logits need not leave them."""

from typing import Any, Protocol, runtime_checkable

from engine.decode.running import Steps
from engine.ops.model import AnyModel
from engine.ops.operations import AnyOperations
from engine.sampling.sampler import SamplerParams


@runtime_checkable
class TokenChooser(Protocol):
    """What such a backend has besides ``Operations``."""

    def can_sample(self, params: SamplerParams) -> bool:
        """Whether ``steps`` can choose tokens with these parameters."""

    def steps(self, model: AnyModel[Any]) -> Steps:
        """Steps of ``model`` whose tokens the device chooses.  Answers may take part for which ``can_sample`` is true."""


def can_sample(ops: AnyOperations, params: SamplerParams) -> bool:
    """Whether the device of a backend can choose tokens with these parameters."""
    return isinstance(ops, TokenChooser) and ops.can_sample(params)


def device_steps(model: AnyModel[Any], params: SamplerParams) -> Steps | None:
    """Steps of ``model`` whose tokens its device chooses with these parameters; None if the host has to choose them."""
    ops = model.ops
    return ops.steps(model) if isinstance(ops, TokenChooser) and ops.can_sample(params) else None
