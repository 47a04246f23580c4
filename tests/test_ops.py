"""Both backends have the operations of ``engine/ops``, with the same parameters, names and defaults."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine.arrays import Batch
from engine.cpu import backend as cpu
from engine.cpu.products.repack import Matrix
from engine.errors import ModelError
from engine.group.backend import DeviceGroup
from engine.numerics import ACTIVATIONS
from engine.ops.activation import KINDS, Activation
from engine.ops.operations import Operations

if TYPE_CHECKING:
    from engine.cuda import backend as cuda
    from engine.cuda.runtime.tensor import DeviceWeight, Tensor
    from engine.cuda.runtime.values import Deferred

    # mypy checks these assignments: every operation with its types.
    of_cpu: Callable[[cpu.Backend], Operations[np.ndarray, np.ndarray, Matrix]] = lambda ops: ops  # noqa: E731
    of_gpu: Callable[[cuda.Backend], Operations[Tensor, Tensor | Deferred, DeviceWeight]] = lambda ops: ops  # noqa: E731

BESIDE = {
    "cpu": {"append", "attend", "convolved", "int8_queries", "integer_queries", "latent_queries"}
    | {"rope"}
    | {"compute", "do", "empty", "flush", "give", "record", "run_program", "take"},
    "cuda": {"capture", "devices", "include", "maxima", "occupy", "plan", "plan_maxima", "record", "start", "whole"},
}
"""Public methods that only one backend has."""


ABSENT = {
    "models that devices cannot share": "altup_active altup_correct altup_enter altup_leave altup_predict attend_compressed "
    "choose_rows collapse compress expand grouped_matmul kda keep_keys keep_latents latent_attention mamba reinterpret "
    "remember_latent repeat rotate_tail round_latents round_queries round_rows short_conv stream_weights",
    "the experts of a part of a model": "activate_experts add_gated choose_experts join_experts sum_experts",
    "caches in host memory or on disk": "copy_in copy_out read_entries write_entries",
    "devices with some layers each, or other backends": "crossing gathering mark meet own_rows reach together",
    "what callers ask each owner": "array_bytes observe rest resume weight_bytes",
}
"""The operations that a group of devices does not have, by what they are for."""


def backend(name: str) -> Any:
    if name == "cuda":
        pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
        from engine.cuda.backend import Backend

        return Backend
    return cpu.Backend


def members(owner: type) -> dict[str, Any]:
    """Public methods and properties, including those of base classes, but not what a backend inherits from the protocols:
    these describe operations and do nothing."""
    protocols = Operations.__mro__ if owner is not Operations else ()
    return {
        name: member
        for base in reversed(owner.__mro__)
        if base not in protocols
        for name, member in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }


def parameters(method: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """The name, kind and default of each parameter."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_backend_has_every_operation_and_no_other(name: str) -> None:
    wanted, found = members(Operations), members(backend(name))
    assert wanted.keys() | BESIDE[name] == found.keys()
    for member in wanted:
        if isinstance(wanted[member], property):
            assert isinstance(found[member], property), member
        else:
            assert parameters(found[member]) == parameters(wanted[member]), member


def test_a_group_has_the_operations_of_models_that_devices_share() -> None:
    """It is used in the place of a backend, which types cannot check: its arrays are those of several devices."""
    wanted, found = members(Operations), members(DeviceGroup)
    owners: Any = [cpu.Backend(1, 24), cpu.Backend(1, 24)]
    group = DeviceGroup(owners)
    names = " ".join(ABSENT.values()).split()
    absent = set(names)
    assert len(names) == len(absent) and absent <= wanted.keys()
    for member in wanted.keys() - absent:
        assert hasattr(group, member), member
        if member not in found or isinstance(wanted[member], property):
            continue
        given = parameters(found[member])
        # Those on whole rows take whatever the owners take.
        is_replicated = [name for name, *_ in given] == ["self", "given", "named"]
        assert is_replicated or given == parameters(wanted[member]), member
    assert not any(hasattr(group, member) for member in absent)
    for protocol in Operations.__mro__:
        for attribute in vars(protocol).get("__annotations__", {}):
            assert hasattr(group, attribute), attribute


def test_every_operation_is_described() -> None:
    for name, member in members(Operations).items():
        text = inspect.getdoc(member) or ""
        assert len(text) > 20 and not text.startswith(("The same", "As ")), name


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_backend_describes_only_what_is_special_to_it(name: str) -> None:
    for member, found in members(backend(name)).items():
        assert inspect.getdoc(found), f"help() says nothing about {member}"
        own = (found.fget if isinstance(found, property) else found).__doc__
        protocol = members(Operations).get(member)
        assert own is None or protocol is None or own.split() != (protocol.__doc__ or "").split(), member
    assert "residual + (x @ weight^T + bias)" in (inspect.getdoc(backend(name).matmul_add) or "")


def test_some_rows_of_a_pass() -> None:
    rows = Batch(np.arange(5), np.arange(10, 15), np.array([0, 0, 1, 1, 1]), True)
    part = rows.part(slice(1, 3))
    assert (rows.rows, part.rows) == (5, 2) and part.mixed
    assert [a.tolist() for a in (part.tokens, part.positions, part.sequences)] == [[1, 2], [11, 12], [0, 1]]


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(
        ModelError, match="the activation 'relu' is not supported; use a model with one of: swiglu, geglu"
    ):
        Activation("relu")
    with pytest.raises(ModelError, match="the activation swiglu_oai takes 2 parameters, not 1"):
        Activation("swiglu_oai", (7.0,))
    assert KINDS.keys() == ACTIVATIONS.keys()
