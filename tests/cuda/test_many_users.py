"""Steps of many users on a GPU: the bits of the CPU, for heads of several sizes and caches of several types."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.cuda.intrinsics import SIMULATED

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if SIMULATED:
    pytest.skip("needs a real GPU", allow_module_level=True)

import engine
from engine.cache.types import CHUNK
from engine.cuda.products import warpgroup_chain
from engine.synthetic.model import make_model
from engine.synthetic.shapes import shapes
from tests.cuda.test_group import steps
from tests.tiers import together

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"n_embd": 512, "n_ff": 1024}
"""Rows of whole units of 256, so that products for warpgroups have them."""

LENGTHS = (1, 70, 5, CHUNK, 9 * CHUNK + 1, 130)
"""Tokens before the steps: one to ten chunks, in one group and in two."""


@pytest.mark.parametrize(
    ("shape", "sizes", "cache_type", "users"),
    together(
        "many users",
        [
            ("tiny-qwen3", {"n_head": 4, "n_head_kv": 2}, "i8", 24),
            ("tiny-qwen3", {"n_head": 4, "n_head_kv": 2}, "f16", 100),
            ("tiny-llama", {"n_head": 8, "n_head_kv": 4, "head_dim": 64}, "q8_0", 48),
            ("tiny-qwen2", {"n_head": 8, "n_head_kv": 4}, "i8", 33),
            ("tiny-gemma3", {"n_head": 8, "n_head_kv": 4}, "i12", 48),
        ],
    ),
)
def test_steps_have_the_bits_of_the_cpu(
    shape: str, sizes: dict[str, Any], cache_type: str, users: int, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "m.gguf", replace(shapes()[shape], **SIZES, **sizes), "Q4_K_M", seed=5)
    given: dict[str, Any] = {"path_or_name": model, "cache_type": cache_type, "n_ctx": 1024, "parallel": users}
    cpu, gpu = (engine.load(**given, device=device) for device in ("cpu", "cuda"))
    assert list(steps(gpu, LENGTHS)) == list(steps(cpu, LENGTHS))
    ops: Any = gpu.model.ops
    if warpgroup_chain.serves(ops.device.compute_capability, ops.device.shared_memory):
        plans = [plan for key, plan in ops.plans.kept.items() if key[1] >= users]
        names = {launch.kernel.kernel.name for plan in plans for launch in plan.launches}
        assert {"wide_combine_quantize", "wide_quantize"} <= names
