"""The interface of a model that the scheduler uses."""

from contextlib import AbstractContextManager
from typing import Protocol

from engine.decode.running import Steps
from engine.decode.slots import Slots
from engine.locking import Lock
from engine.models.base import Model
from engine.sampling.sampler import SamplerParams


class ServedModel(Protocol):
    """A loaded model with slots; ``engine.cached_model.CachedModel`` implements it."""

    lock: Lock
    model: Model
    slots: Slots
    recurrent_bytes: int

    def check_open(self) -> None:
        """Raise UsageError if the model has been closed."""

    def check_free(self) -> None:
        """Raise UsageError if this thread is in a function of the user that this model has called."""

    def forget(self) -> None:
        """Forget all tokens in the cache; no request has a slot."""

    def reserved(self, caller: str) -> AbstractContextManager[None]:
        """Refuse any use of the model by ``caller``."""

    def device_steps(self, params: SamplerParams) -> Steps | None:
        """The steps of the model whose tokens its device chooses, for requests with these parameters; None if the host has to
        choose the tokens."""
