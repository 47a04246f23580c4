"""Kernels are compiled by several processes, and none is compiled twice."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types

import engine
from engine.cli.compile import main
from engine.compile import cache as kernel_cache
from engine.compile import pool
from engine.compile.jobs import CPUJob, noted
from engine.cpu import add, embed
from engine.cpu.runtime.entry import Entry, entry_of
from engine.hub.resolve import resolve
from tests.conftest import REPOSITORY
from tests.fake_driver import FakeDriver, Names, Result

# --- jobs --------------------------------------------------------------------------------------------------------

COMPILED_LATER = """
import engine
from engine.compile import pool
from engine.compile.numba_cache import KernelCache

missed = []
save = KernelCache.save_overload

def saved(self, signature, data):
    missed.append(f"{self._name}{signature}")
    save(self, signature, data)

KernelCache.save_overload = saved

for name in ("pycoder", "pycoder-moe-mtp"):
    llm = engine.load(name, device="cpu", n_ctx=256)
    jobs = llm.jobs()
    # One type of each argument per kernel: another would take as long to compile.
    assert len({(job.home, job.name, getattr(job, "constants", None)) for job in jobs}) == len(jobs) > 12
    pool.compile_all(jobs)
    assert all(job.kept() for job in jobs), [job for job in jobs if not job.kept()]
    assert pool.compile_all(jobs) == 0
    llm.compile()
    for temperature in (0, 0.8):
        llm.complete("def add(a, b):", max_tokens=8, temperature=temperature)
