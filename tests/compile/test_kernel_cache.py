"""Kernels compiled from one version of the sources are never used by another version."""

import ast
import errno
import importlib
import io
import logging
import os
import pkgutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.compile import cache as kernel_cache
from engine.compile.sources import Sources
from engine.machine import trust

ROOT = Path(engine.__file__).parent
PARTS: tuple[kernel_cache.Part, ...] = ("cpu", "gpu")


def texts() -> dict[str, str]:
    return {
        ".".join(("engine", *path.relative_to(ROOT).with_suffix("").parts)): path.read_text(encoding="utf-8")
        for path in ROOT.rglob("*.py")
    }


# --- constants ---------------------------------------------------------------------------------------------------


def code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from code_objects(inner)


def python_function(value: Any) -> Any:
    """The Python function of a compiled function, an intrinsic, or a kernel's factory; None for other values."""
    for attribute in ("py_func", "_defn", "build"):
        value = getattr(value, attribute, value)
    value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, types.FunctionType) else None


def kernels(modules: list[types.ModuleType], gpu: bool) -> list[Any]:
    """The functions of these modules that Numba compiles, and the factories of GPU kernels."""
    found = []
    for module in modules:
        for value in vars(module).values():
            made = (
                type(value).__module__.partition(".")[0] in ("numba", "numba_cuda") or type(value).__name__ == "Kernel"
            )
            function = python_function(value)
            if made and function and (".cuda" in function.__module__) == gpu:
                found.append(function)
    return found


def constants(functions: list[Any]) -> set[tuple[str, str]]:
    """Every global value that these functions read, directly or through calls: (name of a module that has it, its name)."""
    read, seen, waiting = set(), set(), list(functions)
    while waiting:
        function = waiting.pop()
        if function in seen or not function.__module__.startswith("engine"):
            continue
        seen.add(function)
        spaces = function.__globals__
        names = {name for code in code_objects(function.__code__) for name in code.co_names}
        inside = {n: v for n, v in spaces.items() if n in names and isinstance(v, types.ModuleType)}
        homes = [spaces, *(vars(module) for module in inside.values() if module.__name__.startswith("engine"))]
        for space in homes:
            for name in names & space.keys():
                value = space[name]
                other = python_function(value)
                if other is not None:
                    waiting.append(other)
                elif not isinstance(value, (types.ModuleType, type)) and not callable(value):
                    read.add((space["__name__"], name))
        waiting.extend(
            cell.cell_contents
            for cell in function.__closure__ or ()
            if isinstance(cell.cell_contents, types.FunctionType)
        )
    return read


def definition(files: dict[str, str], module: str, name: str) -> tuple[str, int] | None:
    """The assignment that gives a name its value: its module, and the line of that value."""
    for statement in ast.parse(files.get(module) or files[module + ".__init__"]).body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name and (statement.module or "").startswith("engine"):
                    return definition(files, statement.module or "", alias.name)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if name in {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}:
                return module, statement.value.lineno
    return None


def changed(text: str, lines: set[int]) -> str:
    """The text with changed values in the assignments on these lines."""
    all_lines = text.splitlines(keepends=True)
    for statement in ast.parse(text).body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value and statement.value.lineno in lines:
            line, column = all_lines[statement.value.lineno - 1].encode(), statement.value.col_offset
            all_lines[statement.value.lineno - 1] = (line[:column] + b"7 if True else " + line[column:]).decode()
    return "".join(all_lines)


@pytest.mark.parametrize("part", PARTS)
def test_a_constant_that_a_kernel_reads_changes_the_fingerprint(part: kernel_cache.Part) -> None:
    if part == "gpu":
        pytest.importorskip("numba_cuda", reason="kernels for GPUs need numba-cuda")
    package = ROOT / "cuda" if part == "gpu" else ROOT / "cpu"
    home = f"engine.{package.name}"
    names = [m.name for m in pkgutil.walk_packages([str(package)], home + ".") if not m.name.endswith("simulator")]
    modules = [importlib.import_module(name) for name in ("engine.numerics", "engine.verify.layout", *names)]
    files = texts()
    found: dict[str, dict[str, int]] = {}
    for module, name in constants(kernels(modules, part == "gpu")):
        place = definition(files, module, name)
        if place is not None:
            found.setdefault(place[0], {})[name] = place[1]
    names_found = {name for names in found.values() for name in names}
    assert names_found >= ({"CHUNK", "BLOCK", "LANES", "TINY"} if part == "cpu" else {"CHUNK", "DECODE_ROWS"})
    sources = Sources(files)
    before = sources.definitions(part)
    for module, lines in found.items():
        others = Sources(files | {module: changed(files[module], set(lines.values()))})
        after = others.definitions(part)
        for name in lines:
            places = [(module, place) for place in sources.module(module).names[name]]
            assert any(before[place] != after[place] for place in places), f"{module}.{name}"
            # One definition with a different hash suffices for a different fingerprint.
    assert others.digest(part) != sources.digest(part)


