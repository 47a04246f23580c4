"""Access to reference data; each function skips the test, with the reason, if the data is missing.

``tests/tiers.py`` defines which tests run."""

import gc
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["tests.tiers"]

REPOSITORY = Path(__file__).resolve().parent.parent

# Compilers and simulated kernels make many objects and few cycles: searches for them take up to a tenth of the time of
# a process that compiles, as in ``engine/compile/worker.py``.
gc.set_threshold(50_000)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What has been collected stays until the end: it is no longer searched."""
    gc.freeze()


class _Records(logging.Handler):
    """What is logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)


@pytest.fixture(autouse=True)
def _no_round_fails(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a round of a scheduler has failed, unless it is marked ``recovers``: answers do not show that."""
    log, records = logging.getLogger("bitmirror.decode"), _Records()
    log.addHandler(records)
    yield
    log.removeHandler(records)
    if not request.node.get_closest_marker("recovers"):
        for record in records.found:
            assert record.exc_info is not None and record.exc_info[1] is not None
            raise AssertionError("a round of the scheduler has failed") from record.exc_info[1]


@pytest.fixture(autouse=True, scope="session")
def _no_time_decides() -> Iterator[None]:
    """Draft as much as is asked for: times, which a busy machine has, decide nothing."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("engine.speculative.passes.SEEN", 1 << 30)
        yield


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
