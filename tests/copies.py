"""Copies of the working tree in which one text is changed, and runs of tests in them.

Kernels compiled from one source must never run for another, and compiling all of them for every change takes minutes. So each
copy has its own cache, which starts with the compiled kernels of unaffected modules. Only the changed module and those that
import it, directly or indirectly, are compiled again.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from tests.conftest import REPOSITORY

SIMULATED = "tests/cuda/simulated/"
"""Tests below this folder run in Numba's CUDA simulator."""

LEFT_OUT = {"__pycache__", "build", "dist", "node_modules"}
"""Folders that do not belong to the sources, for trees without a git repository."""

SUMMARY = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run of tests.

    found: the first test that failed, or ""; how: "passed", "failed", "timed out", or "not run" if pytest found no test;
    seconds: the time that they took; output: the output of pytest.
    """

    found: str
    how: str
    seconds: float
    output: str = ""

    @property
    def noticed(self) -> bool:
        """Whether a test failed or timed out."""
        return self.how in ("failed", "timed out")

    def __str__(self) -> str:
        words = {"failed": "found by", "timed out": "found by (it does not end)"}
        return f"{words[self.how]} {self.found}" if self.noticed else f"NOT FOUND (tests {self.how})"


class Change(Protocol):
    """A change of a copy, and the tests that should find it."""

    @property
    def file(self) -> str:
        """The path of the changed file in the tree."""

    @property
    def tests(self) -> tuple[str, ...]:
        """Arguments of pytest, the fastest tests first."""

    def apply(self, text: str) -> str:
        """The file's text with the change."""


