"""The stages of a model on several devices, as steps see them (``engine/models/relay.py``)."""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.arrays import A, A_contra, Batch
from engine.ops.device import DeviceOperations


class RelayStage(Protocol[A]):
    """A stage on a device of its own."""

    @property
    def ops(self) -> DeviceOperations:
        """Its backend."""

    def compute(self, batch: Batch[A], n_logits: int) -> A | None:
        """Its operations.  Returns the residual stream of all rows, float32 [rows, width]; of the last stage, the logits of
        the last ``n_logits`` rows, float32 [n_logits, n_vocab], or None for no logits."""


class StageCourse(Protocol[A_contra]):
    """What one pass takes from stage to stage: for each, call :meth:`enter`, start it, and call :meth:`leave`."""

    def tell(self, told: A_contra) -> None:
        """Send the per-layer embeddings, an array of the first device with float32 [n_layer, rows, n_per_layer]."""

    def enter(self, i: int) -> None:
        """Receive what stage ``i`` begins with."""

    def leave(self, i: int, x: A_contra | None) -> None:
        """Send the result x of stage ``i``, float32 [rows, width], unless it is the last stage."""

    def cancel(self) -> None:
        """Give up what has been sent and not received."""


class StageRelay(Protocol[A]):
    """The stages of a model, each on a device of its own, and the ways between them."""

    @property
    def stages(self) -> Sequence[RelayStage[A]]:
        """In the order of a pass."""

    @property
    def tell(self) -> Callable[[Batch[A], int], A | None] | None:
        """The operations of the per-layer embeddings, on the first device; None if the model has none."""

    def begin(self) -> StageCourse[A]:
        """What one pass takes from stage to stage."""
