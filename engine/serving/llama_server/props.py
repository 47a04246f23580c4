"""``GET /props``: what a model is, and how it answers by default."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.sampling.params import SamplerParams
from engine.serving.llama_server.shapes import model_of, parameters
from engine.serving.llama_server.tokens import special_text
from engine.serving.models import PATIENCE_SECONDS
from engine.serving.state import State
from engine.version import __version__


async def props(request: Request) -> Response:
    """The properties of a model; ``?model=NAME``: another one than the first."""
    async with State.of(request).models.use(model_of(request), PATIENCE_SECONDS) as served:
        llm = served.llm
        found = {
            "default_generation_settings": {"n_ctx": llm.n_ctx, "params": parameters(SamplerParams(**llm.sampling))},
            "total_slots": len(llm.slots),
            "model_alias": served.name,
            "model_path": served.spec.path,
            "chat_template": llm.chat_template.source if llm.chat_template is not None else "",
            "bos_token": special_text(llm, llm.tokenizer.bos_id) or "",
            "eos_token": special_text(llm, llm.tokenizer.eos_id) or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"bitmirror {__version__}",
            "is_sleeping": False,
            "receipts": True,
        }
        return JSONResponse(found)
