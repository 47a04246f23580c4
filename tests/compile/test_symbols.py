"""Symbols of cached CPU kernels: equal ones are equal code, in any process and after any fork."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from llvmlite import ir
from numba import njit, types

from engine.compile import symbols
from engine.cpu import embed
from engine.gguf.quants import FORMATS

BY_NAME = {entry.name: entry for entry in FORMATS.values()}

ROWS = """
import hashlib, sys
import numpy as np
from engine.cpu import embed

def show(name):
    data, n = np.load(f"{sys.argv[1]}/{name}.npy"), int(sys.argv[2])
    out = np.zeros((1, n), np.float32)
    embed.embed_rows(name)(data, np.zeros(1, np.int32), np.float32(1), out, 0, 1)
    print(name, hashlib.sha256(out.tobytes()).hexdigest(), flush=True)
"""

FORKS = """
import os
for name in sys.argv[3:]:
    child = os.fork()
    if child == 0:
        show(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""

ALL = """
for name in sys.argv[3:]:
    show(name)
"""

N = 256


def stored(folder: Path, name: str) -> str:
    """Store a random row of a format; returns the hash of its values as the reference package computes them."""
    entry, rng = BY_NAME[name], np.random.default_rng(1)
    values = rng.standard_normal((1, N)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType(entry.type))
    np.save(folder / f"{name}.npy", data)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(entry.type)).astype(np.float32)
    return hashlib.sha256(expected.tobytes()).hexdigest()


