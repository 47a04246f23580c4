"""Devices: their names, and that a GPU that is missing, too old or too small is reported in one sentence."""

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import engine
from engine import devices, parity
from engine.checks import memory_size
from engine.devices import check_gpu_memory, describe_devices, open_device, parse_device, why_no_gpu
from engine.errors import ContextError, DeviceError, UsageError
from engine.run import main
from engine.speculative.draft_model import DraftModel
from tests.conftest import REPOSITORY
from tests.fake_driver import FakeDriver, Names, Result

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("name", "index"),
    [("cpu", None), ("none", None), ("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:17", 17)],
)
def test_names(name: str, index: int | None) -> None:
    assert parse_device(name) == index


@pytest.mark.parametrize(
    "name", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda:1;2", "cuda:²", "cuda:99999", "cpu "]
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
    from engine.cuda.runtime import driver as loaded

    for module in (device, loaded):
        monkeypatch.setattr(module, "bindings", lambda: driver)


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
    assert re.fullmatch(r"cpu +\S.*, [0-9]+ threads? \([0-9]+ MiB, [0-9]+ MiB free\)", cpu)
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
    use(FakeDriver(room=1 << 20), monkeypatch)
    assert main(words) == 2
    error = sentence(capsys)
    assert "Abacus X1 has 8.59 GB free and the" in error and "smaller context (-c)" in error


@pytest.mark.usefixtures("gpus")
def test_too_little_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory for a table that the GPU reads there; it does not count as memory of the GPU."""
    from engine.cuda.runtime.device import Device
    from engine.cuda.runtime.ring import PinnedRing

    use(driver := FakeDriver(), monkeypatch)
    device = Device()
    assert (device.multiprocessors, device.shared_memory) == (3, 99 << 10)
    table = device.allocate_host(1000, "the weights (per_layer_token_embd.weight)")
    assert (table.n_bytes, device.allocated, len(driver.pinned)) == (1000, 0, 1)
    driver.room = 16 << 20
    with pytest.raises(DeviceError, match=r"^the weights need 2\.00 GB of host memory that .*; close other programs"):
        device.allocate_host(2 * 10**9, "the weights")
    with pytest.raises(
        DeviceError, match=r"^buffers for the weights need 0\.02 GB of host memory that .*; close other"
    ):
        PinnedRing(device, 1).take(20 << 20)


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
        "cuda:0  Abacus X1, compute capability 9.0, peer access to cuda:1 (16384 MiB, 8192 MiB free)",
        "cuda:1  Abacus I, compute capability 6.1, peer access to cuda:0 (16384 MiB, 8192 MiB free)",
    ]  # fmt: skip
    use(FakeDriver(gpus=[("Abacus X1", (9, 0))] * 2, linked=False), monkeypatch)
    assert describe_devices()[2][1] == "Abacus X1, compute capability 9.0, no peer access (16384 MiB, 8192 MiB free)"
    use(FakeDriver(), monkeypatch)
    assert describe_devices()[1][1] == "Abacus X1, compute capability 9.0 (16384 MiB, 8192 MiB free)"
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


@dataclass
class ContextDriver(FakeDriver):
    """Also counts contexts: the uses of that of each GPU, and how many were created."""

    uses: dict[int, int] = field(default_factory=dict)
    created: int = 0

    def cuDevicePrimaryCtxRetain(self, index: int) -> Any:
        self.created += self.uses.get(index, 0) == 0
        self.uses[index] = self.uses.get(index, 0) + 1
        return super().cuDevicePrimaryCtxRetain(index)

    def cuDevicePrimaryCtxRelease(self, index: int) -> Any:
        self.uses[index] -= 1
        return (Result.CUDA_SUCCESS,)


@dataclass
class LaunchingDriver(FakeDriver):
    """Also keeps the sizes, attributes and arguments of launches: the bytes of ``n_arguments`` ones."""

    n_arguments: int = 0
    launches: list[Any] = field(default_factory=list)
    result: Result = Result.CUDA_SUCCESS

    CUlaunchAttributeID = Names()
    CUlaunchConfig = SimpleNamespace

    def CUlaunchAttribute(self) -> Any:
        return SimpleNamespace(value=SimpleNamespace())

    def cuModuleLoadData(self, code: bytes) -> Any:
        return Result.CUDA_SUCCESS, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> Any:
        return Result.CUDA_SUCCESS, "function"

    cuFuncSetAttribute = FakeDriver._nothing

    def cuLaunchKernelEx(self, config: Any, function: Any, addresses: int, extra: int) -> Any:
        given = (ctypes.c_uint64 * self.n_arguments).from_address(addresses)
        grid, block = (config.gridDimX, config.gridDimY, config.gridDimZ), config.blockDimX
        attributes = [attribute.id.removeprefix("CU_LAUNCH_ATTRIBUTE_") for attribute in config.attrs]
        assert config.numAttrs == len(attributes) and config.blockDimY == config.blockDimZ == 1
        self.launches.append((grid, block, attributes, [ctypes.string_at(address, 8) for address in given]))
        return (self.result,)


@pytest.mark.usefixtures("gpus")
def test_what_a_kernel_is_launched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own sizes and arguments, also after others, and with an attribute if it may overlap with the kernel before it."""
    from engine.cuda.runtime import compiler
    from engine.cuda.runtime import device as module

    use(driver := LaunchingDriver(n_arguments=5), monkeypatch)
    monkeypatch.setattr(module, "cubin", lambda specialization, compute_capability: (b"code", "kernel", False))
    monkeypatch.setattr(module, "_FUNCTIONS", {})
    kinds = compiler.F32P, compiler.i32, compiler.u32, compiler.f32, compiler.u64
    many = compiler.Kernel("many", kinds, lambda: None)()
    few = compiler.Kernel("few", (compiler.U8P, compiler.i32), lambda: None)()
    device: Any = module.Device()
    device.launch(many, (7, 6), 96, (1 << 40, -3, 0xFFFFFFFF, np.float32(0.1), 2**64 - 1))
    device.launch(few, 5, 32, (np.uint64(9), np.int32(-(2**31))), percent=70)
    device.finish()
    device.launch(many, (1, 2, 3), 64, (0, True, 1, 2, 0))
    overlap, share = "PROGRAMMATIC_STREAM_SERIALIZATION", "PREFERRED_SHARED_MEMORY_CARVEOUT"
    form = struct.Struct("=Q i4x I4x f4x Q")
    found = [(*launch[:3], b"".join(launch[3])) for launch in driver.launches]
    assert found[0] == ((7, 6, 1), 96, [], form.pack(1 << 40, -3, 0xFFFFFFFF, 0.1, 2**64 - 1))
    assert found[1][:3] == ((5, 1, 1), 32, [overlap, share])
    assert found[1][3][:16] == struct.pack("=Q i4x", 9, -(2**31))
    assert found[2] == ((1, 2, 3), 64, [], form.pack(0, 1, 1, 2.0, 0))
    for end, attributes in ((False, [overlap]), (True, [])):
        if end:
            device.finish()
        device.launch(many, 1, 64, (0, 0, 0, 0, 0))
        assert driver.launches[-1][2] == attributes
    for wrong in ((0, 0, 0, 0), (0, 2**31, 0, 0, 0), (0, 0, -1, 0, 0), (0, 0.5, 0, 0, 0)):
        with pytest.raises(struct.error):
            device.launch(many, 1, 64, wrong)
    driver.result = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match="reported illegal address during the launch of few;"):
        device.launch(few, 1, 32, (0, 0))


