"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's latent attention, over the positions that an indexer selects.

Layers are those of deepseek2 (``engine/models/families/deepseek2.py``), except that a token attends to the
``attention.indexer.top_k`` positions that the indexer of the layer gives the largest scores
(``engine/models/latent_attention.py``), and to all of them as long as there are no more (llama.cpp,
``src/models/deepseek32.cpp``, ``src/models/glm-dsa.cpp``).  Of positions with equal scores, the lower one is preferred.

In GLM-5.2 and 5.3, the first three layers and then every fourth one have an indexer.  The others attend to the positions that
the last layer with an indexer has selected.

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
"""The shortest context of GLM-5.2 and 5.3, in files without the key that says which layers have an indexer: the first three,
and then every fourth."""


def read(m: Metadata) -> ModelConfig:
    """The configuration of a DeepSeek-V3.2."""
    latent = _indexed(m, neox=True)
    return model_of(m, lambda _: latent)


def read_glm(m: Metadata) -> ModelConfig:
    """The configuration of a GLM-5, 5.1, 5.2 or 5.3."""
    latent, full = _indexed(m, neox=False), _full(m)
    assert latent.indexer is not None
    shared = replace(latent, indexer=None, shared=latent.indexer.top_k)
    # A layer that drafts may have no indexer, and then attends to all positions.
    drafting = latent if f"blk.{m.n_layer}.indexer.attn_k.weight" in m.gguf.tensors else replace(latent, indexer=None)
    mixers = [latent if own else shared for own in full] + [drafting] * m.n_mtp
    return model_of(m, mixers.__getitem__)


def _full(m: Metadata) -> list[bool]:
    """For each layer of the trunk of a GLM-5, whether it has an indexer."""
    name = "attention.indexer.types"
    if not m.has(name):
        period = 1 if m.n_ctx_train < SHARED_FROM else 4
        return [max(0, il - 2) % period == 0 for il in range(m.n_layer)]
    full = m.flags(name)
    if not full[0]:
        m.refuse(name, "says that layer 0 has no indexer, and no layer before it selects positions")
    return full


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
    Architecture("glm-dsa", "GLM 5 to 5.3", read_glm, "transformers GlmMoeDsaForCausalLM", "MTP"),
)
