"""The steps of ``examples/ladder``: their code for GPUs, and the book.

``tests/cuda/simulated/test_ladder.py`` tests their bits.
"""

import os
import re
import runpy
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

LADDER = REPOSITORY / "examples" / "ladder"
STEPS = sorted(path for path in LADDER.glob("*.py") if path.name != "ladder.py")


def test_every_step_is_described() -> None:
    book = (REPOSITORY / "docs" / "ladder.md").read_text(encoding="utf-8")
    for path in STEPS:
        source = path.read_text(encoding="utf-8")
        assert f"    python examples/ladder/{path.name}\n" in source
        assert f"examples/ladder/{path.name}" in book
        if "1_" not in path.name:
            assert re.search(r"^Against step \d", source, re.M)


@pytest.mark.thorough
@pytest.mark.parametrize("step", STEPS, ids=lambda path: path.stem)
def test_a_step_compiles(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sums of products that are not ``fma``, and without registers in memory."""
    pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
    from engine.cuda.runtime import driver
    from engine.cuda.runtime.compiler import Kernel, compile_ptx
    from engine.cuda.runtime.ptx import check

    # As if there were a GPU, so that the step does not ask for the simulator.
    monkeypatch.setattr(driver, "require_gpu", lambda: None)
    monkeypatch.setattr(sys, "path", [str(LADDER), *sys.path])
    names: dict[str, Any] = runpy.run_path(str(step))
    heads, kv, d, _ = names.get("HEADS", (1, 1, 1, 1))
    sizes = {"d": d, "share": heads // kv}
    kernels = [value for value in names.values() if isinstance(value, Kernel) and value.name != "matmul_quantized"]
    assert kernels or step.stem == "8_engine"
    for kernel in kernels:
        ptx = compile_ptx(kernel(*map(sizes.__getitem__, signature(kernel.build).parameters)), (9, 0))
        assert check(ptx) == []
        assert ".local" not in ptx


@pytest.mark.gpu
def test_the_steps_on_a_gpu() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    for words in ([], ["4096", "4096"]):
        done = subprocess.run(
            [sys.executable, str(LADDER / "ladder.py"), *words], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == (len(STEPS) if not words else 8)
        assert all(re.search(r"  bits equal  +[\d.]+ us +\d+ GB/s$", line) for line in lines)
