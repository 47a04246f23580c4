"""Where tests find reference data; each helper skips the test, with the reason, when the data is not there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

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


def _simulations(items: list[pytest.Item]) -> list[Any]:
    """Tests that wait for a simulation (``tests/cuda/test_simulator.py``)."""
    return [item for item in items if getattr(item, "originalname", "") == "test_in_the_simulator"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Simulations of a GPU take long, and one core: they begin before the first test, the longest first."""
    wanted = _simulations(session.items)
    if wanted and not session.config.option.collectonly and os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        files = [item.callspec.params["file"] for item in wanted]
        longest = (
            "test_speculation.py",
            "test_parity.py",
            "test_operations.py",
            "test_attention.py",
            "test_direct_attention.py",
            "test_tiled_attention.py",
        )
        wanted[0].module.begin(sorted(files, key=lambda file: file not in longest))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """None of them goes on when nobody wants to know."""
    for item in _simulations(session.items)[:1]:
        item.module.POOL.shutdown(wait=False, cancel_futures=True)
        item.module.OTHERS_DONE.set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """... and are asked for last."""
    items.sort(key=lambda item: getattr(item, "originalname", "") == "test_in_the_simulator")
