"""What all requests share: the models, the limits and the counts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from engine.serving.answer import Answer
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.metrics import Metrics
from engine.serving.served import Models, Served


@dataclass
class State:
    """The state of a server: ``draining``: no request is admitted any more."""

    models: Models
    limits: Limits
    metrics: Metrics = field(default_factory=Metrics)
    draining: bool = False

    @classmethod
    def of(cls, request: Request) -> "State":
        """The state of the server that a request reached.  Raises Refusal if the server is shutting down."""
        state: State = request.app.state.server
        if state.draining and request.method == "POST":
            raise Refusal("the server is shutting down; send the request again later.", 503, retry_after=5)
        return state


def note_answers(
    request: Request, state: State, served: Served, answers: Sequence[Answer], fields: Fields | None = None
) -> None:
    """Count answers when they end, and name in the line of the log what it says besides the path."""
    notes = request.scope["state"]["notes"]
    notes["model"] = served.name
    if fields is not None and (ignored := fields.ignored()):
        notes["ignored"] = ",".join(name[:40] for name in ignored[:16])
    for answer in answers:
        state.metrics.begin(served.name, answer)
    notes["tokens"] = Tokens(answers)


class Tokens:
    """The tokens of answers, counted when the line of the log is written."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def __str__(self) -> str:
        first = self._answers[0]
        return f"{first.n_cached}+{first.n_prompt - first.n_cached}+{sum(a.n_completion for a in self._answers)}"