def digests(files: dict[str, str]) -> tuple[str, str]:
    sources = Sources(files)
    return sources.digest("cpu"), sources.digest("gpu")


def test_what_reaches_no_kernel_leaves_the_fingerprint_as_it_is() -> None:
    files = texts()
    before = digests(files)
    # Comments, docstrings, formatting, annotations.
    module = "engine.cpu.add"
    text = files[module].replace("@njit", "# a comment\n\n\n@njit").replace('    """', '    """Something else. ', 1)
    assert text != files[module] and digests(files | {module: text}) == before
    # Host code in files with kernels, and in other files.
    for module in ("engine.run", "engine.cpu.backend", "engine.cuda.runtime.device", "engine.compile.cache"):
        assert digests(files | {module: files[module] + "\n\ndef other():\n    return 1\n\nX = other()\n"}) == before


def test_each_part_follows_its_own_kernels() -> None:
    files = texts()
    cpu, gpu = digests(files)
    text = files["engine.numerics"].replace("def silu(x):", "def silu(x, y=0):")
    changed_cpu, changed_gpu = digests(files | {"engine.numerics": text})
    assert changed_cpu != cpu and changed_gpu != gpu
    text = files["engine.cuda.runtime.compiler"].replace('"fma": False', '"fma": True')
    assert digests(files | {"engine.cuda.runtime.compiler": text})[0] == cpu
    assert digests(files | {"engine.cuda.runtime.compiler": text})[1] != gpu


def small(**texts: str) -> str:
    return Sources({f"p.{name}": text for name, text in texts.items()}).digest("cpu")


@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        ("from p.c import X\n@njit\ndef k(): return X", "X = 1"),
        ("from p.c import X as Y\n@njit\ndef k(): return Y", "X = 1"),
        ("from p import c\n@njit\ndef k(): return c.X", "X = 1"),
        ("import p.c\n@njit\ndef k(): return p.c.X", "X = 1"),
        ("from p import c\n@njit\ndef k(): return getattr(c, 'X')", "X = 1"),
        ("from .c import X\n@njit\ndef k(): return X", "X = 1"),
        ("def f():\n  from p.c import X\n  return X\n@njit\ndef k(): return f()", "X = 1"),
        ("from p.c import T\n@njit\ndef k(): return T", "T = {}\nfor i in range(1): T[i] = i"),
        ("from p.c import T\n@njit\ndef k(): return T", "T = {}\nT.update(a=1)"),
        ("from p.c import T\n@njit\ndef k(): return T", "T = {}\nT['a'] = 1"),
        ("from p.c import T\n@njit\ndef k(): return T", "T = []\ndef r(f): T.append(f)\n@r\ndef g(): return 1"),
        ("from p.c import X\ndef make():\n  @njit\n  def k(): return X\n  return k", "X = 1"),
        ("from p.c import X\n@njit\ndef k(a=X): return a", "X = 1"),
        ("from p.c import X\n@njit(cache=X)\ndef k(): return 1", "X = 1"),
    ],
)
def test_how_a_value_may_reach_a_kernel(kernel: str, constants: str) -> None:
    kernel = "from numba import njit\n" + kernel
    if "getattr" not in kernel and "p.c.X" not in kernel:  # those depend on the whole module
        assert small(k=kernel, c=constants) == small(k=kernel + "  # x", c=constants + "\nOTHER = 5\n")
    assert small(k=kernel, c=constants) != small(k=kernel, c=constants.replace("1", "2"))


