"""The bundled model, loaded once for all figures."""

from functools import cache
from pathlib import Path

import engine
from engine.gguf.file import GGUF, read_gguf
from engine.hub.resolve import resolve

REPOSITORY = Path(__file__).parents[2]


@cache
def file() -> GGUF:
    """The model's file."""
    return read_gguf(resolve(None))


@cache
def model() -> engine.LLM:
    """The model on the CPU."""
    return engine.load(device="cpu", n_ctx=512, cache_type="f16")


def piece(token: int) -> str:
    """The bytes of a token as a figure shows them: a space as an open box, a line break as an arrow."""
    text = model().tokenizer.token_bytes(token).decode(errors="replace")
    return text.replace(" ", "␣").replace("\n", "⏎")
