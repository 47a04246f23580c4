"""Devices that choose tokens themselves, so that logits need not leave them: GPUs, if the sampling parameters allow it."""

from typing import Any

from engine.compile.jobs import Job
from engine.decode.graph_operations import GraphOperations
from engine.decode.host_steps import HostSteps
from engine.decode.running import Steps
from engine.ops.model import AnyModel
from engine.ops.operations import AnyOperations
from engine.sampling.sampler import SamplerParams

# What follows is imported when it is used: the packages that kernels of a GPU need are optional.


def can_sample(ops: AnyOperations, params: SamplerParams) -> bool:
    """Whether the device of a backend can choose tokens with these parameters."""
    if not isinstance(ops, GraphOperations):
        return False
    from engine.decode.device_params import supported

    return supported(params)


def device_steps(model: AnyModel[Any]) -> Steps | None:
    """New steps of a model whose tokens its device chooses, for answers for which :func:`can_sample` is true; None if the
    device cannot choose tokens, or if the model is divided, since the host runs one stage after another."""
    if model.stages:
        return None
    ops = model.ops
    if not isinstance(ops, GraphOperations):
        return None
    from engine.decode.device_steps import DeviceSteps

    return DeviceSteps(ops, model)


def ahead_drafted(ops: AnyOperations) -> int:
    """The number of steps with drafts that may be in flight at once."""
    if not isinstance(ops, GraphOperations):
        return HostSteps.ahead_drafted
    from engine.decode.device_steps import DeviceSteps

    return DeviceSteps.ahead_drafted


def step_jobs(ops: AnyOperations) -> list[Job]:
    """A compile job for every kernel that steps use besides those of passes; none if the host chooses all tokens."""
    if not isinstance(ops, GraphOperations):
        return []
    from engine.cuda.runtime.jobs import gpu_job
    from engine.decode.device_steps import step_kernels

    return [gpu_job(kernel, ops.device.compute_capability) for kernel in step_kernels()]


def load_step_kernels(ops: AnyOperations) -> None:
    """Load the kernels of :func:`step_jobs`, and compile those that are not compiled yet."""
    if isinstance(ops, GraphOperations):
        from engine.decode.device_steps import step_kernels

        for kernel in step_kernels():
            ops.device.load(kernel)