@dataclass
class CurrentDriver(LaunchingDriver):
    """Also knows which context is current, and in which one each module was loaded and each address freed."""

    contexts: list[str] = field(default_factory=lambda: [""])
    loaded: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)

    def cuCtxSetCurrent(self, context: str) -> Any:
        self.contexts[-1] = context
        return (Result.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: str) -> Any:
        self.contexts.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:
        return Result.CUDA_SUCCESS, self.contexts.pop()

    def cuModuleLoadData(self, code: bytes) -> Any:
        self.loaded.append(self.contexts[-1])
        return super().cuModuleLoadData(code)

    def cuMemFree(self, address: int) -> Any:
        self.freed.append(self.contexts[-1])
        return (Result.CUDA_SUCCESS,)

    cuMemFreeHost = cuMemFree


@pytest.mark.usefixtures("gpus")
def test_memory_of_a_gpu_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its context cannot be made current, so its memory stays, and that of the other GPU stays current."""
    from engine.cuda.runtime import device as module

    use(driver := CurrentDriver([("Abacus X1", (9, 0))] * 2), monkeypatch)
    first, second = module.Device(0), module.Device(1)
    held = second.allocate(100, "the weights")
    monkeypatch.setattr(driver, "cuCtxPushCurrent", lambda context: (Result.CUDA_ERROR_ILLEGAL_ADDRESS,))
    first.free_memory()
    del held
    assert driver.freed == [] and driver.contexts == ["context of 0"]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("memory", ["allocate", "allocate_host"])
def test_memory_freed_while_a_kernel_of_another_gpu_is_compiled(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector frees a model of one GPU at any time; the kernel is loaded on the other one."""
    from engine.cuda.runtime import compiler
    from engine.cuda.runtime import device as module

    use(driver := CurrentDriver([("Abacus X1", (9, 0))] * 2, n_arguments=1), monkeypatch)
    first, second = module.Device(0), module.Device(1)
    held = [getattr(second, memory)(100, "the weights")]

    def cubin(specialization: Any, compute_capability: tuple[int, int]) -> tuple[bytes, str, bool]:
        held.clear()
        return b"code", "kernel", False

    monkeypatch.setattr(module, "cubin", cubin)
    monkeypatch.setattr(module, "_FUNCTIONS", {})
    first.launch(compiler.Kernel("one", (compiler.i32,), lambda: None)(), 1, 32, (0,))
    assert (driver.freed, driver.loaded) == (["context of 1"], ["context of 0"])