print(sorted(missed))
"""


def test_nothing_is_compiled_after_compile() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILED_LATER], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_calls_are_noted_by_one_thread_and_made_by_others() -> None:
    x = np.ones(4, np.float32)
    out, other = np.zeros(4, np.float32), np.zeros(4, np.float32)
    jobs: dict[Any, None] = {}
    with noted(jobs):
        add.add(x, x, out, 0, 4)
        thread = threading.Thread(target=lambda: add.add(x, x, other, 0, 4))
        thread.start()
        thread.join(0.5)  # it may have to wait for its turn to compile
    thread.join()
    assert not out.any() and other.all()
    (job,) = jobs
    assert isinstance(job, CPUJob) and (job.home, job.name) == ("engine.cpu.add", "add")
    add.add(x, x, out, 0, 4)
    assert out.tolist() == other.tolist() and job.kept()


def test_jobs_of_families_are_found_by_other_processes() -> None:
    """A job for a member of a family is a small value; the process that receives it makes the member."""
    kernel = embed.embed_rows("F16")
    arguments = np.zeros((1, 2), np.uint8), np.zeros(1, np.int32), np.float32(1), np.zeros((1, 1), np.float32)
    job = entry_of(kernel, arguments)
    assert (job.home, job.name, job.constants) == ("engine.cpu.embed", "embed_rows", ("F16",))
    signature = types.Array(types.uint8, 2, "C"), types.Array(types.int32, 1, "C"), types.float32
    assert job.signature == (*signature, types.Array(types.float32, 2, "C"))
    other = pickle.loads(pickle.dumps(job))
    assert isinstance(other, Entry) and other == job and other.kernel is kernel
    assert job.size() > entry_of(add.add, arguments).size() > 0
    assert entry_of(embed.embed_rows("BF16"), arguments) != job


# --- processes ---------------------------------------------------------------------------------------------------


class Job:
    """A job that writes its number, or misbehaves."""

    part = "gpu"

    def __init__(self, number: int, how: str = "") -> None:
        self.number, self.how = number, how
        self.name = f"test-{os.getpid()}-{number}-{how}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def kept(self) -> bool:
        return kernel_cache.has("gpu", self.name)

    def compile(self) -> None:
        if self.how == "raise":
            raise ValueError("a kernel that cannot be compiled")
        if self.how == "die":
            os._exit(3)
        if self.how == "slow":
            time.sleep(60)
        kernel_cache.write("gpu", self.name, str(os.getpid()).encode())

    def size(self) -> int:
        return 100 - self.number


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kernel_cache.choose_again()
    yield tmp_path
    kernel_cache.choose_again()


def test_jobs_are_shared_by_as_many_processes_as_there_are_cores(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "available_cores", lambda: 2)
    jobs: list[Any] = [*map(Job, range(4)), Job(4, "raise"), *map(Job, range(5, 8))]
    seen: list[tuple[int, int]] = []
    assert pool.compile_all(jobs, lambda stage, done, total: seen.append((done, total))) == 8
    assert seen == [*((i, 8) for i in range(9)), (8, 8)]
    kept = [kernel_cache.read("gpu", job.name) for job in jobs]
    assert kept[4] is None and None not in kept[:4] + kept[5:]
    workers = {int(pid) for pid in kept if pid is not None}
    assert len(workers) <= 2 and os.getpid() not in workers
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert capfd.readouterr() == ("", "")
    # Jobs that are already compiled start no process.
    monkeypatch.setattr(pool, "_start", lambda job: pytest.fail("started a process"))
    assert pool.compile_all(jobs[:4]) == 0


def test_processes_that_die_or_do_not_start_leave_the_rest_to_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "available_cores", lambda: 2)
    jobs: list[Any] = [Job(0, "die"), *map(Job, range(1, 5))]
    assert pool.compile_all(jobs) == 5
    assert [job.kept() for job in jobs] == [False, True, True, True, True]
    monkeypatch.setattr(pool.sys, "executable", "/nowhere/python")
    assert pool.compile_all([Job(9)]) == 1 and not Job(9).kept()  # type: ignore[list-item]


def test_an_interrupt_ends_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    start = pool._start

    def start_noted(*arguments: Any) -> Any:
        started.append(start(*arguments))
        return started[-1]

    monkeypatch.setattr(pool, "_start", start_noted)
    monkeypatch.setattr(pool, "available_cores", lambda: 2)

    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.compile_all([Job(i, "slow" if i else "") for i in range(4)], interrupt)  # type: ignore[misc]
    assert [worker.poll() for worker in started] == [-signal.SIGKILL] * 2


def of_this_test(folder: Path) -> list[int]:
    """The processes that use this folder for kernels."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"BITMIRROR_CACHE={folder}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_ends_while_it_compiles(how: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C ends it at once, without a message; if it is killed, its processes end as well."""
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"BITMIRROR_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "engine.run", "--device", "cpu", "-p", "x", "-n", "1"]
    run = subprocess.Popen(
        command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(of_this_test(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    run.send_signal(how)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == (130 if how == signal.SIGINT else -how)
    assert "Traceback" not in errors
    while of_this_test(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert of_this_test(tmp_path) == []


# --- for an absent GPU -------------------------------------------------------------------------------------------


class Anything:
    """An object that has every attribute and accepts every call."""

    def __getattr__(self, name: str) -> Any:
        return name if name.isupper() else Anything()

    def __call__(self, *arguments: Any) -> "Anything":
        return Anything()


@dataclass
class LoadingDriver(FakeDriver):
    """A GPU whose kernels can be loaded and started, and do nothing."""

    free: int = 64 << 30
    room: int = 64 << 30
    CUstreamCaptureMode = CUlaunchAttributeID = Names()
    CUlaunchConfig = CUlaunchAttribute = Anything()

    def cuDeviceGetAttribute(self, attribute: str, index: int) -> Any:
        sizes = {"CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132}
        sizes["CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"] = 227 << 10
        return (
            (Result.CUDA_SUCCESS, sizes[attribute])
            if attribute in sizes
            else super().cuDeviceGetAttribute(attribute, index)
        )

    def _handle(self, *arguments: Any) -> Any:
        return Result.CUDA_SUCCESS, 1

    def cuGraphGetNodes(self, graph: Any) -> Any:
        return Result.CUDA_SUCCESS, [], 1

    cuModuleLoadData = cuModuleGetFunction = cuStreamEndCapture = cuGraphInstantiate = _handle
    cuFuncSetAttribute = cuLaunchKernelEx = cuStreamBeginCapture = FakeDriver._nothing
    cuGraphDestroy = cuGraphExecDestroy = FakeDriver._nothing


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {}),
        (["-m", "pycoder-moe-mtp", "-ctk", "q8_0"], {"path_or_name": "pycoder-moe-mtp", "cache_type_k": "q8_0"}),
        (["-md", "pycoder-draft", "-c", "512", "-b", "64"],
         {"draft_model": resolve("pycoder-draft"), "n_ctx": 512, "batch_size": 64}),
    ],
)  # fmt: skip
def test_what_was_compiled_for_a_gpu_is_found_there(
    words: list[str],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("numba_cuda", reason="kernels for GPUs need numba-cuda")
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        pytest.skip("the simulator has no driver")
    from engine.cuda.runtime import compiler, device
    from engine.cuda.runtime import driver as loaded

    made: list[str] = []

    def compile_ptx(specialization: Any, compute_capability: tuple[int, int]) -> str:
        assert compute_capability == (9, 0)
        made.append(specialization.name)
        return ".visible .entry kernel"

    monkeypatch.setattr(compiler, "compile_ptx", compile_ptx)
    monkeypatch.setattr(compiler, "link", lambda ptx, compute_capability: (b"code", ""))
    monkeypatch.setattr(pool, "_share", lambda jobs, tell: [job.compile() for job in jobs])
    monkeypatch.setenv("NUMBA_CACHE_DIR", "")  # changed, and so restored
    try:
        assert main([*words, "--target", "sm_90", "-o", str(tmp_path)]) == 0
        assert f"{len(set(made))} kernels for sm_90, {len(made)} of them new" in capsys.readouterr().err
        assert len(made) == len(set(made)) > 30
        made.clear()
        monkeypatch.delenv("NUMBA_CACHE_DIR")
        monkeypatch.setenv("BITMIRROR_CACHE", str(tmp_path))
        kernel_cache.choose_again()
        driver = LoadingDriver()
        for module in (device, loaded):
            monkeypatch.setattr(module, "bindings", lambda: driver)
        monkeypatch.setattr(device, "_FUNCTIONS", {})
        llm = engine.load(device="cuda", **options)
        llm.compile()
        ops: Any = llm.model.ops
        assert made == [] and ops.device.compiled == []
    finally:
        kernel_cache.choose_again()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "choose a GPU with --target"),
        (["--target", "sm_12"], "target 'sm_12' is unknown; use sm_75,"),
        (["--target", "sm_90", "-m", "nothing"], "there is no model 'nothing'"),
        (["--target", "sm_90", "-c", "many"], "-c must be a whole number, not 'many'"),
        (["--target", "sm_90", "-o", "/dev/null/x"], "/dev/null/x: Not a directory"),
        (["--target", "sm_90", "--multiprocessors", "-2"], "--multiprocessors must be 0 or more, not -2"),
        (["--output-folder", "x"], "unknown flag --output-folder"),
    ],
)
def test_bad_command_lines(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba_cuda", reason="kernels for GPUs need numba-cuda")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1
