"""The devices a model can run on: the CPU, or one of the GPUs."""

import contextlib
import re
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from engine.checks import described
from engine.errors import DeviceError, UsageError

if TYPE_CHECKING:
    # At run time this module is imported before the folder of compiled kernels is chosen.
    import numpy as np

    from engine.cpu.products.repack import Matrix
    from engine.cuda.runtime.device import Device
    from engine.cuda.runtime.tensor import DeviceWeight, Tensor
    from engine.cuda.runtime.values import Deferred
    from engine.cuda.target import Target
    from engine.ops.operations import Operations, Ops

MOST_BATCH = 4096
"""Most rows of a pass that reads a prompt."""


def parse_device(name: str) -> int | None:
    """The number of the GPU in a device name: "cuda" is 0, "cuda:1" is 1 and so on, "auto" is 0; None for "cpu" and, as in
    llama.cpp, "none".  Raises UsageError for any other name."""
    found = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", name)
    if name not in ("auto", "cpu", "none") and not found:
        raise UsageError(
            f"device {described(name)} is unknown; use auto, cpu, cuda, or cuda:1 and so on "
            "(bitmirror run --list-devices lists them)."
        )
    if found:
        return int(found[1] or 0)
    return 0 if name == "auto" else None


def parse_devices(names: str) -> tuple[str, ...]:
    """The device names in "cuda:0,cuda:1" or "cpu,cpu" and so on, or the only one.  Raises UsageError for a name that
    ``parse_device`` does not know, for several devices that are not all GPUs or all the CPU, and for a GPU that is named
    twice."""
    found = tuple(names.split(","))
    numbers = [parse_device(name) for name in found]
    if len(found) == 1 or set(found) == {"cpu"}:
        return found
    if None in numbers or "auto" in found:
        raise UsageError(
            f"several devices are GPUs by number, such as cuda:0,cuda:1, not {described(names)}; n_gpu_layers=... "
            "places layers on the CPU."
        )
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"device {described(names)} names a GPU twice; name each once.")
    return found


def begin_gpu(names: str) -> None:
    """Begin to start the first GPU of ``parse_devices`` in other threads: its driver, its context, and the import of its
    kernels.  Each takes tenths of a second, in which the caller can import what it needs itself.  ``open_device`` waits for
    them, and it reports errors."""
    index = parse_device(parse_devices(names)[0])
    if index is not None and "engine.cuda.backend" not in sys.modules:
        threading.Thread(target=_begin, args=(index,), name="kernels", daemon=True).start()


def _begin(index: int) -> None:
    with contextlib.suppress(Exception):  # whoever opens the device reports it
        from engine.cuda.runtime.driver import begin_context, require_gpu

        begin_context(index)
        require_gpu()  # without a GPU there is no need for the kernels
        import engine.cuda.backend  # noqa: F401


def check_gpu_memory(limit: int, *names: "str | Target") -> None:
    """Raise UsageError if there is a limit for the memory of a GPU and none of these devices is a GPU of this machine."""
    given = [each for name in names if isinstance(name, str) for each in parse_devices(name)]
    if limit and all(parse_device(name) is None for name in given):
        raise UsageError(
            "gpu_memory=... limits the memory of a GPU of this machine, and the model runs on none: leave it out, or "
            'choose a GPU (device="cuda").'
        )


def check_batch_size(rows: int) -> None:
    """Raise UsageError unless ``rows`` is a valid batch size for prompts; 0 leaves the choice to the device."""
    if not 0 <= rows <= MOST_BATCH:
        raise UsageError(
            f"the batch size must be 1 to {MOST_BATCH}, or 0 for the device's default, not {described(rows)}."
        )


