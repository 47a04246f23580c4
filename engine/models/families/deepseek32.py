"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's latent attention, over the positions that an indexer selects.

Layers are those of deepseek2 (``engine/models/families/deepseek2.py``), except that a token attends to the
``attention.indexer.top_k`` positions that the indexer of the layer gives the largest scores
(``engine/models/latent_attention.py``), and to all of them as long as there are no more (llama.cpp,
``src/models/deepseek32.cpp``, ``src/models/glm-dsa.cpp``).  Of positions with equal scores, the lower one is preferred.

The rotation of the indexer has pairs (i, i + n_rope / 2) in DeepSeek-V3.2, and (2i, 2i + 1) in GLM-5.

DeepSeek's own code and llama.cpp multiply keys and queries of the indexer by a Hadamard matrix, which does not change their
products, and DeepSeek's rounds both to FP8.  Here, as in ``transformers``, neither is done.  The layer that drafts attends to
all positions in llama.cpp; here it has the indexer that its file contains.
"""

from dataclasses import replace

from engine.models.architecture import Architecture
from engine.models.config import ModelConfig
from engine.models.families.deepseek2 import latent_of, model_of
from engine.models.indexer_config import IndexerConfig
from engine.models.latent_config import LatentConfig
from engine.models.metadata import Metadata

SHARED_FROM = 1 << 20
"""The shortest context of the models whose layers share selected positions, for files without the key that says so."""


def read(m: Metadata) -> ModelConfig:
    """The configuration of a DeepSeek-V3.2."""
    latent = _indexed(m, neox=True)
    return model_of(m, lambda _: latent)


def read_glm(m: Metadata) -> ModelConfig:
    """The configuration of a GLM-5."""
    name = "attention.indexer.types"
    full = all(m.flags(name)) if m.has(name) else m.n_ctx_train < SHARED_FROM
    if not full:
        m.unsupported(
            "GLM 5.2, whose layers share the positions that an indexer selects, is not supported; use GLM 5 or 5.1."
        )
    latent = _indexed(m, neox=False)
    return model_of(m, lambda _: latent)


def _indexed(m: Metadata, neox: bool) -> LatentConfig:
    """The latent attention of layers with an indexer."""
    latent = latent_of(m)
    if not latent.q_rank:
        m.refuse("attention.q_lora_rank", "is missing, and the queries of an indexer need it: convert the model again")
    own = IndexerConfig(
        m.integer("attention.indexer.head_count", most=4096),
        m.width("attention.indexer.key_length", 0),
        m.integer("attention.indexer.top_k"),
        neox,
    )
    if own.d < latent.n_rope:
        m.refuse(
            "attention.indexer.key_length", f"is {own.d}, fewer than the {latent.n_rope} dimensions that are rotated"
        )
    return replace(latent, indexer=own)


ARCHITECTURES = (
    Architecture("deepseek32", "DeepSeek V3.2", read, "transformers DeepseekV32ForCausalLM", "MTP"),
    Architecture("glm-dsa", "GLM 5 and 5.1", read_glm, "transformers GlmMoeDsaForCausalLM", "MTP"),
)
