"""The speed of a layer's mixture of experts on a GPU, for the sizes, formats and laws of current models.

    python -m benchmarks.mixtures [MODEL ...]

A mixture is everything from the norm to the sum with the residual.  One row is a step of an answer, limited by memory and by
launches; 4 are a step with drafts, 16 one of 16 answers; 512 are a prompt.  So many layers are computed in turn that no
expert stays in a cache.  The experts of a layer have equal weights, which the time does not depend on.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.suites.cuda import COLD, microseconds
from benchmarks.suites.operations import random_weight
from engine.compile.pool import compile_all
from engine.cuda.runtime.jobs import gpu_job
from engine.devices import open_device
from engine.ops.activation import Activation
from engine.ops.experts import Experts

ROWS = 1, 4, 16, 512


@dataclass(frozen=True)
class Model:
    """Sizes and formats: gate, up and down of ``formats``; ``shared``: whether a network of the same kind is added; ``law``:
    other fields of ``Experts``."""

    n_expert: int
    n_used: int
    n_embd: int
    n_ff: int
    formats: str
    shared: bool = False
    biased: bool = False
    law: tuple[tuple[str, Any], ...] = ()


MODELS = {
    "qwen3-30b-a3b": Model(128, 8, 2048, 768, "Q4_K Q4_K Q6_K"),
    "gpt-oss-20b": Model(
        *(32, 4, 2880, 2880, "MXFP4 MXFP4 MXFP4"),
        biased=True,
        law=(("activation", Activation("swiglu_oai", (7.0, 1.702))),),
    ),
    "glm-4.5-air": Model(
        *(128, 8, 4096, 1408, "Q4_K Q4_K Q5_0", True),
        law=(("gating", "sigmoid"), ("selection_bias", True), ("shared_gated", False)),
    ),
}


def experts_of(gpu: Any, model: Model) -> tuple[Callable[[], Experts[Any, Any]], int]:
    """A function that uploads the experts of a layer, and the bytes of the matrices that one row reads."""
    shapes = (model.n_ff, model.n_embd), (model.n_ff, model.n_embd), (model.n_embd, model.n_ff)
    own = [random_weight(name, *shape) for name, shape in zip(model.formats.split(), shapes, strict=True)]
    stacks = [replace(w, data=np.tile(w.data, (model.n_expert, 1))) for w in own]
    law = dict(model.law)
    rng = np.random.default_rng(0)

    def some(*shape: int) -> Any:
        return gpu.upload(rng.standard_normal(shape, np.float32))

    def upload() -> Experts[Any, Any]:
        further = dict(law)
        if model.biased:
            further |= {"router_bias": some(model.n_expert)}
            names = zip(("gate", "up", "down"), shapes, strict=True)
            further |= {f"{name}_bias": some(model.n_expert, rows) for name, (rows, _) in names}
        if "selection_bias" in law:
            further["selection_bias"] = some(model.n_expert)
        if model.shared:
            further["shared"] = tuple(map(gpu.weight, own))
        n_logits = model.n_expert + (model.shared and law.get("shared_gated", True))
        router = gpu.weight(random_weight("F32", n_logits, model.n_embd))
        return Experts(model.n_expert, model.n_used, router, *map(gpu.weight, stacks), **further)

    return upload, sum(w.data.nbytes for w in own) * (model.n_used + model.shared)


def measure(gpu: Any, name: str) -> list[str]:
    """Lines of a table: model, rows, launches, microseconds, and for one row GB/s."""
    model = MODELS[name]
    upload, n_bytes = experts_of(gpu, model)
    layers = [upload() for _ in range(-(-COLD // n_bytes))]
    weight, lines = gpu.upload(np.ones(model.n_embd, np.float32)), []
    inputs = {
        rows: gpu.upload(np.random.default_rng(rows).standard_normal((rows, model.n_embd), np.float32)) for rows in ROWS
    }

    def mixed(x: Any, layers: list[Experts[Any, Any]]) -> None:
        for experts in layers:
            gpu.experts(experts, x, gpu.rms_norm(x, weight, 1e-6))

    plans = {rows: gpu.record(partial(mixed, x, layers[:1])) for rows, x in inputs.items()}
    kernels = dict.fromkeys(launch.kernel for plan in plans.values() for launch in plan.launches)
    compile_all([gpu_job(kernel, gpu.device.compute_capability) for kernel in kernels])
    for rows, x in inputs.items():
        time = microseconds(gpu, partial(mixed, x, layers), len(layers))
        speed = f"{n_bytes / time / 1e3:.0f}" if rows == 1 else ""
        lines.append(f"| {name} | {rows} | {len(plans[rows].launches)} | {time:.1f} | {speed} |")
    return lines


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)} (all)")
    names = parser.parse_args().models
    gpu: Any = open_device("cuda")
    print("| model | rows | launches | µs per layer | GB/s |\n| --- | ---: | ---: | ---: | ---: |")
    for name in names:
        print("\n".join(measure(gpu, name)), flush=True)


if __name__ == "__main__":
    main()