@pytest.mark.usefixtures("gpus")
def test_the_context_is_created_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes tenths of a second.  A GPU that is not supported keeps none."""
    from engine.cuda.runtime.device import Device
    from engine.cuda.runtime.driver import begin_context

    def begin(index: int) -> None:
        before = set(threading.enumerate())
        begin_context(index)
        for thread in set(threading.enumerate()) - before:
            thread.join()

    use(driver := ContextDriver(gpus=[("Abacus X1", (9, 0)), ("Abacus I", (7, 0))]), monkeypatch)
    device = Device(0)
    assert (driver.created, driver.uses) == (1, {0: 1})
    device.beside()
    begin(0)
    assert (driver.created, driver.uses) == (1, {0: 3})
    for index in (1, 2):
        begin(index)
        with pytest.raises(DeviceError, match=r"needs 7\.5|there is no cuda:2"):
            Device(index)
    assert driver.uses == {0: 3, 1: 0}
    use(driver := ContextDriver(), monkeypatch)
    begin(0)
    assert driver.uses == {0: 1}


STARTED = """
import sys, threading
from engine.cuda.runtime import driver
from engine.devices import begin_gpu
from engine.errors import DeviceError
from tests.test_devices import ContextDriver

def begin(name, bindings):
    driver.bindings = bindings
    begin_gpu(name)
    for thread in threading.enumerate():
        if thread.name in ("kernels", "context"):
            thread.join()
    return "engine.cuda.backend" in sys.modules

def fail():
    raise DeviceError("no driver")

