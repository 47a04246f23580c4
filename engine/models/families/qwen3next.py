"""Qwen 3 Next: the layers of Qwen 3.5's mixtures, whose delta nets have their heads in another order.

Layer: ``engine/models/families/qwen35.py``.  The value heads of one key head are adjacent; alpha and beta are one tensor,
``ssm_ba`` (llama.cpp, ``src/models/qwen3next.cpp``).
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