def sources() -> list[str]:
    """Relative paths of the files of the tree: those that git tracks, or all files if there is no repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    names = [name for name in listed.stdout.split("\0") if name]
    if listed.returncode or not names:
        names = [path.relative_to(REPOSITORY).as_posix() for path in _walk(REPOSITORY)]
    return [name for name in names if (REPOSITORY / name).is_file()]


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink() and not path.name.startswith(".") and path.name not in LEFT_OUT:
            yield from _walk(path)


C = TypeVar("C", bound=Change)


ENTRIES = "engine/cpu/runtime/entry.py"
"""Makes the entries of all kernels, which are stored under the names of the kernels."""


class Imports:
    """The imports between modules of the package."""

    def __init__(self, names: Iterable[str]) -> None:
        self._files = {name for name in names if name.startswith("engine/") and name.endswith(".py")}

    @cached_property
    def _direct(self) -> dict[str, set[str]]:
        return {name: set(self._imported(name)) for name in self._files}

    def _imported(self, name: str) -> Iterator[str]:
        for node in ast.walk(ast.parse((REPOSITORY / name).read_text(encoding="utf-8"))):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in modules:
                path = module.replace(".", "/")
                yield from {f"{path}.py", f"{path}/__init__.py"} & self._files

    def file(self, name: str) -> str:
        """The file of a function, by its dotted name; "" if there is none."""
        while name:
            name = name.rpartition(".")[0]
            for path in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
                if path in self._files:
                    return path
        return ""

    def users(self, changed: str) -> set[str]:
        """The changed file and all files that import it, directly or indirectly."""
        found = {changed}
        while more := {name for name, imported in self._direct.items() if imported & found} - found:
            found |= more
        return found


class Tree:
    """A tree of sources, with a folder for the kernels that its tests compile."""

    def __init__(self, tree: Path, cache: Path) -> None:
        self.tree, self.cache = tree, cache

    @property
    def version(self) -> str:
        """The name of the folder of this tree's CPU kernels in the cache."""
        code = "import engine.compile.cache as k; print(k.places('cpu').write)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.tree,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        return Path(done.stdout.strip() or "none").name

    def _environment(self) -> dict[str, str]:
        python = os.pathsep.join(filter(None, (str(self.tree), os.environ.get("PYTHONPATH", ""))))
        return os.environ | {
            "PYTHONPATH": python,
            "PYTHONDONTWRITEBYTECODE": "1",
            "NUMBA_CACHE_DIR": str(self.cache),
            "BITMIRROR_CACHE": os.environ.get("BITMIRROR_CACHE") or str(self.cache.parent / "models"),
            "BITMIRROR_SHARED": os.environ.get("BITMIRROR_SHARED") or str(REPOSITORY.parent / "shared"),
        }

    def test(self, targets: Sequence[str], limit: float) -> Outcome:
        """Run tests one after the other until one fails, each for at most ``limit`` seconds: first those of the first tier,
        then those of ``--rest``."""
        started = time.perf_counter()
        for target in targets:
            outcomes = []
            for tier in ((), ("--rest",)):
                outcomes.append(self._run(target, limit, tier))
                if outcomes[-1].how not in ("passed", "not run"):
                    break
            outcome = next((one for one in reversed(outcomes) if one.how != "not run"), outcomes[0])
            if outcome.how != "passed":
                return Outcome(outcome.found, outcome.how, time.perf_counter() - started, outcome.output)
        return Outcome("", "passed", time.perf_counter() - started)

    def _run(self, target: str, limit: float, tier: Sequence[str]) -> Outcome:
        environment = self._environment()
        environment.pop("NUMBA_ENABLE_CUDASIM", None)
        if target.startswith(SIMULATED):
            environment["NUMBA_ENABLE_CUDASIM"] = "1"
        # The profile has no deadlines, because the first call of a kernel compiles it.
        options = [
            "-x",
            "-q",
            "-rfE",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
            "--hypothesis-profile=ci",
        ]
        command = [sys.executable, "-m", "pytest", *options, *tier, *shlex.split(target)]
        started = time.perf_counter()
        with subprocess.Popen(
            command,
            cwd=self.tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output = process.communicate(timeout=limit)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                output = process.communicate()[0]
                return Outcome(target, "timed out", time.perf_counter() - started, output)
        if process.returncode == 0:
            return Outcome("", "passed", time.perf_counter() - started, output)
        if process.returncode > 2:
            return Outcome(target, "not run", time.perf_counter() - started, output)
        found = SUMMARY.search(output)
        return Outcome(found[1] if found else target, "failed", time.perf_counter() - started, output)


class Copy(Tree):
    """A copy of the tree below ``folder``, in which one change at a time is made and undone."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        super().__init__(folder / "tree", folder / "cache")
        self.names = names
        for name in names:
            to = self.tree / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, to)

    def change(self, name: str, text: str) -> None:
        """Replace the text of a file."""
        (self.tree / name).write_text(text, encoding="utf-8")

    def restore(self, name: str) -> None:
        """Restore the original text of a file, and remove files that tests have written."""
        shutil.copy2(REPOSITORY / name, self.tree / name)
        shutil.rmtree(self.cache, ignore_errors=True)
        for path in self.tree.rglob("__pycache__"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)

    def seed(self, other: "Copy", changed: str, imports: Imports) -> None:
        """Start with the kernels that ``other`` has compiled, except those that depend on ``changed``."""
        stale = imports.users(changed)
        if ENTRIES in stale:
            return
        version = self.cache / self.version
        version.mkdir(parents=True, exist_ok=True)
        for path in (other.cache / other.version).glob("*.numba"):
            if imports.file(path.name.split("-")[0]) not in stale:
                _link(path, version / path.name)


class Runner(AbstractContextManager["Runner[C]"], Generic[C]):
    """Changes in copies of the tree, ``jobs`` at a time."""

    def __init__(self, jobs: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="copies-")).resolve()
        names = sources()
        self._imports = Imports(names)
        self._base = Copy(self._folder / "base", names)
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for k in range(jobs):
            self._free.put(Copy(self._folder / str(k), names))
        self._pool = ThreadPoolExecutor(jobs)
        self._seconds: dict[str, float] = {}

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def unchanged(self, changes: Sequence[C]) -> None:
        """Run the tests of all changes on unchanged sources, which also compiles their kernels.  A test that fails here
        cannot find a change."""
        targets = sorted({target for change in changes for target in change.tests})
        for target, outcome in zip(targets, self._pool.map(lambda t: self._base.test([t], 3600), targets), strict=True):
            print(f"  {target}: {outcome.how} in {outcome.seconds:.0f} s", flush=True)
            if outcome.how == "passed":
                self._seconds[target] = outcome.seconds
            else:
                print(outcome.output, flush=True)

    def run(self, changes: Sequence[C]) -> Iterator[tuple[C, Outcome]]:
        """Yield each change and its outcome, in the order in which they end; the changes expected to take longest start
        first."""

        def expected(change: C) -> float:
            return sum(self._seconds.get(target, 0.0) for target in change.tests)

        order = sorted(changes, key=expected, reverse=True)
        futures = {self._pool.submit(self._one, change): change for change in order}
        for future in as_completed(futures):
            yield futures[future], future.result()

    def _one(self, change: C) -> Outcome:
        targets = [target for target in change.tests if target in self._seconds]
        if not targets:
            return Outcome("", "not run", 0.0)
        # The run without the change also included compiling.
        limit = 60 + 2 * max(self._seconds[target] for target in targets)
        copy = self._free.get()
        try:
            copy.change(change.file, change.apply((REPOSITORY / change.file).read_text(encoding="utf-8")))
            copy.seed(self._base, change.file, self._imports)
            return copy.test(targets, limit)
        finally:
            copy.restore(change.file)
            self._free.put(copy)


def write_table(path: Path, name: str, table: str) -> None:
    """Write a table into a page, between ``<!-- name -->`` and ``<!-- end of name -->``; a page without these marks is
    overwritten."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        table = f"{before}{begin}\n{table}\n\n{end}{rest.split(end, 1)[1]}"
    else:
        table += "\n"
    path.write_text(table, encoding="utf-8")


def _link(path: Path, to: Path) -> None:
    # These files are replaced, never modified, so two folders can share one.
    try:
        os.link(path, to)
    except OSError:
        shutil.copy2(path, to)