def open_device(
    name: "str | Target", n_threads: int = 0, beside: "Ops | None" = None, max_rows: int = 0, gpu_memory: int = 0
) -> "Ops":
    """The backend of a device, by a name of ``parse_device``; "auto" is the first GPU if it can be used, else the CPU.

    name: or a GPU that is not present, which kernels are compiled for (``engine/cuda/target.py``).
    beside: the backend of another model; if it is on the same GPU, both use one queue there.
    max_rows: the most rows of a pass that reads a prompt; 0: the device's default.
    gpu_memory: the most bytes of a GPU's memory that this process may use; 0: all of it.
    Raises UsageError for an unknown name, and DeviceError for a GPU that is missing or cannot be used.
    """
    if not isinstance(name, str):
        from engine.cuda.backend import Backend

        ops: Operations[Tensor, Tensor | Deferred, DeviceWeight] = Backend(0, cast("Device", name), max_rows)
        return cast("Ops", ops)
    index = parse_device(name)
    if index is None:
        return _cpu(n_threads, max_rows)
    try:
        return _gpu(index, beside, max_rows, gpu_memory)
    except DeviceError:
        if name != "auto":
            raise
        return _cpu(n_threads, max_rows)


def open_group(owners: "Sequence[Ops]") -> "Ops":
    """The backend of several devices that share every layer of a model.  Raises DeviceError if two of them cannot read each
    other's memory."""
    from engine.group.backend import DeviceGroup

    for one in owners:
        for other in owners:
            try:
                one.reach(other)
            except DeviceError:
                raise DeviceError(
                    f"{one.label} cannot read the memory of {other.label}, as devices must that share layers: give each some "
                    'of the layers (split_mode="layer").'
                ) from None
    return cast("Ops", DeviceGroup(owners))


def host_beside(ops: "Ops", n_threads: int = 0) -> "Ops | None":
    """The CPU for the parts of a model that are not on the GPU of ``ops``; None if ``ops`` is the CPU."""
    return None if ops.n_threads else _cpu(n_threads, 0)


def why_no_gpu() -> str:
    """The sentence that says why "auto" selects the CPU; "" if there is a usable GPU."""
    try:
        _gpu(0)
    except DeviceError as error:
        return str(error)
    return ""


def describe_devices() -> list[tuple[str, str]]:
    """The name and a description of each device of this machine, with its memory in the words of llama.cpp: all of it, and
    what is free; of several GPUs, also the others whose memory each can access.  Without a GPU, "cuda" and the sentence that
    says why."""
    from engine.machine.cores import available_cores
    from engine.machine.cpu import cpu_name
    from engine.machine.memory import available_memory, total_memory

    threads = available_cores()
    words = f"{cpu_name()}, {threads} thread{'s' * (threads != 1)}"
    devices = [("cpu", f"{words} {_memory(total_memory(), available_memory())}")]
    try:
        from engine.cuda.runtime.driver import list_devices

        gpus = list_devices()
        for gpu in gpus:
            major, minor = gpu.compute_capability
            words = f"{gpu.name}, compute capability {major}.{minor}"
            if len(gpus) > 1:
                linked = ", ".join(f"cuda:{index}" for index in gpu.peers)
                words += f", peer access to {linked}" if linked else ", no peer access"
            devices.append((f"cuda:{gpu.index}", f"{words} {_memory(gpu.memory, gpu.free)}"))
    except DeviceError as error:
        devices.append(("cuda", str(error)))
    return devices


def _memory(total: int, free: int) -> str:
    return f"({total >> 20} MiB, {free >> 20} MiB free)"


def _cpu(n_threads: int, max_rows: int) -> "Ops":
    from engine.cpu.backend import Backend

    ops: Operations[np.ndarray, np.ndarray, Matrix] = Backend(n_threads, max_rows)
    return cast("Ops", ops)


def _gpu(index: int, beside: "Ops | None" = None, max_rows: int = 0, gpu_memory: int = 0) -> "Ops":
    try:
        from engine.cuda.runtime.driver import begin_context, require_gpu

        require_gpu()  # before the kernels are imported: without a GPU there is no need to wait for Numba's CUDA part
        if "engine.cuda.backend" not in sys.modules:
            begin_context(index)  # while they are imported
        from engine.cuda.backend import Backend
        from engine.cuda.runtime.device import Device
    except ImportError:
        raise DeviceError(
            "the GPU needs the package numba-cuda: install it with pip install 'bitmirror[cuda]', or use device=\"cpu\"."
        ) from None
    shared = beside.device if isinstance(beside, Backend) and beside.device.info.index == index else None
    if shared is None and gpu_memory:
        shared = Device(index, gpu_memory)
    ops: Operations[Tensor, Tensor | Deferred, DeviceWeight] = Backend(index, shared, max_rows)
    return cast("Ops", ops)
