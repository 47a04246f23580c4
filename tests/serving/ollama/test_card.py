"""What a server says about a model that it has not opened."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

pytest.importorskip("starlette")

from engine.serving.ollama.card import card_of
from tests.tools.formats.test_select import QWEN3


def test_templates(tmp_path: Path) -> None:
    """A model can call functions if its template for requests with tools says so."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_chat_template([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": QWEN3}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec = SimpleNamespace(path=str(tmp_path / "model.gguf"), created=0)
    entry: Any = SimpleNamespace(spec=spec, served=None)
    card = asyncio.run(card_of(entry))
    assert (card.family, card.template, card.tool_template) == ("llama", "plain", QWEN3)