gpu = ContextDriver()
assert not begin("cpu", lambda: gpu) and gpu.uses == {}
assert not begin("cuda", fail)
assert begin("auto", lambda: gpu) and gpu.uses == {0: 1}
assert begin("auto", lambda: gpu) and gpu.uses == {0: 1}
"""


@pytest.mark.usefixtures("gpus")
def test_a_gpu_starts_while_a_command_reads_its_flags() -> None:
    """Its context is created and its kernels are imported, once; nothing happens for the CPU, and an error is not reported
    yet.  In a new process, which has not imported the kernels."""
    subprocess.run([sys.executable, "-c", STARTED], cwd=REPOSITORY, check=True, timeout=120)


@pytest.mark.usefixtures("gpus")
def test_closing_a_model_frees_its_memory_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.cuda.runtime.device import Device

    driver = CountingDriver()
    use(driver, monkeypatch)
    for name in ("load", "launch"):
        monkeypatch.setattr(Device, name, lambda *_: None)  # the kernel that repacks weights
    with engine.load("pycoder-draft", n_ctx=64, device="cuda", draft_model="pycoder-draft") as llm:
        assert sum(driver.allocated.values()) > 2 * llm.n_bytes
    assert driver.allocated == {}
    with pytest.raises(UsageError, match="closed"):
        llm.generate("x")


MIB = 1 << 20


@dataclass
class MeasuringDriver(CountingDriver):
    """What is free follows from what is allocated and from ``beside``, the bytes of other processes and of modules, of
    which each takes ``module`` bytes."""

    beside: int = 0
    module: int = 0

    def cuMemGetInfo(self) -> Any:
        return Result.CUDA_SUCCESS, self.free - sum(self.allocated.values()) - self.beside, 16 << 30

    def cuModuleLoadData(self, code: bytes) -> Any:
        self.beside += self.module
        return Result.CUDA_SUCCESS, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> Any:
        return Result.CUDA_SUCCESS, "function"

    def cuFuncSetAttribute(self, *arguments: Any) -> Any:
        return (Result.CUDA_SUCCESS,)


@pytest.fixture
def measuring(gpus: None, monkeypatch: pytest.MonkeyPatch) -> MeasuringDriver:
    from engine.cuda.runtime import device

    use(driver := MeasuringDriver(), monkeypatch)
    monkeypatch.setattr(device, "_TAKEN", {})
    return driver


def test_a_limit_of_memory(measuring: MeasuringDriver) -> None:
    """It covers buffers of all devices of the process on that GPU, what the driver uses, and a share for the context; not
    what other processes use at the start.  What exceeds it fails with the words of a GPU that has no more."""
    from engine.cuda.runtime.device import CONTEXT, Device

    measuring.beside = 1000 * MIB
    whole, limited = Device(), Device(limit=2048 * MIB)
    left = 2048 * MIB - CONTEXT
    assert limited.free_memory() == left and whole.free_memory() == measuring.free - 1000 * MIB
    mine = limited.allocate(300 * MIB, "the weights")
    shared = whole.allocate(200 * MIB, "the weights")
    measuring.beside += 100 * MIB
    assert limited.free_memory() == left - 600 * MIB
    with pytest.raises(
        DeviceError, match=r"^Abacus X1 has 0\.98 GB free and the cache needs 0\.98 GB more; choose a smaller"
    ):
        limited.allocate(left - 600 * MIB + 1, "the cache")
    rest = limited.allocate(left - 600 * MIB, "the cache")
    assert limited.free_memory() == 0
    whole.allocate(500 * MIB, "the weights")
    del mine, shared, rest
    assert limited.free_memory() == left - 100 * MIB
    # When another process ends, more is free than at the start, but no more for this one.
    measuring.beside = 0
    held = limited.allocate(300 * MIB, "the weights")
    assert limited.free_memory() == left - 300 * MIB
    del held
    # A limit beyond what is free changes nothing.
    assert Device(limit=64 << 30).free_memory() == whole.free_memory()


def test_a_limit_below_what_the_driver_uses(measuring: MeasuringDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.cuda.runtime import device
    from engine.cuda.softcap import softcap

    monkeypatch.setattr(device, "_FUNCTIONS", {})
    monkeypatch.setattr(device, "cubin", lambda *given: (b"", "softcap", False))
    measuring.module = 100 * MIB
    limited = device.Device(limit=device.CONTEXT + 99 * MIB)
    with pytest.raises(DeviceError, match=r"^Abacus X1 reported out of memory during the loading of softcap"):
        limited.load(softcap())
    assert device.Device(limit=device.CONTEXT - MIB).free_memory() == 0
    device.Device().load(softcap())


def test_a_model_and_its_draft_share_the_limit(measuring: MeasuringDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is chosen for what the limit leaves, and what the models have in memory is within it."""
    from engine.cuda.runtime.device import CONTEXT, Device

    for name in ("load", "launch"):
        monkeypatch.setattr(Device, name, lambda *_: None)  # the kernel that repacks weights
    options: dict[str, Any] = {"n_ctx": 64, "device": "cuda", "draft_model": "pycoder-draft"}
    with engine.load("pycoder-draft", gpu_memory="2G", **options) as llm:
        assert isinstance(llm.draft, DraftModel)
        mine, drafts = llm.model.ops, llm.draft.llm.model.ops
        assert mine.shares_memory_with(drafts)
        used = sum(measuring.allocated.values())
        for ops in (mine, drafts):
            memory = ops.device_memory()
            assert memory is not None and memory.free == (2 << 30) - CONTEXT - used
    with pytest.raises(ContextError, match=r"and [0-9]+ MiB are free; choose a smaller"):
        engine.load("pycoder-draft", gpu_memory=CONTEXT + 16 * MIB, **options)


