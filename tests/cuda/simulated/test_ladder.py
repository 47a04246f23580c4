"""The steps of ``examples/ladder`` in the simulator: their bits, and that a wrong bit is noticed."""

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda.runtime import simulator
from tests.conftest import REPOSITORY
from tests.cuda.simulated.device import SimulatedDevice

LADDER = REPOSITORY / "examples" / "ladder"
STEPS = sorted(path for path in LADDER.glob("*.py") if path.name != "ladder.py")


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The shared module, as a step imports it."""
    monkeypatch.syspath_prepend(str(LADDER))
    monkeypatch.setattr(sys, "argv", ["step"])
    import ladder

    return ladder


@pytest.mark.parametrize("step", STEPS, ids=lambda path: path.stem)
def test_a_step_has_the_bits_of_the_cpu(step: Path, ladder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    title = runpy.run_path(str(step), run_name="__main__")["__doc__"].splitlines()[0]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(title.rstrip(".")) and line.endswith("bits equal  simulator")


@pytest.mark.parametrize("shape", [(16, 256), (16, 4352)])
def test_other_matrices(
    shape: tuple[int, int], ladder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A single unit, and 17 in chains of three, of which two are empty."""
    monkeypatch.setattr(sys, "argv", ["step", *map(str, shape)])
    for name in ("4_vectors", "5_warp_per_chain", "7_two_records"):
        runpy.run_path(str(LADDER / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.count(f"{shape[0]} x {shape[1]} ") == 3


def test_a_bit_that_differs_is_counted(ladder: Any) -> None:
    given = ladder.matrix(*ladder.MATRIX)
    wrong = given.expected.copy()
    wrong.view(np.int32)[5] ^= 1
    step = runpy.run_path(str(LADDER / "4_vectors.py"))["vectors"]()
    launch = step, (1, 256), ladder.PLAIN
    with pytest.raises(SystemExit, match="^Title: 1 of 32 results differ from those of the CPU.$"):
        ladder.compare("Title.\n", ladder.Inputs(given.arrays, given.cold, wrong, given.n_bytes, given.shape), launch)


@pytest.mark.parametrize("shape", [("17", "256"), ("16", "100"), ("0", "256")])
def test_shapes_that_have_no_tiles(shape: tuple[str, str], ladder: Any) -> None:
    with pytest.raises(SystemExit, match="give a multiple of 16 rows"):
        ladder.matrix(*map(int, shape))


def test_the_law_of_dp4a(ladder: Any) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(-128, 128, (2, 50, 4)).astype(np.int8)
    for x, y in zip(a, b, strict=True):
        expected = 7 + sum(int(i) * int(j) for i, j in zip(x, y, strict=True))
        assert ladder.dp4a(x.view(np.uint32)[0], y.view(np.uint32)[0], np.int32(7)) == expected


def test_the_time_of_a_launch(ladder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a GPU: the first launch gives the result, then launches that take the copies of the matrix in turn are timed."""
    launched: list[list[int]] = []

    class Device(SimulatedDevice):
        def launch(self, step: Any, grid: Any, block: int, arguments: Any, percent: int = 0) -> None:
            launched.append([int(argument) for argument in arguments])
            if len(launched) == 1:
                kinds = zip(step.kernel.arguments, arguments, strict=True)
                given = [self.at(a) if isinstance(kind, types.CPointer) else a for kind, a in kinds]
                simulator.run(step, grid, block, given, strict=False)

        def event(self) -> int:
            return 0

        def elapsed(self, start: int, end: int) -> float:
            return 16e-6

    monkeypatch.setattr(ladder, "Device", Device)
    monkeypatch.setattr(ladder, "SIMULATED", False)
    monkeypatch.setattr(ladder, "COLD_BYTES", 1)
    ladder._device.cache_clear()
    ladder._uploaded.clear()
    given = ladder.matrix(16, 256)
    step = runpy.run_path(str(LADDER / "4_vectors.py"))["vectors"]()
    ladder.compare("Title.", given, (step, (1, 256), ladder.PLAIN))
    # Two copies, each four times; 16 microseconds for all of them.
    assert len(launched) == 1 + 8 and len({arguments[0] for arguments in launched[1:]}) == 2
    rate = given.n_bytes / 2e-6 / 1e9
    assert capsys.readouterr().out.endswith(f"  bits equal       2.0 us {rate:6.0f} GB/s\n")
    ladder._device.cache_clear()
    ladder._uploaded.clear()
