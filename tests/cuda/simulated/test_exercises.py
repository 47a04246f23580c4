"""Kernels to write: solutions pass, and kernels that are wrong, or not written, do not."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda.runtime import compiler
from exercises import tasks
from exercises.kernels import NAMES


def test_every_kernel_has_a_check() -> None:
    assert tuple(tasks.TASKS) == NAMES
    for folder in ("kernels", "solutions"):
        assert {path.stem for path in (tasks.FOLDER / folder).glob("[!_]*.py")} == {*NAMES}
    source = [(tasks.FOLDER / "kernels" / f"{name}.py").read_text(encoding="utf-8") for name in NAMES]
    assert all(text.startswith(f'"""Kernel {i}. ') for i, text in enumerate(source, 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_has_the_bits_of_the_engine(name: str) -> None:
    assert tasks.check(name, "solutions") == (True, f"{name}: all bits are those of the engine.")
    assert all(kernel.build.__module__.startswith("engine.") for kernel in compiler.KERNELS.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_that_is_not_written(name: str) -> None:
    done, sentence = tasks.check(name)
    assert not done
    assert sentence == f"{name} is not written yet: replace the call of unwritten in exercises/kernels/{name}.py."


WRONG = (
    ("add", "if i < n:", "if i <= n:", "IndexError"),
    ("add", "x[i] + y[i]", "x[i] - y[i]", "results differ"),
    ("gate", "silu(g[i]) * u[i]", "silu(u[i]) * g[i]", "results differ"),
    ("blend", "fma(a[i], x[i], y[i])", "a[i] * x[i] + y[i]", "results differ"),
    ("warp_sums", "I(16)", "I(1)", "results differ"),
    ("choose", "places[k] < place", "places[k] > place", "three that are equal"),
    ("choose", "cuda.syncthreads()", "pass", "differ"),
    ("rms_norm", "chain = fma(x[i], x[i], chain)", "chain = chain + x[i] * x[i]", "results differ"),
    ("rotate", "-(b * sin[i])", "b * sin[i]", "results differ"),
    ("quantize", "round_product(x[at], inverse)", "I(x[at] * inverse)", "results differ"),
    ("product", "(units + 7) // 8", "units", "results differ"),
    (
        "chunk",
        "fold32(weights[thread] + weights[thread + 32])",
        "fold32(weights[2 * thread] + weights[2 * thread + 1])",
        "",
    ),
)


@pytest.mark.parametrize(("name", "old", "new", "said"), WRONG, ids=[f"{w[0]} {i}" for i, w in enumerate(WRONG)])
def test_a_kernel_that_is_wrong(
    name: str, old: str, new: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (tasks.FOLDER / "solutions" / f"{name}.py").read_text(encoding="utf-8")
    assert source.count(old) == 1
    space: dict[str, object] = {"__name__": "own"}
    exec(compile(source.replace(old, new), str(tmp_path / f"{name}.py"), "exec"), space)
    monkeypatch.setattr(tasks, "load", lambda folder, name: SimpleNamespace(**space))
    done, sentence = tasks.check(name)
    assert not done
    assert said in sentence and sentence.startswith(f"{name}, ")
