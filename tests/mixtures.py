"""Random mixtures of experts of any kind."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as T

from engine.gguf.quants import FORMATS, Format
from engine.ops.activation import SWIGLU
from engine.ops.experts import Experts
from engine.ops.weight import Weight

TOKENS = 5
"""The tokens of a table of experts."""


def random_experts(
    matrix: Callable[[Format, int, int], Weight],
    formats: str,
    sizes: tuple[int, int, int, int],
    parts: str = "",
    shared: str = "",
    **law: Any,
) -> Experts[Any, Any]:
    """Experts of ``sizes`` (n_expert, n_used, n_embd, n_ff).

    matrix: (format, rows, columns) to a random weight; formats: those of gate, up and down; shared: those of the shared
    network, which has the size of an expert; parts: what they have beside that, of "router" and "selection" (biases), "bias",
    "scale" and "given"; law: other fields of ``Experts``.
    """
    n_expert, n_used, n_embd, n_ff = sizes
    rng, gated = np.random.default_rng(n_expert), law.get("activation", SWIGLU).gated
    shapes = (n_ff, n_embd), (n_ff, n_embd), (n_embd, n_ff)

    def stacks(names: str, n: int) -> list[Any]:
        of = [FORMATS[T[name]] for name in names.split()]
        found = [matrix(e, n * rows, columns) for e, (rows, columns) in zip(of, shapes, strict=True)]
        return found if gated else [None, *found[1:]]

    def some(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    if shared:
        # None of their rows is one of the first expert's.
        law["shared"] = tuple(w and replace(w, data=w.data[::-1].copy()) for w in stacks(shared, 1))
    if "router" in parts:
        law["router_bias"] = some(n_expert)
    if "selection" in parts:
        law["selection_bias"] = some(n_expert)
    if "given" in parts:
        law["given"] = np.argsort(rng.random((TOKENS, n_expert)))[:, :n_used].astype(np.int32)
    for name, (rows, _) in zip(("gate", "up", "down"), shapes, strict=True):
        if name != "gate" or gated:
            law |= {f"{name}_bias": some(n_expert, rows)} if "bias" in parts else {}
            law |= {f"{name}_scale": some(n_expert)} if "scale" in parts else {}
    router = matrix(FORMATS[T.F32], n_expert + (bool(shared) and law.get("shared_gated", True)), n_embd)
    # Two experts are always equal, so their order depends on their numbers.
    router.data[n_expert - 1] = router.data[0]
    return Experts(n_expert, n_used, router, *stacks(formats, n_expert), **law)


def on_device(gpu: Any, experts: Experts[Any, Any]) -> Experts[Any, Any]:
    """The same experts in the memory of a GPU."""

    def held(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(held, value))
        if isinstance(value, Weight):
            return gpu.weight(value)
        return gpu.upload(value) if isinstance(value, np.ndarray) else value

    return replace(experts, **{field.name: held(getattr(experts, field.name)) for field in fields(experts)})
