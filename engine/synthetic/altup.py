"""Shapes of models with alternating updates: Gemma 3n."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gguf import GGMLQuantizationType as T

from engine.limits import STREAMS
from engine.synthetic.shape import N_VOCAB_TINY, Shape, Value


@dataclass(frozen=True)
class Gemma3nShape(Shape):
    """gemma3n: every ``pattern``-th layer is global, and the others slide.  The last ``n_shared`` layers read the caches of
    earlier ones.  The gates of the first ``n_sparse`` layers are sparse.  ``n_per_layer``: the width of per-layer embeddings;
    ``rank``: that of low-rank residuals."""

    pattern: int = 5
    n_shared: int = 0
    n_sparse: int = 0
    n_per_layer: int = 256
    rank: int = 64

    @property
    def per_layer(self) -> int:
        """The width of per-layer embeddings."""
        return self.n_per_layer

    @property
    def is_unscaled(self) -> bool:
        """Whether scores have no other scale than that of queries: True."""
        return True

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e, own = self.n_embd, self.n_per_layer
        yield "token_embd.weight", (self.n_vocab, e)
        for name in ("altup_proj", "altup_unembd_proj"):
            yield name + ".weight", (STREAMS - 1, e, e)
        yield "per_layer_token_embd.weight", (self.n_vocab, self.n_layer * own)
        yield "per_layer_model_proj.weight", (self.n_layer * own, e)
        yield "per_layer_proj_norm.weight", (own,)
        for layer in range(self.n_layer):
            block = f"blk.{layer}."
            for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
                yield f"{block}{name}.weight", (e,)
            for name in ("altup_router_norm", "altup_correct_scale", "laurel_post_norm"):
                yield f"{block}{name}.weight", (e,)
            yield block + "altup_correct_coef.weight", (STREAMS, STREAMS)
            yield block + "altup_predict_coef.weight", (STREAMS * STREAMS, STREAMS)
            yield block + "altup_router.weight", (STREAMS, e)
            yield block + "laurel_l.weight", (self.rank, e)
            yield block + "laurel_r.weight", (e, self.rank)
            # Layers that read the cache of another one have keys and values, too, which nothing reads.
            yield from self._attention(block)
            yield from self._feed_forward(block)
            yield block + "inp_gate.weight", (own, e)
            yield block + "proj.weight", (e, own)
        yield "output_norm.weight", (e,)

    def metadata(self) -> dict[str, Value]:
        """Windows, shared caches, streams and sparse gates."""
        return {
            "attention.sliding_window_pattern": [(il + 1) % self.pattern != 0 for il in range(self.n_layer)],
            "attention.shared_kv_layers": self.n_shared,
            "rope.freq_base_swa": 10000.0,
            "final_logit_softcapping": 30.0,
            "altup.active_idx": 0,
            "altup.num_inputs": STREAMS,
            "embedding_length_per_layer_input": self.n_per_layer,
            "activation_sparsity_scale": [1.6448535 if il < self.n_sparse else -math.inf for il in range(self.n_layer)],
        }

    def format_of(self, part: str, main: T) -> T | None:
        """llama.cpp leaves the matrices of alternating updates and of low-rank residuals as they are."""
        if part.startswith(("altup_", "laurel_")):
            return T.F32 if part.endswith("_coef") else T.F16
        return None


# Layers, width, heads, KV heads, head size, feed-forward, vocabulary, context, RoPE base, epsilon.
# fmt: off
ALTUPS: dict[str, Shape] = {
    "gemma3n-e2b": Gemma3nShape(
        "gemma3n", 30, 2048, 8, 2, 256, 8192, 262400, 32768, 1e6, 1e-6, window=512, n_shared=10, n_sparse=10,
    ),
    "gemma3n-e4b": Gemma3nShape(
        "gemma3n", 35, 2048, 8, 2, 256, 16384, 262400, 32768, 1e6, 1e-6, window=512, n_shared=15, n_sparse=10,
    ),
    # Rows that are not a multiple of 256, sparse gates in some layers, a tail that reads other layers' caches.
    "tiny-gemma3n": Gemma3nShape(
        "gemma3n", 6, 288, 3, 1, 64, 320, N_VOCAB_TINY, 512, 1e6, 1e-6, window=32, pattern=2, n_shared=2, n_sparse=3,
        n_per_layer=64, rank=32,
    ),
}
# fmt: on
