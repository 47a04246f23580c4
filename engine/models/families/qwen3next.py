"""Qwen 3 Next: the layers of Qwen 3.5's mixtures, with another order of heads in delta nets.

``engine/models/families/qwen35.py`` describes the layer.  Here the value heads of each key head are adjacent, and alpha and
beta are in one tensor, ``ssm_ba`` (llama.cpp, ``src/models/qwen3next.cpp``).
"""

from engine.models.architecture import Architecture
from engine.models.config import ModelConfig
from engine.models.families.qwen35 import read_hybrid
from engine.models.metadata import Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    return read_hybrid(m, m.rope(), grouped=True)


ARCHITECTURES = (
    Architecture("qwen3next", "Qwen 3 Next 80B-A3B, Coder Next", read, "transformers Qwen3NextForCausalLM", "MTP"),
)
