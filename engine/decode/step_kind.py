"""The kind of a step, which decides which kernels choose its tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from engine.decode.device_params import edits
from engine.decode.running import InFlightRequest


class Kind(NamedTuple):
    """Properties of a graph besides its rows: whether sampling is greedy for all requests, whether logits are edited, and how
    drafts are accepted."""

    greedy: bool
    with_edit: bool
    mode: str


def kind_of(requests: Sequence[InFlightRequest]) -> Kind:
    """The kind of a step with these requests.  Only a step with a single request may accept drafts by another rule than
    ``exact``."""
    params = [request.running.sampler.params for request in requests]
    greedy = all(p.greedy for p in params)
    mode = "exact" if greedy or len(requests) > 1 else requests[0].running.params.accept
    return Kind(greedy, any(edits(p) for p in params), mode)


def masked(request: InFlightRequest) -> bool:
    """Whether the tokens of a request are sampled with masks."""
    return request.running.sampler.matcher is not None
