"""The feed-forward network of a layer: one for every row, or a mixture of experts."""

from dataclasses import dataclass

from engine.arrays import Array, Matrix, Value
from engine.models.experts import Experts
from engine.ops import Ops


@dataclass
class FeedForward:
    """SwiGLU (Shazeer 2020): gate and up [n_ff, n_embd], down [n_embd, n_ff]."""

    ffn_gate: Matrix
    ffn_up: Matrix
    ffn_down: Matrix


def feed_forward(ops: Ops, ffn: FeedForward | Experts[Array, Matrix], residual: Array, x: Value) -> Array:
    """residual + network(x): residual and x [rows, n_embd]; float32 [rows, n_embd]."""
    if isinstance(ffn, Experts):
        return ops.experts(ffn, residual, x)
    gate, up = ops.matmul(x, ffn.ffn_gate, ffn.ffn_up)
    return ops.matmul_add(residual, ops.swiglu(gate, up), ffn.ffn_down)
