"""Devices that choose tokens themselves, so that logits need not leave them: GPUs, if the sampling parameters allow it."""

from collections.abc import Sequence
from typing import Any

from engine.compile.jobs import Job
from engine.decode.graph_operations import GraphOperations
from engine.decode.group_operations import graph_operations
from engine.decode.host_steps import HostSteps
from engine.decode.request import RowReader
from engine.decode.running import Steps
from engine.ops.model import AnyModel
from engine.ops.operations import AnyOperations
from engine.sampling.sampler import Sampler, SamplerParams

# What follows is imported when it is used: the packages that kernels of a GPU need are optional.


def _chooser(model: AnyModel[Any]) -> GraphOperations | None:
    """The backend that chooses the tokens of a model.  None if the host does: on the CPU, and for a model with layers on the
    CPU, whose stages the host runs one after another."""
    on_host = bool(model.stages) and model.relay is None
    return None if on_host else graph_operations(model.ops)


def can_sample(model: AnyModel[Any], params: SamplerParams) -> bool:
    """Whether the device of a model can choose tokens with these parameters."""
    if _chooser(model) is None:
        return False
    from engine.decode.device_params import supported

    return supported(params)


def device_steps(model: AnyModel[Any]) -> Steps | None:
    """New steps of a model whose tokens its device chooses, for answers for which :func:`can_sample` is true; None if the
    device cannot choose tokens."""
    ops = _chooser(model)
    if ops is None:
        return None
    from engine.decode.device_steps import DeviceSteps

    return DeviceSteps(ops, model)


def row_reader(model: AnyModel[Any], sampler: Sampler, text: Sequence[int]) -> RowReader | None:
    """What reads logits of a text on the device of a model, and chooses there as a sampler does.  None if they have to be
    copied to the host: also from a model that is divided between devices, and for a grammar."""
    ops = _chooser(model)
    if ops is None or model.stages or sampler.matcher is not None or not can_sample(model, sampler.params):
        return None

    from engine.decode.replayed_rows import ReplayedRows

    return ReplayedRows(ops, sampler, text)


def ahead_drafted(ops: AnyOperations) -> int:
    """The number of steps with drafts that may be in flight at once."""
    if graph_operations(ops) is None:
        return HostSteps.ahead_drafted
    from engine.decode.device_steps import DeviceSteps

    return DeviceSteps.ahead_drafted


def step_jobs(model: AnyModel[Any]) -> list[Job]:
    """A compile job for every kernel that steps use besides those of passes; none if the host chooses all tokens."""
    ops = _chooser(model)
    if ops is None:
        return []
    from engine.cuda.runtime.jobs import gpu_job
    from engine.decode.device_steps import step_kernels

    return [gpu_job(kernel, ops.device.compute_capability) for kernel in step_kernels(len(ops.devices))]


def load_step_kernels(model: AnyModel[Any]) -> None:
    """Load the kernels of :func:`step_jobs`, and compile those that are not compiled yet."""
    ops = _chooser(model)
    if ops is not None:
        from engine.decode.device_steps import step_kernels

        for kernel in step_kernels(len(ops.devices)):
            ops.device.load(kernel)
