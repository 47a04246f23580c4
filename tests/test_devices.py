"""Devices: their names, and that a GPU that is missing, too old or too small is reported in one sentence."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

import engine
from engine import devices
from engine.devices import describe_devices, open_device, parse_device, why_no_gpu
from engine.errors import DeviceError, UsageError
from engine.run import main
from tests.conftest import REPOSITORY
from tests.fake_driver import FakeDriver, Result

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("name", "index"),
    [("cpu", None), ("none", None), ("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:17", 17)],
)
def test_names(name: str, index: int | None) -> None:
    assert parse_device(name) == index


@pytest.mark.parametrize(
    "name", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda:1,2", "cuda:²", "cuda:99999", "cpu "]
)
def test_other_names_are_refused_before_anything_is_loaded(name: str, capsys: Capture) -> None:
    with pytest.raises(UsageError, match="--list-devices"):
        open_device(name)
    assert main(["-p", "x", "-m", "/no/such/model.gguf", "--device", name]) == 2
    error = sentence(capsys)
    assert repr(name) in error and "cuda:1" in error


def sentence(capsys: Capture) -> str:
    """The only line on stderr of a run that wrote nothing to stdout: an error of one sentence."""
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ") and line.endswith(".")
    assert ". " not in line
    return str(line)


def test_without_numba_cuda() -> None:
    """In a process where numba-cuda cannot be imported, as if it were not installed."""
    code = (
        "import sys\n"
        "for name in ('numba.cuda', 'numba_cuda', 'cuda', 'cuda.bindings'):\n"
        "    sys.modules[name] = None\n"
        "from engine.run import main\n"
        "cuda, listed = main(['-p', 'x', '--device', 'cuda']), main(['--list-devices'])\n"
        "print(cuda, listed, main(['-p', 'x', '-n', '1', '--device', 'auto']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("2 0 0\n")
    assert "cuda  the GPU needs the package numba-cuda: install it with pip" in done.stdout
    first = done.stderr.splitlines()[0]
    assert first.startswith(
        "error: the GPU needs the package numba-cuda: install it with pip install 'bitmirror[cuda]'"
    )
    assert "Traceback" not in done.stderr


# --- without a driver, or with a fake one ------------------------------------------------------------------------


@pytest.fixture
def gpus() -> None:
    """Skips where the GPU backend cannot be imported."""
    pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        pytest.skip("the simulator has no driver")


def use(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.cuda.runtime import device

    monkeypatch.setattr(device, "_driver", lambda: driver)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("start", "says"),
    [
        (RuntimeError("libcuda.so.1: cannot open"), "no NVIDIA driver was found"),
        (Result.CUDA_ERROR_NO_DEVICE, "sees no GPU"),
        (Result.CUDA_ERROR_SYSTEM_NOT_READY, "could not start (CUDA_ERROR_SYSTEM_NOT_READY)"),
    ],
)
def test_a_driver_that_does_not_start(
    start: Exception | Result, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")

    def initialize(flags: int) -> tuple[int]:
        if isinstance(start, Exception):
            raise start
        return (bindings.CUresult(int(start)),)

    monkeypatch.setattr(bindings, "cuInit", initialize)
    assert main(["-p", "x", "--device", "cuda"]) == 2
    assert says in sentence(capsys)
    assert main(["--list-devices"]) == 0
    cpu, gpu = capsys.readouterr().out.splitlines()
    assert cpu.startswith("cpu ") and "memory free" in cpu
    assert gpu.startswith("cuda ") and says in gpu
    assert open_device("auto").name == open_device("none").name == "cpu"
    assert says in why_no_gpu()


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    use(FakeDriver(), monkeypatch)
    assert main(["-p", "x", "--device", "cuda:1"]) == 2
    assert "there is no cuda:1 on this machine; use cuda:0" in sentence(capsys)
    use(FakeDriver(gpus=[("Abacus X1", (9, 0))] * 3), monkeypatch)
    assert main(["-p", "x", "--device", "cuda:3"]) == 2
    assert "use cuda:0 to cuda:2" in sentence(capsys)


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    use(FakeDriver(gpus=[("Abacus I", (6, 1))]), monkeypatch)
    assert main(["-p", "x", "--device", "cuda"]) == 2
    error = sentence(capsys)
    assert "Abacus I has compute capability 6.1" in error and "7.5" in error
    assert open_device("auto").name == "cpu"
    # --verbose says what auto does.
    assert main(["-p", "x", "-n", "1", "--verbose"]) == 0
    assert "auto selects the CPU: Abacus I has compute capability 6.1" in capsys.readouterr().err
    assert main(["-p", "x", "-n", "1"]) == 0
    assert "Abacus" not in capsys.readouterr().err


@pytest.mark.usefixtures("gpus")
def test_too_little_memory(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    words = ["-p", "x", "--device", "cuda"]
    # There is too little free memory, which is detected before anything is loaded.
    use(FakeDriver(free=400 << 20), monkeypatch)
    assert main(words) == 2
    assert "are free; choose a smaller model" in sentence(capsys)
    # Another program takes the memory in between.
    use(FakeDriver(room=4 << 20), monkeypatch)
    assert main(words) == 2
    error = sentence(capsys)
    assert "Abacus X1 has 8.59 GB free and the" in error and "smaller context (-c)" in error


@pytest.mark.usefixtures("gpus")
def test_too_little_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory for a table that the GPU reads there; it does not count as memory of the GPU."""
    from engine.cuda.runtime.device import Device

    use(driver := FakeDriver(), monkeypatch)
    device = Device()
    assert (device.multiprocessors, device.shared_memory) == (3, 99 << 10)
    table = device.allocate_host(1000, "the weights (per_layer_token_embd.weight)")
    assert (table.n_bytes, device.allocated, len(driver.pinned)) == (1000, 0, 1)
    driver.room = 4 << 20
    with pytest.raises(DeviceError, match=r"^the weights need 2\.00 GB of host memory that .*; close other programs"):
        device.allocate_host(2 * 10**9, "the weights")


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    use(FakeDriver(copies=Result.CUDA_ERROR_ILLEGAL_ADDRESS), monkeypatch)
    assert main(["-p", "x", "--device", "cuda"]) == 2
    assert "Abacus X1 reported illegal address during a copy to the device" in sentence(capsys)


