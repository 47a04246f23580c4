"""Whole mixtures of many kinds in the simulator: the bits of the mirror, in steps and in wide passes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda import backend
from engine.cuda.products import row_experts
from engine.ops.activation import Activation
from engine.ops.experts import Experts
from tests.cuda.simulated.test_experts import launched
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, gpu, weight
from tests.mixtures import TOKENS, random_experts
from tests.tiers import few

assert gpu

OAI, RELU2 = Activation("swiglu_oai", (1.5, 1.702)), Activation("relu2")
XIELU = Activation("xielu", (0.8, 0.4, 0.5, -1e-6))


def experts_of(
    formats: str, n_expert: int, n_used: int, n_embd: int, n_ff: int, parts: str = "", shared: str = "", **law: Any
) -> Experts[Any, Any]:
    return random_experts(weight, formats, (n_expert, n_used, n_embd, n_ff), parts, shared, **law)


STEP = ["rms_norm_router", "matmul_experts", "quantize", "matmul_experts", "join"]
STEP_OF_32 = ["rms_norm_router", "gate_up", "down", "join"]
STEP_JOINED = ["rms_norm_router", "matmul_experts", "matmul_join"]

STEP_WEIGHED = ["rms_norm_router", "matmul_experts", "weigh_products", "quantize", "down", "join"]

WEIGHED: dict[str, Any] = {"weighs_inputs": True}
LLAMA4: dict[str, Any] = {"gating": "sigmoid", "shared_gated": False, "normalized": False} | WEIGHED
GLM: dict[str, Any] = {"gating": "sigmoid", "shared_gated": False, "weight_scale": 2.5}
DEEPSEEK: dict[str, Any] = {
    "gating": "sqrt_softplus",
    "activation": Activation("swiglu_clamped", (0.5,)),
    "shared_gated": False,
    "weight_scale": 1.5,
}


@pytest.mark.parametrize(
    ("experts", "names"),
    few(
        [
            # gpt-oss
            (lambda: experts_of("MXFP4 MXFP4 MXFP4", 5, 2, 64, 32, "router bias", activation=OAI), STEP_OF_32),
            # GLM-4.5 and DeepSeek-V3
            (
                lambda: experts_of("Q8_0 Q8_0 Q4_K", 4, 2, 32, 256, "selection", "Q8_0 Q8_0 Q4_K", **GLM, n_group=2),
                STEP_JOINED,
            ),
            # Llama 4
            (lambda: experts_of("Q8_0 Q8_0 Q5_0", 3, 1, 32, 32, "", "Q8_0 Q8_0 Q5_0", **LLAMA4), STEP_WEIGHED),
            # Nemotron, from a file of NVFP4
            (lambda: experts_of("NVFP4 NVFP4 NVFP4", 4, 1, 64, 64, "scale", activation=RELU2, gating="sigmoid"), STEP),
            (
                lambda: experts_of("MXFP4 MXFP4 MXFP4", 3, 2, 160, 96, "router bias scale", activation=OAI),
                STEP_OF_32,
            ),
            (
                lambda: experts_of("Q8_0 Q8_0 Q5_1", 3, 2, 64, 32, "selection", "Q8_0 Q8_0 Q5_1", **GLM),
                STEP_OF_32,
            ),
            (
                lambda: experts_of("Q4_K Q4_K Q5_0", 3, 2, 256, 64, "", "Q4_K Q4_K Q5_0", **GLM),
                ["rms_norm_router", "matmul_experts", "quantize", "down", "join"],
            ),
            (
                lambda: experts_of("Q6_K Q4_K Q6_K", 2, 1, 256, 256, "selection bias", "Q6_K Q4_K Q6_K", **GLM),
                STEP_JOINED,
            ),
            (
                lambda: experts_of("Q8_0 Q8_0 Q4_K", 3, 2, 32, 256, "bias", "Q8_0 Q8_0 Q4_K", activation=XIELU),
                STEP_JOINED,
            ),
            (
                lambda: experts_of("Q4_K Q4_K Q6_K", 3, 2, 256, 256, "scale", "Q4_K Q4_K Q6_K", **LLAMA4),
                ["rms_norm_router", "matmul_experts", "weigh_products", "matmul_join"],
            ),
            (
                lambda: experts_of("Q8_0 Q4_1 F16", 5, 3, 32, 40, "", activation=RELU2, gating="sigmoid", **WEIGHED),
                None,
            ),
            # DeepSeek-V4's first layers
            (
                lambda: experts_of("Q4_0 Q4_0 Q5_0", 6, 3, 32, 32, "given", "Q4_0 Q4_0 Q5_0", **DEEPSEEK),
                STEP_OF_32,
            ),
            # OLMoE; experts of two formats, and of rows that are no multiple of 16
            (lambda: experts_of("Q8_0 Q4_1 F16", 34, 3, 32, 40, "bias", normalized=False), None),
            (lambda: experts_of("Q5_0 Q8_0 F32", 6, 2, 32, 24, "scale", **GLM, n_group=3), None),
            (lambda: experts_of("F16 Q8_0 BF16", 3, 2, 32, 40, "scale bias"), None),
            # Shared networks of another size
            (
                lambda: replace(
                    experts_of("Q8_0 Q8_0 Q8_0", 3, 2, 32, 32, "selection bias", activation=RELU2, gating="sigmoid"),
                    shared=(None, weight(FORMATS_BY_NAME["Q8_0"], 64, 32), weight(FORMATS_BY_NAME["Q8_0"], 32, 64)),
                    shared_gated=False,
                ),
                None,
            ),
        ],
        2,
    ),
)
@pytest.mark.parametrize("rows", few([1, 17]))
def test_kinds(gpu: backend.Backend, experts: Any, names: list[str] | None, rows: int) -> None:
    tokens = (np.arange(rows) % TOKENS).astype(np.int32)
    found = launched(gpu, experts(), rows, rows <= 16, tokens)
    if rows == 1 and names is not None:
        assert found == names


@pytest.mark.parametrize(
    ("formats", "units"), few([("MXFP4 MXFP4 Q8_0", 30), ("Q4_0 Q4_0 MXFP4", 90), ("Q5_0 Q5_0 Q5_1", 44)])
)
def test_chains_in_groups_of_eight_units(gpu: backend.Backend, formats: str, units: int) -> None:
    """Chains of 4, 12 and 6 units: groups that end one chain and begin another, and shorter ones."""
    names = launched(gpu, experts_of(formats, 2, 1, 32 * units, 32, "bias"), 1)
    assert names == STEP_OF_32


@pytest.mark.thorough
@pytest.mark.parametrize(("multiprocessors", "parts"), [(1, 1), (4, 4)])
def test_warps_of_down(gpu: backend.Backend, monkeypatch: pytest.MonkeyPatch, multiprocessors: int, parts: int) -> None:
    """As many warps share the chains of a row as fit on the GPU at once."""
    assert row_experts.parts_for("IQ4_NL", 128, 3, multiprocessors) == parts
    monkeypatch.setattr(row_experts, "parts_for", lambda *_: parts)
    names = launched(gpu, experts_of("Q8_0 Q8_0 IQ4_NL", 3, 3, 128, 288, "bias"), 1)
    assert names == STEP_OF_32


def test_rows_per_block_of_down() -> None:
    """The rows of a block divide those of a matrix."""
    assert [row_experts.parts_for("MXFP4", rows, 4, 132) for rows in (2880, 4096, 96, 32)] == [4, 2, 4, 4]
    assert [row_experts.parts_for("Q8_0", rows, 9, 132) for rows in (4096, 4096 + 64, 4096 + 32)] == [1, 2, 4]
