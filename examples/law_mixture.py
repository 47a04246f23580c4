"""A mixture of experts with the bits of the engine: python examples/law_mixture.py MODEL.gguf

The rest of the model is ``examples/law.py``.  This file has what differs in qwen3moe.  A router gives each expert a logit.
Those with the largest ones compute, and their outputs are added with weights, the one with the largest logit first.  So the
order of the sum is the row's own choice, and it does not matter which experts other rows use, or when an expert is ready.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from law import Array, Floats, Layer, Matrix, Model, choose, exp, f32, fma, swiglu

from engine.gguf.file import read_gguf


def route(logits: Array, n_used: int) -> tuple[Array, Array]:
    """The experts that a row uses and their weights, largest first: the softmax over the chosen logits.

    Where logits are equal, the lower expert comes first.  The weights are added in this order, one after another.
    """
    chosen = np.argsort(-logits, kind="stable")[:n_used]
    p = exp(logits[chosen] - logits[chosen[0]])
    total = f32(0)
    for each in p:
        total = total + each
    return chosen, p / total


class Mixture(Model):
    """A model whose layers have experts in place of a network."""

    ARCHITECTURES = ("qwen3moe",)
    NETWORK = ("ffn_gate_inp",)  # the router
    MIXTURE = True

    def layer(self, il: int) -> Layer:
        """Read the weights of a layer.  Expert e has the matrices ffn_gate.e, ffn_up.e and ffn_down.e."""
        layer = super().layer(il)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            stack = self.unread.pop(f"blk.{il}.{name}_exps.weight")
            for e, data in enumerate(stack.data.reshape(stack.shape[0], -1)):
                tensor = replace(stack, shape=stack.shape[1:], data=data)
                layer.matrices[f"{name}.{e}"] = Floats(tensor) if stack.type.name == "F32" else Matrix(tensor)
        return layer

    def network(self, layer: Layer, a: Array) -> Array:
        """The sum of the chosen experts: fma(w_last, y_last, ... fma(w_0, y_0, 0))."""
        w, total = layer.matrices, np.zeros_like(a)
        chosen, weights = route(w["ffn_gate_inp"].times(a), self.integer("expert_used_count", 0))
        for e, weight in zip(chosen, weights, strict=True):
            gate, up = w[f"ffn_gate.{e}"].times(a), w[f"ffn_up.{e}"].times(a)
            total = fma(weight, w[f"ffn_down.{e}"].times(swiglu(gate, up)), total)
        return total


def main() -> None:
    """Print the tokens that follow the first token of a vocabulary."""
    if len(sys.argv) != 2:
        sys.exit(
            "Name a file of a mixture: bitmirror synthetic --shape tiny-qwen3moe:Q8_0 -o tiny.gguf makes a small one."
        )
    model, ids = Mixture(read_gguf(Path(sys.argv[1]))), [0]
    for _ in range(8):
        ids.append(choose(model.step(ids[-1]), len(ids)))
    print(*ids)


if __name__ == "__main__":
    main()
