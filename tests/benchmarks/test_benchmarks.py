"""The GPU suites for asv: they are skipped without a GPU, and they time what they claim to time."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import cuda
from engine.errors import DeviceError
from engine.synthetic.shapes import shapes

SUITES = [cuda.Matmul, cuda.Attention, cuda.Decode, cuda.Prompt]


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_is_skipped_without_a_gpu(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise DeviceError("there is none.")

    cuda.backend.cache_clear()
    monkeypatch.setattr(cuda, "open_device", none)
    with pytest.raises(NotImplementedError, match="there is none"):
        suite().setup(*(values[0] for values in suite.params))
    assert len(suite.params) == len(suite.param_names)
    assert any(name.startswith(("time_", "track_")) for name in dir(suite))


def test_shapes_exist() -> None:
    assert set(cuda.SHAPES) <= shapes().keys()


class FakeBackend:
    """A GPU whose clock advances by 2 µs for each operation that a recorded graph repeats."""

    def __init__(self) -> None:
        self.clock, self.recorded, self.multiplied = 0.0, 0, 0
        self.device = SimpleNamespace(event=lambda: self.clock, elapsed=lambda start, end: end - start)

    def record(self, work: Any) -> Any:
        before = self.multiplied
        work()
        self.recorded = self.multiplied - before

        def launch() -> None:
            self.clock += 2e-6 * self.recorded

        return SimpleNamespace(graph=SimpleNamespace(launch=launch))

    def capture(self, plan: Any) -> None:
        pass

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array

    weight = upload

    def matmul(self, x: np.ndarray, weight: Any) -> None:
        assert x.shape[1] == weight.columns
        self.multiplied += 1


def test_a_product_is_timed_with_cold_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = FakeBackend()
    monkeypatch.setattr(cuda, "backend", lambda: ops)
    suite = cuda.Matmul()
    suite.setup("Q4_0", 4)
    assert suite.track_matmul("Q4_0", 4) == pytest.approx(2.0)
    assert sum(weight.data.nbytes for weight in suite.weights) >= cuda.COLD  # type: ignore[attr-defined]