# --- versions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["numba", "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink"])
def test_the_fingerprint_follows_the_compilers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def versions(changed: str, absent: str = "") -> Callable[[str], str]:
        def version(asked: str) -> str:
            if asked == absent:
                raise PackageNotFoundError(asked)
            return "2" if asked == changed else "1"

        return version

    seen = set()
    for version in (versions(""), versions(name), versions("", absent=name)):
        monkeypatch.setattr(kernel_cache, "version", version)
        seen.add(kernel_cache.fingerprint("gpu"))
    assert len(seen) == 3


def test_only_kernels_of_the_cpu_depend_on_python(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [kernel_cache.fingerprint(part) for part in PARTS]
    monkeypatch.setattr(kernel_cache.sys, "version", "4.0")
    after = [kernel_cache.fingerprint(part) for part in PARTS]
    assert after[0] != before[0] and after[1] == before[1]


def test_old_folders_are_removed(tmp_path: Path) -> None:
    for i in range(7):
        for name in (f"cpu-{i}", f"gpu-{i}"):
            (tmp_path / name).mkdir()
            os.utime(tmp_path / name, (i, i))
    kernel_cache._prune(tmp_path, "cpu-", 4)
    left = {f.name for f in tmp_path.iterdir()}
    assert left == {f"cpu-{i}" for i in (3, 4, 5, 6)} | {f"gpu-{i}" for i in range(7)}


# --- families ----------------------------------------------------------------------------------------------------

FILES = """
import numpy as np
from engine.cpu import embed
from engine.cpu.runtime.entry import _RANGE, entry_of
data, tokens = np.zeros((1, 2), np.uint8), np.zeros(1, np.int32)
arguments = data, tokens, np.float32(1), np.zeros((1, 1), np.float32)
for kernel in (embed.embed_rows("F16"), embed.embed_rows("BF16"), embed.embed_rows("Q4_K"), embed.embed_records("Q4_K")):
    codegen = kernel.targetctx.codegen()
    print(kernel._cache.file(_RANGE, codegen))
    print(entry_of(kernel, arguments)._dispatcher()._cache.file(_RANGE, codegen))
print(entry_of(embed.embed_rows("F16"), (*arguments[:3], data))._dispatcher()._cache.file(_RANGE, codegen))
"""


def test_members_of_a_family_are_stored_apart() -> None:
    """Their names, and those of their entries, differ by the constants and the types of arguments, and are the same in every
    process."""
    found = [
        subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0]) == 9


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("engine.cpu.products.unpack", "z & 15 | x.bits(2, 48)", "z & 15 | x.bits(1, 48)"),
        ("engine.cpu.products.law", "d * x.to_float()", "x.to_float() * d"),
        ("engine.cpu.products.repack", "code.load(place, 0, lane, 1)", "code.load(place, 1, lane, 1)"),
        ("engine.cpu.simd", "class Vec", "class Vec(object)"),
        ("engine.gguf.quants", "CHAINS = 8", "CHAINS = 4"),
        ("engine.cpu.runtime.entry", "ir.IntType(1)", "ir.IntType(8)"),
        ("engine.cpu.runtime.atomics", '"seq_cst", 8)', '"monotonic", 8)'),
        ("engine.cpu.runtime.walk", "SPINS = 400", "SPINS = 300"),
    ],
)
def test_code_that_emits_machine_code_changes_the_fingerprint(module: str, old: str, new: str) -> None:
    files = texts()
    assert old in files[module]
    assert digests(files | {module: files[module].replace(old, new)})[0] != digests(files)[0]


# --- folders -----------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for kernels, and temporary files elsewhere."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("BITMIRROR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path))
    kernel_cache.choose_again()
    yield tmp_path
    kernel_cache.choose_again()


def test_where_kernels_lie(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "gpu-" + kernel_cache.fingerprint("gpu")
    assert kernel_cache.places("gpu").write == folders / "cache" / "kernels" / name
    kernel_cache.write("gpu", "sm_90/a.cubin", b"code")
    assert kernel_cache.read("gpu", "sm_90/a.cubin") == b"code" and kernel_cache.has("gpu", "sm_90/a.cubin")
    assert kernel_cache.read("cpu", "sm_90/a.cubin") is None and not kernel_cache.has("gpu", "sm_90/b.cubin")
    kernel_cache.choose_again()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folders / "own"))
    assert kernel_cache.places("gpu").write == folders / "own" / name


