"""On a real GPU: mixtures of experts of the sizes and laws of current models give the CPU's bits (``pytest --gpu``)."""

import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("needs a real GPU", allow_module_level=True)

from engine.ops.activation import Activation
from tests.cuda.test_device import EPS, activations, computed, cpu, gpu, matrix, same
from tests.mixtures import TOKENS, on_device, random_experts
from tests.tiers import together

assert gpu and cpu
pytestmark = pytest.mark.gpu

SIGMOID: dict[str, Any] = {"gating": "sigmoid", "shared_gated": False, "weight_scale": 2.5}
OAI, RELU2 = Activation("swiglu_oai", (7.0, 1.702)), Activation("relu2")
CLAMPED, XIELU = Activation("swiglu_clamped", (10.0,)), Activation("xielu", (0.8, 0.4, 0.5, -1e-6))

KINDS: dict[str, tuple[Any, ...]] = {
    # formats, (n_expert, n_used, n_embd, n_ff), parts, formats of a shared network, other fields
    "gpt-oss": ("MXFP4 MXFP4 MXFP4", (32, 4, 2880, 2880), "router bias", "", {"activation": OAI}),
    "gpt-oss in Q8_0": ("Q8_0 Q8_0 Q8_0", (8, 4, 2880, 2880), "router bias", "", {"activation": OAI}),
    "GLM-4.5-Air": ("Q4_K Q4_K Q5_0", (128, 8, 1024, 1408), "selection", "Q4_K Q4_K Q5_0", SIGMOID),
    "GLM-4.5": ("Q4_K Q4_K Q6_K", (160, 8, 1280, 512), "selection", "Q4_K Q4_K Q6_K", SIGMOID),
    "DeepSeek-V3": (
        "Q4_K Q4_K Q6_K",
        (256, 8, 1792, 256),
        "selection",
        "",
        SIGMOID | {"n_group": 8, "n_group_used": 4},
    ),
    "OLMoE": ("Q4_K Q4_K Q6_K", (64, 8, 2048, 1024), "", "", {"normalized": False}),
    "DeepSeek-V2": (
        *("IQ4_XS IQ4_XS Q5_K", (160, 6, 1280, 512), "", ""),
        {"normalized": False, "weight_scale": 16.0, "n_group": 8, "n_group_used": 3, "group_best": 1},
    ),
    "DeepSeek-V4": (
        *("MXFP4 MXFP4 MXFP4", (256, 6, 1024, 512), "given", "MXFP4 MXFP4 MXFP4"),
        {"gating": "sqrt_softplus", "shared_gated": False, "weight_scale": 1.5, "activation": CLAMPED},
    ),
    "Llama 4": (
        *("Q4_K Q4_K Q6_K", (16, 1, 1280, 2048), "", "Q4_K Q4_K Q6_K"),
        {"gating": "sigmoid", "shared_gated": False, "normalized": False, "weighs_inputs": True},
    ),
    "Nemotron": ("NVFP4 NVFP4 NVFP4", (128, 6, 2688, 1856), "selection scale", "", SIGMOID | {"activation": RELU2}),
    "512 experts": (
        "Q4_K Q4_K Q6_K",
        (512, 10, 512, 256),
        "router selection bias scale",
        "Q4_K Q4_K Q6_K",
        {"activation": XIELU},
    ),
    "no quantization": ("BF16 BF16 F16", (30, 3, 200, 72), "bias scale", "F32 BF16 F16", SIGMOID),
}


@pytest.mark.parametrize("kind", together("experts of a kind", KINDS))
def test_kinds(gpu: Any, cpu: Any, kind: str) -> None:
    formats, sizes, parts, shared, law = KINDS[kind]
    experts = random_experts(matrix, formats, sizes, parts, shared, **law)
    held, norm = on_device(gpu, experts), activations(1, sizes[2], 4)[0]
    for rows in (1, 2, 9, 16, 17, 150):
        x, residual = activations(rows, sizes[2]), activations(rows, sizes[2], 5)
        tokens = (np.arange(rows) % TOKENS).astype(np.int32)

        def mixed(ops: Any, experts: Any, x: Any, residual: Any, norm: Any, tokens: Any) -> Any:
            return ops.experts(experts, residual, ops.rms_norm(x, norm, EPS), None, tokens)

        given = x, residual, norm, tokens
        (found,) = computed(gpu, mixed, gpu, held, *(gpu.upload(array) for array in given))
        same(found, mixed(cpu, experts, *given), f"{kind}, {rows} rows: ")


@pytest.mark.parametrize(
    "formats", together("experts of warpgroups", ["Q4_K Q4_K Q6_K", "Q5_K Q6_K Q4_K", "IQ3_S IQ2_XXS IQ4_XS"])
)
def test_many_pairs(gpu: Any, cpu: Any, formats: str) -> None:
    """Experts with many pairs, others with few or none."""
    n_expert, n_embd, n_ff, rng = 12, 768, 1280, np.random.default_rng(0)
    shares = np.array([0.3, 0.25, 0.2, 0.1, 0.06, 0.04, 0.03, 0.015, 0.004, 0.001, 0, 0])
    experts = random_experts(matrix, formats, (n_expert, 2, n_embd, n_ff))
    held = on_device(gpu, experts)
    for rows in (17, 60, 900):
        ids = np.array([rng.choice(n_expert, 2, False, shares) for _ in range(rows)], np.int32)
        given = activations(rows, n_embd), ids, rng.random((rows, 2)).astype(np.float32)
        (found,) = computed(gpu, gpu.sum_experts, held, *(gpu.upload(array) for array in given))
        same(found, cpu.sum_experts(experts, *given), f"{formats}, {rows} rows: ")
