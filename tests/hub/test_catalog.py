"""Named models: what resolves to which file, and that a fetch leaves either the right file or nothing."""

import dataclasses
import hashlib
import importlib
import os
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import FetchError, UsageError
from engine.gguf.file import read_gguf
from engine.hub import catalog, fetch, resolve
from engine.hub.catalog import CATALOG, CatalogEntry, Part
from tests.conftest import REPOSITORY, model_path

PIECES = (bytes(range(256)) * 9000, b"the second piece of the file" * 70000)


def wheel_name(package: str) -> str:
    return f"{package.replace('-', '_')}-1.0-py3-none-any.whl"


def write_wheel(folder: Path, package: str, content: dict[str, bytes]) -> Path:
    """A wheel that pip accepts: some files and the metadata that every wheel has."""
    info = f"{package.replace('-', '_')}-1.0.dist-info"
    members = content | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / wheel_name(package)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in members.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in members))
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the folder of its models."""
    monkeypatch.setenv("BITMIRROR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder of wheels: a model in two pieces."""
    folder = tmp_path / "index"
    folder.mkdir()
    for i, piece in enumerate(PIECES):
        write_wheel(folder, f"tiny-part{i}", {f"tiny_part{i}/tiny.part{i}": piece})
    return folder


@pytest.fixture
def tiny(index: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """The catalog's entry of the model in two pieces."""
    whole = b"".join(PIECES)
    model = CatalogEntry(
        license="MIT",
        name="tiny",
        file_name="tiny.gguf",
        n_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        description="for tests",
        parts=tuple(
            Part(
                f"tiny-part{i}==1.0", f"tiny_part{i}/tiny.part{i}", (index / wheel_name(f"tiny-part{i}")).stat().st_size
            )
            for i in range(len(PIECES))
        ),
    )
    monkeypatch.setitem(CATALOG, "tiny", model)
    return model


@pytest.fixture
def copied(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces pip by a copy from the index; returns the list of requests."""
    asked: list[str] = []

    def download(requirement: str, folder: Path, downloaded: Callable[[int], None]) -> Path:
        asked.append(requirement)
        name = wheel_name(requirement.partition("==")[0])
        if not (index / name).exists():
            raise FetchError(f"{requirement} could not be fetched")
        downloaded(1)
        return Path(shutil.copy(index / name, folder / name))

    monkeypatch.setattr(fetch, "download", download)
    return asked


# -- resolve


def test_nothing_and_the_default_name_are_the_bundled_model() -> None:
    paths = {resolve.resolve(None), resolve.resolve("pycoder")}
    assert len(paths) == 1
    assert paths.pop().read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("name", ["", 5, b"pycoder", Path("")])
def test_what_is_neither_a_name_nor_a_path_is_refused(name: Any) -> None:
    with pytest.raises((UsageError, FetchError), match=r"^[^\n]+$"):
        resolve.resolve(name)


@pytest.mark.parametrize("name", ["pycoder", "pycoder-draft"])
def test_bundled_files_have_the_recorded_hash(name: str) -> None:
    assert catalog.verify(CATALOG[name]).stat().st_size == CATALOG[name].n_bytes


def test_a_path_resolves_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pycoder"
    file.write_bytes(b"GGUF")
    assert resolve.resolve(str(file)) == resolve.resolve(file) == file
    monkeypatch.chdir(tmp_path)
    assert resolve.resolve("./pycoder") == Path("./pycoder")
    assert resolve.resolve("pycoder") != Path("pycoder")  # the name wins
    monkeypatch.setenv("HOME", str(tmp_path))
    assert os.name == "nt" or resolve.resolve("~/pycoder") == file


@pytest.mark.parametrize("name", ["nope", "no/such/file.gguf", "x" * 5000, "\0", "~nobody-here/x"])
def test_an_unknown_name_lists_the_names(name: str) -> None:
    with pytest.raises(
        FetchError, match="pycoder, pycoder-draft, pycoder-eagle3, pycoder-moe-mtp, smollm2-135m, gemma3-270m"
    ) as caught:
        resolve.resolve(name)
    assert "\n" not in str(caught.value)
    with pytest.raises(FetchError, match="gemma3-270m"):
        catalog.named(name)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="directory"):
        resolve.resolve(tmp_path)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_the_registered_models_are_what_the_catalog_says(name: str) -> None:
    path = model_path(name)
    assert path == catalog.verify(CATALOG[name])
    assert path.stat().st_size == CATALOG[name].n_bytes


# -- fetch


def test_pip_fetches_and_the_pieces_are_joined(
    cache: Path, tiny: CatalogEntry, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    seen: list[tuple[str, int, int]] = []
    path = resolve.resolve("tiny", lambda *step: seen.append(step))
    assert path.read_bytes() == b"".join(PIECES)
    assert list(cache.iterdir()) == [path]
    total = sum(part.wheel_bytes for part in tiny.parts)
    assert seen[0] == ("fetch", 0, total)
    assert seen[-1] == ("fetch", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))  # nothing is there to fetch from now, and nothing has to be
    assert resolve.resolve("tiny") == resolve.fetch(tiny) == path


def test_pips_own_words_reach_the_user(cache: Path, tiny: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(cache))
    with pytest.raises(FetchError, match="No matching distribution found for tiny-part0==1.0") as caught:
        resolve.fetch(tiny)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_python_without_pip_is_told_so(
    cache: Path, tiny: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    if os.name == "nt":
        pytest.skip("needs a shell script")
    with pytest.raises(FetchError, match="ensurepip"):
        resolve.fetch(tiny)


@pytest.mark.usefixtures("copied")
def test_a_wrong_hash_leaves_nothing(cache: Path, tiny: CatalogEntry) -> None:
    wrong = dataclasses.replace(tiny, sha256="0" * 64)
    with pytest.raises(FetchError, match="SHA-256"):
        resolve.fetch(wrong)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("n_bytes", [1, 10**7])
def test_a_wrong_size_leaves_nothing(cache: Path, tiny: CatalogEntry, n_bytes: int) -> None:
    with pytest.raises(FetchError, match="SHA-256"):
        resolve.fetch(dataclasses.replace(tiny, n_bytes=n_bytes))
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("copied")
def test_broken_wheels_leave_nothing(cache: Path, tiny: CatalogEntry, index: Path) -> None:
    second = index / wheel_name("tiny-part1")
    sound = second.read_bytes()
    write_wheel(index, "tiny-part1", {"tiny_part1/other": b""})
    with pytest.raises(FetchError, match=r"no sound tiny_part1/tiny.part1"):
        resolve.fetch(tiny)
    for broken in (b"no zip", sound[:-100], sound[:200] + bytes(2000) + sound[2200:]):
        second.write_bytes(broken)
        with pytest.raises(FetchError, match="no sound"):
            resolve.fetch(tiny)
    second.unlink()
    with pytest.raises(FetchError, match="tiny-part1==1.0 could not be fetched"):
        resolve.fetch(tiny)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("copied")
def test_ctrl_c_leaves_nothing(cache: Path, tiny: CatalogEntry) -> None:
    def progress(stage: str, done: int, total: int) -> None:
        if done > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve.fetch(tiny, progress)
    assert list(cache.iterdir()) == []


def test_two_fetches_at_once(cache: Path, tiny: CatalogEntry, copied: list[str]) -> None:
    meet = threading.Barrier(2, timeout=120)
    paths: list[Path] = []

    def progress(stage: str, done: int, total: int) -> None:
        if done == total:
            meet.wait()  # both have all pieces, neither has taken its place

    threads = [threading.Thread(target=lambda: paths.append(resolve.fetch(tiny, progress))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache / "tiny.gguf"] * 2
    assert len(copied) == 4
    assert catalog.verify(tiny) == cache / "tiny.gguf"
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("copied")
def test_too_little_space_is_seen_before_the_download(
    cache: Path, tiny: CatalogEntry, copied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")._replace(free=tiny.n_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FetchError, match="free space"):
        resolve.fetch(tiny)
    assert copied == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, tiny: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BITMIRROR_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="cannot be written"):
        resolve.fetch(tiny)


@pytest.mark.skipif(os.name != "posix", reason="files have no modes on this system")
@pytest.mark.usefixtures("copied")
def test_folders_are_private_whatever_the_umask(cache: Path, tiny: CatalogEntry) -> None:
    """Kernels, which are executed, lie in the same folder."""
    before = os.umask(0)
    try:
        resolve.resolve("tiny")
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in (cache, cache.parent)] == [0o700, 0o700]


@pytest.mark.usefixtures("copied")
def test_a_truncated_file_is_fetched_again(cache: Path, tiny: CatalogEntry) -> None:
    path = resolve.fetch(tiny)
    path.write_bytes(b"short")
    assert not catalog.is_present(tiny)
    assert resolve.resolve("tiny").read_bytes() == b"".join(PIECES)


@pytest.mark.usefixtures("copied")
def test_leftovers_are_swept_after_a_day(cache: Path, tiny: CatalogEntry) -> None:
    old, young = cache / ".fetch-old", cache / ".fetch-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "tiny.gguf.part").write_bytes(b"x")
    yesterday = time.time() - 2 * 86400
    os.utime(old, (yesterday, yesterday))
    resolve.fetch(tiny)
    assert sorted(path.name for path in cache.iterdir()) == [".fetch-young", "tiny.gguf"]


# -- verify, remove


@pytest.mark.usefixtures("copied")
def test_verify_and_remove(cache: Path, tiny: CatalogEntry) -> None:
    with pytest.raises(FetchError, match="cannot be read"):
        catalog.verify(tiny)
    path = resolve.fetch(tiny)
    assert catalog.verify(tiny) == path
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(FetchError, match="damaged"):
        catalog.verify(tiny)
    assert catalog.remove(tiny)
    assert not path.exists()
    assert not catalog.remove(tiny)
    with pytest.raises(FetchError, match="cannot be removed"):
        catalog.remove(CATALOG["pycoder"])
    assert catalog.is_present(CATALOG["pycoder"])


# -- the cache folder


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "/home/u/.cache/bitmirror"),
        ({"XDG_CACHE_HOME": "/var/x"}, "/var/x/bitmirror"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/u/.cache/bitmirror"),
        ({"XDG_CACHE_HOME": ""}, "/home/u/.cache/bitmirror"),
        ({"BITMIRROR_CACHE": "/mnt/models", "XDG_CACHE_HOME": "/var/x"}, "/mnt/models"),
        ({"BITMIRROR_CACHE": "~/models"}, "/home/u/models"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the places of Linux")
def test_cache_dir(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BITMIRROR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/u")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert catalog.cache_dir() == Path(expected)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a home directory has other sources")
def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("BITMIRROR_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(FetchError, match="no home directory for models: set BITMIRROR_CACHE"):
        catalog.cache_dir()
    monkeypatch.setenv("BITMIRROR_CACHE", "~/models")
    with pytest.raises(FetchError, match="no home directory"):
        catalog.cache_dir()


@pytest.mark.parametrize("name", CATALOG)
def test_the_license_is_that_of_the_file(name: str) -> None:
    model = CATALOG[name]
    if model.bundled:  # their files name none
        folder = catalog.model_file(model).parent
        assert (folder / "LICENSE").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()
        assert model.license == "Apache-2.0"
    else:
        if not catalog.is_present(model):
            pytest.skip(f"{name} has not been downloaded: bitmirror models fetch {name}")
        license = read_gguf(catalog.model_file(model)).require("general.license", "str")
        assert model.license.lower().split()[0] == license


# -- python -m engine.cli.models


def models(*words: str) -> int:
    status: int = importlib.import_module("engine.cli.models").main(list(words))
    return status


@pytest.mark.usefixtures("copied")
def test_the_command(cache: Path, tiny: CatalogEntry, capsys: pytest.CaptureFixture[str]) -> None:
    def listed() -> dict[str, str]:
        assert models("list") == 0
        return {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}

    assert listed() == dict.fromkeys(
        ("pycoder", "pycoder-draft", "pycoder-eagle3", "pycoder-moe-mtp"), "bundled"
    ) | dict.fromkeys(("smollm2-135m", "gemma3-270m", "tiny"), "-")
    assert models("fetch", "tiny") == 0
    assert capsys.readouterr().out.strip() == str(cache / "tiny.gguf")
    assert listed()["tiny"] == "fetched"
    assert models("verify", "tiny") == 0
    assert models("remove", "tiny") == 0
    capsys.readouterr()
    assert listed()["tiny"] == "-"
    assert models("--help") == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    "words", [("fetch",), ("list", "x"), ("explode", "tiny"), ("remove", "nope"), ("verify", "nope")]
)
def test_a_wrong_command_is_one_sentence(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert models(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