def test_a_damaged_kernel_is_no_kernel(folders: Path) -> None:
    kernel_cache.write("gpu", "a", b"code")
    path = folders / "cache" / "kernels" / ("gpu-" + kernel_cache.fingerprint("gpu")) / "a"
    data = path.read_bytes()
    for broken in (b"", data[:3], data[:-1], data + b"x", data[:-1] + b"x"):
        path.write_bytes(broken)
        assert kernel_cache.read("gpu", "a") is None


def test_a_folder_that_cannot_be_written(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITMIRROR_CACHE", "/dev/null/x")
    places = kernel_cache.places("gpu")
    assert places.write is not None and places.write.is_relative_to(folders)
    private = places.write.parent.parent
    assert private.stat().st_mode & 0o777 == 0o700
    kernel_cache.write("gpu", "a", b"code")
    assert kernel_cache.read("gpu", "a") == b"code"


def test_a_folder_that_can_only_be_read(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_cache.write("gpu", "a", b"code")
    kernel_cache.choose_again()
    chosen = kernel_cache._parents()[0]
    monkeypatch.setattr(kernel_cache.os, "access", lambda path, mode: not Path(path).is_relative_to(chosen))
    assert kernel_cache.read("gpu", "a") == b"code"
    kernel_cache.write("gpu", "b", b"more")
    assert kernel_cache.read("gpu", "b") == b"more" and not list(chosen.glob("*/b"))


def test_what_is_stored_is_private(folders: Path) -> None:
    before = os.umask(0)
    try:
        kernel_cache.write("gpu", "sm_90/a.cubin", b"code")
    finally:
        os.umask(before)
    made = [folders / "cache", *(folders / "cache").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """A function that gives a file to another user, or makes everything but this file that user's."""

    def give(path: Path) -> None:
        if os.getuid() == 0:
            os.chown(path, 12345, -1)
        else:
            pytest.skip("only the superuser can give files away")

    return give


@pytest.mark.skipif(not trust.CHECKED, reason="files have no owners on this system")
@pytest.mark.parametrize("which", ["BITMIRROR_CACHE", "NUMBA_CACHE_DIR", "temporary"])
@pytest.mark.parametrize(
    "how", ["mode", "group", "owner", "parent", "group of the parent", "version", "group of the version"]
)
def test_a_folder_that_others_can_write_to_is_not_used(
    how: str,
    which: str,
    folders: Path,
    another: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What lies there is not loaded, one sentence says so, and the next folder is used."""
    monkeypatch.setattr(trust, "_is_private", lambda group: False)
    if which == "NUMBA_CACHE_DIR":
        monkeypatch.setenv(which, str(folders / "own" / "kernels"))
    elif which == "temporary":
        monkeypatch.setenv("BITMIRROR_CACHE", "/dev/null/x")
    kernel_cache.write("gpu", "a", b"code")
    assert kernel_cache.read("gpu", "a") == b"code"
    version = kernel_cache.places("gpu").write
    assert version is not None
    kernels = version.parent
    if how == "mode":
        kernels.chmod(0o702)
    elif how == "group":
        kernels.chmod(0o770)
    elif how == "parent":
        kernels.parent.chmod(0o707)
    elif how == "group of the parent":
        kernels.parent.chmod(0o770)
    elif how == "group of the version":
        # Only the mode of the folder itself tells, not that of the one above it.
        version.chmod(0o770)
    else:
        another(kernels if how == "owner" else version)
    kernel_cache.choose_again()
    with caplog.at_level(logging.WARNING):
        assert kernel_cache.read("gpu", "a") is None
    write = kernel_cache.places("gpu").write
    assert write != version and (write is None) == (which == "temporary")
    variable = "NUMBA_CACHE_DIR" if which == "NUMBA_CACHE_DIR" else "BITMIRROR_CACHE"
    assert sum(str(kernels) in message and f"set {variable} to" in message for message in caplog.messages) == 1


@pytest.mark.skipif(not trust.CHECKED, reason="files have no owners on this system")
@pytest.mark.parametrize(
    ("mode", "private", "trusted"),
    [(0o775, True, True), (0o775, False, False), (0o1775, False, True), (0o777, True, False), (0o1777, False, True)],
)
def test_a_folder_above_that_a_group_can_write_to(
    mode: int, private: bool, trusted: bool, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of several users could replace what lies in it; that of one user is this user."""
    monkeypatch.setattr(trust, "_is_private", lambda group: private)
    trust.make(folders / "shared" / "kernels")
    (folders / "shared").chmod(mode)
    assert (trust.problem(folders / "shared" / "kernels") == "") == trusted


@pytest.mark.skipif(not trust.CHECKED, reason="files have no owners on this system")
def test_groups_of_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    groups = {0: ("me", []), 1: ("me", []), 2: ("me", ["me"]), 3: ("me", ["me", "you"]), 4: ("users", [])}
    monkeypatch.setattr(pwd, "getpwuid", lambda user: types.SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(
        grp, "getgrgid", lambda group: types.SimpleNamespace(gr_name=groups[group][0], gr_mem=groups[group][1])
    )
    assert [group for group in range(6) if trust._is_private(group)] == [1, 2]


@pytest.mark.skipif(not trust.CHECKED, reason="files have no owners on this system")
@pytest.mark.parametrize("how", ["mode", "owner"])
def test_a_file_of_someone_else_is_not_loaded(how: str, folders: Path, another: Callable[[Path], None]) -> None:
    kernel_cache.write("gpu", "a", b"code")
    path = folders / "cache" / "kernels" / ("gpu-" + kernel_cache.fingerprint("gpu")) / "a"
    if how == "mode":
        path.chmod(0o666)
    else:
        another(path)
    assert kernel_cache.read("gpu", "a") is None
    kernel_cache.write("gpu", "a", b"code")
    assert kernel_cache.read("gpu", "a") == b"code"


@pytest.mark.skipif(not trust.CHECKED, reason="files have no owners on this system")
def test_a_link_that_someone_else_can_change(folders: Path, another: Callable[[Path], None]) -> None:
    (folders / "elsewhere").mkdir(mode=0o700)
    link = folders / "link"
    link.symlink_to(folders / "elsewhere")
    assert trust.problem(link) == "" and trust.problem(link.parent) == ""
    if os.getuid():
        pytest.skip("only the superuser can give files away")
    os.chown(link, 12345, -1, follow_symlinks=False)
    assert "others can replace" in trust.problem(link)
    (folders / "elsewhere" / "inside").mkdir(mode=0o700)
    assert "others can replace" in trust.problem(link / "inside")


def test_a_full_disk_is_named_once(
    folders: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel_cache.places("gpu")

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def opened(file: int, mode: str) -> Full:
        os.close(file)
        return Full()

    monkeypatch.setattr(trust, "open", opened, raising=False)
    with caplog.at_level(logging.WARNING):
        kernel_cache.write("gpu", "a", b"code")
        kernel_cache.write("gpu", "b", b"code")
    folder = folders / "cache" / "kernels" / ("gpu-" + kernel_cache.fingerprint("gpu"))
    assert caplog.messages == [f"compiled kernels are not kept in {folder}: No space left on device."]
    assert list(folder.iterdir()) == []


SILU = """
import numpy as np
from engine.cpu import glu
x = np.ones(4, np.float32)
out = np.empty_like(x)
zero = np.float32(0)
glu.activate("swiglu")(x, x, zero, zero, zero, zero, out, 0, 4)
print(out[0])
"""


@pytest.mark.parametrize("where", ["writable", "/dev/null/x"])
def test_a_changed_function_is_compiled_again(where: str, tmp_path: Path) -> None:
    """It is compiled again whether or not the folder for kernels is writable."""
    copy = tmp_path / "engine"
    for path in ROOT.rglob("*.py"):
        place = copy / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    cache = str(tmp_path / "cache") if where == "writable" else where
    environment = os.environ | {"BITMIRROR_CACHE": cache, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run() -> float:
        done = subprocess.run(
            [sys.executable, "-c", SILU], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
        )
        return float(done.stdout)

    first = run()
    numerics = copy / "numerics.py"
    text = numerics.read_text()
    assert text.count("return x / (_ONE + exp(-x))") == 1
    numerics.write_text(text.replace("return x / (_ONE + exp(-x))", "return _ONE + x / (_ONE + exp(-x))"))
    assert run() != first
    assert not list(copy.rglob("*.nbi"))