def start(code: str, folder: Path, names: Sequence[str], cache: str) -> subprocess.Popen[str]:
    environment = os.environ | {"BITMIRROR_CACHE": str(folder / cache)}
    environment.pop("NUMBA_CACHE_DIR", None)
    return subprocess.Popen(
        [sys.executable, "-c", ROWS + code, str(folder), str(N), *names],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> dict[str, str]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return dict(line.split() for line in out.splitlines())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_kernels_that_forked_processes_store(tmp_path: Path) -> None:
    """Each child compiles another kernel.  A fresh process loads all of them and computes what the children did."""
    expected = {name: stored(tmp_path, name) for name in ("Q4_0", "Q5_0")}
    assert finished(start(FORKS, tmp_path, list(expected), "cache")) == expected
    assert finished(start(ALL, tmp_path, list(expected), "cache")) == expected


def test_kernels_that_two_processes_store_at_once(tmp_path: Path) -> None:
    expected = {name: stored(tmp_path, name) for name in ("Q4_0", "Q5_0")}
    both = [start(ALL, tmp_path, names, "cache") for names in (["Q4_0"], ["Q5_0"])]
    for process in both:
        assert finished(process).items() <= expected.items()
    assert finished(start(ALL, tmp_path, list(expected), "cache")) == expected


def test_two_caches_become_one(tmp_path: Path) -> None:
    """Files of two caches lie together afterwards, as in a container image that is built in steps."""
    expected = {name: stored(tmp_path, name) for name in ("Q4_0", "Q5_0")}
    for name in expected:
        finished(start(ALL, tmp_path, [name], name))
        shutil.copytree(tmp_path / name, tmp_path / "both", dirs_exist_ok=True)
    assert finished(start(ALL, tmp_path, list(expected), "both")) == expected


SYMBOLS = """
from engine.cpu import embed
for name in ("Q4_1", "Q5_1"):
    row = embed._dequantize_row(name)
    row.compile("(uint8[::1], int64, int64, float32, float32[::1])")
    print(name, next(iter(row.overloads.values())).fndesc.mangled_name)
"""


def test_equal_functions_have_equal_symbols(tmp_path: Path) -> None:
    """In two processes, one of which has compiled something else before."""
    first = finished(start(SYMBOLS, tmp_path, [], "first"))
    stored(tmp_path, "Q4_0")
    second = finished(start("show('Q4_0')" + SYMBOLS, tmp_path, [], "second"))
    assert first.items() <= second.items()
    assert len(set(first.values())) == 2 and all("dequantize_row" in symbol for symbol in first.values())


# --- what a number depends on ------------------------------------------------------------------------------------


def in_package(function: Any) -> Any:
    """The function as if a module of the package defined it, with the functions in its closure."""
    function = getattr(function, "py_func", function)
    function.__module__ = "engine.made"
    for cell in function.__closure__ or ():
        if hasattr(getattr(cell.cell_contents, "py_func", cell.cell_contents), "__code__"):
            in_package(cell.cell_contents)
    return function


def made(value: Any, default: Any = 1) -> Any:
    @njit
    def inner(x):
        return value

    def outer(x, y=default):
        return inner(x)

    return in_package(outer)


def unwritable(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


P = namedtuple("P", "x")
Q = namedtuple("Q", "x")

VALUES: list[Any] = [
    *(
        0,
        1,
        -1,
        True,
        1.0,
        -0.0,
        0.0,
        "1",
        b"1",
        None,
        (1,),
        [1],
        (1, (2,)),
        ((1, 2),),
        {1: 2},
        {2: 1},
        frozenset({1, 2}),
    ),
    *(np.float32(1), np.float64(1), np.arange(2), np.arange(2, dtype=np.int8), np.arange(2).reshape(1, 2)),
    *(
        np.dtype("f4"),
        np.float32,
        types.float32,
        types.Array(types.float32, 1, "C"),
        types.Array(types.float32, 2, "C"),
    ),
    *(
        np.ones((2, 2)),
        np.ones((2, 2), order="F"),
        unwritable(np.ones((2, 2))),
        P(1),
        Q(1),
    ),
    *(ir.IntType(8), ir.IntType(16), np, os, BY_NAME["Q4_K"], BY_NAME["Q5_K"], len, np.add),
]


def test_what_a_function_closes_over_changes_its_number() -> None:
    numbers = [symbols.number(made(value)) for value in VALUES]
    assert len(set(numbers)) == len(numbers)
    assert numbers == [symbols.number(made(value)) for value in VALUES]
    assert symbols.number(made(0, default=2)) != numbers[0]


def test_functions_with_the_same_name_and_other_code() -> None:
    def first(x):
        return x + 1

    def second(x):
        return x + 2

    second.__qualname__ = first.__qualname__
    second.__code__ = second.__code__.replace(co_firstlineno=first.__code__.co_firstlineno)
    assert symbols.number(in_package(first)) != symbols.number(in_package(second))


def test_a_function_that_calls_itself_has_a_number() -> None:
    def again(x):
        return again(x)

    again.__module__ = "engine.made"
    assert symbols.number(again) == symbols.number(again)


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "value", [LOOP, object(), SimpleNamespace(a=1), iter(()), lambda: 0], ids=lambda v: type(v).__name__
)
def test_without_a_digest_a_number_is_random(value: Any) -> None:
    """Also for a function of another package, whose sources may change without another folder for its kernels."""

    def outer(x):
        return value

    outer.__module__ = "engine.made"
    assert symbols.number(outer) != symbols.number(outer)
    for home in ("elsewhere", None):  # None: what exec() defines without a module's name
        outer.__module__ = home  # type: ignore[assignment]
        assert symbols.number(outer) != symbols.number(outer)


class First(NamedTuple):
    a: int
    b: int


class Second(NamedTuple):
    b: int
    a: int


Second.__name__ = "First"


def test_the_fields_of_a_tuple_change_a_number() -> None:
    assert symbols.number(made(First(1, 2))) == symbols.number(made(First(1, 2)))
    assert symbols.number(made(First(1, 2))) != symbols.number(made(Second(1, 2)))


def test_what_a_program_defines_has_no_digest() -> None:
    """Another program may define something else with the same name."""

    def helper(x):
        return x

    helper.__qualname__ = "helper"
    outer = made(helper)
    assert symbols.number(outer) == symbols.number(outer)  # as a function of this package
    for home in ("__main__", "elsewhere"):
        helper.__module__ = home
        assert symbols.number(outer) != symbols.number(outer)


@cache
def members() -> list[Any]:
    return [embed._dequantize_row(name) for name in BY_NAME if BY_NAME[name].block > 1]


def test_members_of_a_family_have_numbers_of_their_own() -> None:
    functions = [member.py_func for member in members()]
    numbers = [symbols.number(function) for function in functions]
    assert len(set(numbers)) == len(numbers) > 20
    assert numbers == [symbols.number(function) for function in functions]
