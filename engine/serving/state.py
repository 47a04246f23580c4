"""What all requests share: the models, the limits and the counts."""

from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from engine.serving.budget import Budget
from engine.serving.errors import Refusal
from engine.serving.limits import Limits
from engine.serving.metrics import Metrics
from engine.serving.models import Models


@dataclass
class State:
    """The state of a server: ``draining``: no request is admitted any more; ``budget``: the memory that requests hold;
    ``slot_folder``: where slots are saved, None: nowhere."""

    models: Models
    limits: Limits
    metrics: Metrics = field(default_factory=Metrics)
    budget: Budget = field(default_factory=Budget)
    draining: bool = False
    slot_folder: Path | None = None

    @classmethod
    def of(cls, request: Request) -> "State":
        """The state of the server that a request reached.  Raises Refusal if the server is shutting down."""
        state: State = request.app.state.server
        if state.draining and request.method == "POST":
            raise Refusal("the server is shutting down; send the request again later.", 503, retry_after=5)
        return state
