"""What llama-server's answers have in common: errors, and parameters of sampling."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.sampling.params import SamplerParams
from engine.serving.errors import Refusal

KINDS = {503: "unavailable_error"}
"""The statuses whose errors llama-server names otherwise."""


def error_body(refusal: Refusal) -> Mapping[str, Any]:
    """The body of an error."""
    kind = KINDS.get(refusal.status, refusal.kind)
    if refusal.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": refusal.status, "message": refusal.message, "type": kind, **refusal.more}}


def error_response(refusal: Refusal) -> Response:
    """The response of an error."""
    return JSONResponse(error_body(refusal), refusal.status, refusal.headers())


def model_of(request: Request) -> str | None:
    """The model that a GET request names: ``?model=NAME``."""
    return request.query_params.get("model")


def parameters(params: SamplerParams) -> Mapping[str, Any]:
    """Parameters of sampling in llama-server's words."""
    return {
        "seed": params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "repeat_last_n": params.repeat_last_n,
        "repeat_penalty": params.repeat_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_penalty_last_n,
    }
