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
    "cuda": {"capture", "occupy", "plan", "record", "start"},
}
"""Public methods that only one backend has."""


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
