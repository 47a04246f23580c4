"""The suites for asv: all run, those for a GPU are skipped without one, and they time what they claim to time."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.suites import commits, cuda, generate, load, operations, sampler, tokenizer
from engine.cpu.products.repack import Records
from engine.errors import DeviceError
from engine.gguf.quants import FORMATS
from engine.hub.resolve import resolve
from engine.synthetic.shapes import shapes

CPU_SUITES = [
    *(operations.Matmul, operations.Embed, operations.Elementwise, operations.Attend),
    *(sampler.Sample, sampler.Logprobs, tokenizer.Encode, tokenizer.Construct),
    *(generate.Prompt, generate.Generation, generate.Complete, load.Header, load.Load),
]


def first(params: tuple[Any, ...]) -> list[Any]:
    """The first value of each parameter; asv takes a single one without a tuple around its values."""
    return [values[0] for values in params] if params and isinstance(params[0], tuple) else list(params[:1])


@pytest.mark.parametrize(
    "suite", CPU_SUITES, ids=lambda suite: f"{suite.__module__.rpartition('.')[2]}.{suite.__name__}"
)
def test_a_suite_runs(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "SECONDS", 0.0)
    instance, params = suite(), first(getattr(suite, "params", ()))
    if hasattr(suite, "setup"):
        instance.setup(*params)
        ready = dict(vars(instance))
        instance.setup(*params)  # as asv does before every sample
        assert all(vars(instance)[name] is value for name, value in ready.items())
    timed = [name for name in dir(suite) if name.startswith(("time_", "track_", "peakmem_"))]
    assert timed
    for name in timed:
        getattr(instance, name)(*params)


def test_quantized_matrices_are_measured_as_models_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "SECONDS", 0.0)
    product, embedding = operations.Matmul(), operations.Embed()
    product.setup("Q4_K", 1)
    embedding.setup("Q4_K", 1)
    assert isinstance(product.weight, Records) and isinstance(embedding.table, Records)
    assert product.track_matmul("Q4_K", 1) > 0 and embedding.track_embed("Q4_K", 1) > 0


def test_a_large_model_is_loaded() -> None:
    """The test loads a small model, because the suite's own takes 390 MB."""
    suite, path = load.LoadLarge(), str(resolve("pycoder"))
    suite.time_header(path)
    suite.time_load(path)
    suite.peakmem_load(path)


def test_formats_are_measured() -> None:
    assert tuple(each.name for each in FORMATS.values()) == operations.FORMAT_NAMES


@pytest.mark.parametrize("name", commits.MOVED)
def test_a_module_that_moved_is_found(name: str) -> None:
    assert commits.find(name).__name__ in (name, *commits.MOVED[name])
    assert not commits.exists("engine.no_room.no_module")


class Suite:
    """Counts how often it is set up; no commit has what -1 asks for."""

    def __init__(self) -> None:
        self.count = 0

    @commits.once
    def setup(self, value: int) -> None:
        self.count += 1
        if value < 0:
            self.nothing()  # type: ignore[attr-defined]


def test_a_setup_does_its_work_once() -> None:
    suite = Suite()
    for value in (1, 1, 2, 2, 1):
        suite.setup(value)
    assert suite.count == 3


def test_a_commit_that_differs_is_skipped() -> None:
    with pytest.raises(NotImplementedError, match="this commit differs: .*'nothing'"):
        Suite().setup(-1)


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