@pytest.mark.usefixtures("gpus")
def test_devices_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    use(FakeDriver(gpus=[("Abacus X1", (9, 0)), ("Abacus I", (6, 1))]), monkeypatch)
    assert main(["--list-devices"]) == 0
    _, *gpus = capsys.readouterr().out.splitlines()
    assert gpus == ["  ".join(words) for words in describe_devices()[1:]] == [
        "cuda:0  Abacus X1, compute capability 9.0, 8.6 of 17.2 GB free",
        "cuda:1  Abacus I, compute capability 6.1, 8.6 of 17.2 GB free",
    ]  # fmt: skip
    assert why_no_gpu() == ""
    assert open_device("auto").label == "cuda:0 Abacus X1"
    assert open_device("cpu", 1).label == "cpu"


def test_other_errors_are_not_hidden_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(devices, "_gpu", broken)
    with pytest.raises(ZeroDivisionError):
        open_device("auto")
    monkeypatch.setattr(devices, "_gpu", lambda *given: (_ for _ in ()).throw(DeviceError("none.")))
    with pytest.raises(DeviceError):
        open_device("cuda")


@dataclass
class CountingDriver(FakeDriver):
    """Also records which memory is allocated: address -> bytes."""

    allocated: dict[int, int] = field(default_factory=dict)

    def cuMemAlloc(self, n_bytes: int) -> Any:
        status, address = super().cuMemAlloc(n_bytes)
        self.allocated[address] = n_bytes
        return status, address

    def cuMemFree(self, address: int) -> Any:
        del self.allocated[int(address)]
        return (Result.CUDA_SUCCESS,)


@pytest.mark.usefixtures("gpus")
def test_closing_a_model_frees_its_memory_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.cuda.runtime.device import Device

    driver = CountingDriver()
    use(driver, monkeypatch)
    monkeypatch.setattr(Device, "launch", lambda *_: None)  # of the kernel that repacks weights
    with engine.load("pycoder-draft", n_ctx=64, device="cuda", draft_model="pycoder-draft") as llm:
        assert sum(driver.allocated.values()) > 2 * llm.n_bytes
    assert driver.allocated == {}
    with pytest.raises(UsageError, match="closed"):
        llm.generate("x")


@pytest.mark.parametrize(
    ("shared", "blocks", "percent"),
    [
        (0, 0, 40),
        (0, 4, 40),
        (60 << 10, 0, 40),
        (52 << 10, 2, 47),
        (74 << 10, 3, 99),
        (170 << 10, 2, 75),
        (227 << 10, 0, 100),
    ],
)
def test_shared_memory_that_a_kernel_prefers(shared: int, blocks: int, percent: int) -> None:
    """Enough for the blocks that should be resident, as far as they fit; the usual share where that is enough."""
    shared_percent = pytest.importorskip("engine.cuda.runtime.device").shared_percent
    assert shared_percent(shared, blocks, 227 << 10) == percent


def test_shared_memory_that_a_pass_prefers() -> None:
    """Kernels of a step prefer what one of them needs, unless one depends on the cache; those of a prompt each their own."""
    plans = pytest.importorskip("engine.cuda.runtime.plans")
    from engine.cuda.attention.integer_steps import attend_integer_chunks
    from engine.cuda.delta_net import delta_net
    from engine.cuda.products.experts import matmul_experts
    from engine.cuda.products.matmul import matmul_quantized
    from engine.cuda.runtime.tensor import Launch

    product, attention = (
        matmul_quantized(("Q4_K",), 1, False, False),
        attend_integer_chunks("i8", 128, 128, 4, True, 4, 3, True),
    )
    mixture = matmul_experts(("Q4_K",), 1, 8, False, False)
    step, attending, expert, net = (
        [Launch(kernel, (1,), 32, (), (), ())] for kernel in (product, attention, mixture, delta_net(128, 4, 1))
    )
    assert plans.percent(step, 1, 227 << 10) == 40
    assert [plans.percent(step + attending, rows, 227 << 10) for rows in (1, 16, 17)] == [98, 98, 0]
    assert [plans.percent(step + attending + other, 1, 227 << 10) for other in (expert, net)] == [0, 0]
