"""The model that is built in, with a chat template, for servers in this process."""

from pathlib import Path

import engine
from engine.text.template.chat import ChatTemplate


def bundled(parallel: int = 4, n_ctx: int = 256, path: Path | None = None) -> engine.LLM:
    """The model, opened on the CPU; path: of another file of it."""
    llm = engine.load(path, device="cpu", n_ctx=n_ctx, parallel=parallel)
    llm.chat_template = ChatTemplate.load("chatml", llm.tokenizer)
    return llm