def test_the_report_of_a_comparison_that_fails(measuring: MeasuringDriver, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "report.json"
    words = ["pycoder-draft", "--gpu-memory", "520M", "-p", "5", "-n", "0", "--report", str(file)]
    assert parity.main(words) == 2
    problem = sentence(capsys).removeprefix("error: ")
    report = json.loads(file.read_text())
    (model,) = report["models"]
    assert model["problem"] == f"ContextError: {problem}" and "are free; choose a smaller" in problem
    assert (model["result"], model["values"], model["options"]["gpu_memory"]) == ("error", 0, 520 * MIB)
    assert report["gpu"]["driver"].endswith("CUDA 13.1")
    measuring.gpus[0] = ("Abacus X2", (9, 0))
    assert parity.main(words) == 2
    assert "it is the report of another machine" in sentence(capsys)


def test_a_gpu_that_is_limited_on_the_command_line(measuring: MeasuringDriver, capsys: Capture) -> None:
    for memory in ("520M", "0.51G"):
        assert main(["-p", "x", "--device", "cuda", "--gpu-memory", memory]) == 2
        assert "MiB are free; choose a smaller model" in sentence(capsys)


@pytest.mark.parametrize(
    ("text", "size"),
    [("12G", 12 << 30), ("800M", 800 << 20), ("1.5 GiB", 3 << 29), ("64kb", 64 << 10), ("1T", 1 << 40), (4096, 4096)],
)
def test_sizes_of_memory(text: object, size: int) -> None:
    assert memory_size("gpu_memory", text) == size


@pytest.mark.parametrize("value", ["", "12", "G", "0G", "-1G", "12 X", "1e3M", "nanG", "12G8", "٣G", 0, -5, 1.5, True])
def test_other_sizes_of_memory_are_refused(value: object, capsys: Capture) -> None:
    with pytest.raises(UsageError, match=r"^gpu_memory must be a size such as 12G or 800M, not .*\.$"):
        engine.load(device="cuda", gpu_memory=value)  # type: ignore[arg-type]
    if isinstance(value, str):
        assert main(["-p", "x", f"--gpu-memory={value}"]) == 2
        assert sentence(capsys) == f"error: --gpu-memory must be a size such as 12G or 800M, not {value!r}."


def test_a_limit_needs_a_gpu(capsys: Capture) -> None:
    for words in (["--device", "cpu"], ["-ngl", "0"]):
        assert main(["-p", "x", "--gpu-memory", "8G", *words]) == 2
        assert (
            "--gpu-memory" in (error := sentence(capsys)) and "leave it out, or choose a GPU (--device cuda)" in error
        )
    pytest.importorskip("numba_cuda", reason="targets need numba-cuda")
    from engine.cuda.target import Target

    with pytest.raises(UsageError, match="leave it out, or choose a GPU"):
        check_gpu_memory(8 << 30, Target("sm_90"))
    check_gpu_memory(8 << 30, "cpu", "cuda:1")
    check_gpu_memory(8 << 30, "auto")
    check_gpu_memory(0, "cpu")


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
        attend_integer_chunks("i8", 128, 128, 4, True, True, 2),
    )
    mixture = matmul_experts(("Q4_K",), 1, 8, False, False)
    step, attending, expert, net = (
        [Launch(kernel, (1,), 32, (), (), ())] for kernel in (product, attention, mixture, delta_net(128, 4, 1))
    )
    assert plans.percent(step, 1, 227 << 10) == 40
    assert [plans.percent(step + attending, rows, 227 << 10) for rows in (1, 16, 17)] == [41, 41, 0]
    assert [plans.percent(step + attending + other, 1, 227 << 10) for other in (expert, net)] == [0, 0]
