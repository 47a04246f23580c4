"""The model of a conversation for which none is named: asked once, fetched, or refused for good."""

import io
import sys
from pathlib import Path

import pytest

from engine.cli import first_model
from engine.cli.first_model import NAME, conversation_model
from engine.cli.report import Report
from engine.errors import FetchError
from engine.hub.catalog import CATALOG, CatalogEntry, model_file


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache, and the names of the models that are fetched into it."""
    monkeypatch.setenv("BITMIRROR_CACHE", str(tmp_path))
    names: list[str] = []

    def fetch(model: CatalogEntry, progress: object = None) -> Path:
        names.append(model.name)
        path = model_file(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(model.n_bytes)
        return path

    monkeypatch.setattr(first_model, "fetch", fetch)
    return names


def ask(monkeypatch: pytest.MonkeyPatch, typed: str) -> tuple[str | None, str]:
    """The model for a user who types this at the question, and what was shown."""
    monkeypatch.setattr(sys, "stdin", Screen(typed))
    screen = Screen()
    return conversation_model(Report(stream=screen)), screen.getvalue()


@pytest.mark.parametrize("typed", ["\n", "y\n", "Yes\n"])
def test_consent_fetches_the_model_once(typed: str, fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, text = ask(monkeypatch, typed)
    assert (name, fetched) == (NAME, [NAME])
    assert "98 MB" in text
    assert CATALOG[NAME].n_bytes // 10**6 == 98
    name, text = ask(monkeypatch, "")
    assert (name, text, fetched) == (NAME, "", [NAME])


def test_a_refusal_is_remembered(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, text = ask(monkeypatch, "n\n")
    assert name is None
    assert "Download it now?" in text
    name, text = ask(monkeypatch, "y\n")
    assert name is None
    assert "Download it now?" not in text
    assert f"bitmirror chat -m {NAME}" in text
    assert fetched == []


@pytest.mark.usefixtures("fetched")
def test_the_end_of_input_is_no_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, "")[0] is None
    assert "Download it now?" in ask(monkeypatch, "")[1]  # nor a refusal


def test_without_a_terminal_nobody_is_asked(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert conversation_model(Report(stream=Screen())) is None
    assert sys.stdin.read() == "y\n"
    assert fetched == []
    # And that is no refusal.
    assert ask(monkeypatch, "y\n")[0] == NAME


def test_a_server_has_the_same_model(
    fetched: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that chats if it is there; else the bundled one, with a note that says how; a named one as it is."""
    pytest.importorskip("starlette")
    from engine.cli.serve_flags import parser
    from engine.serve import specs

    def served(*words: str) -> str:
        (spec,) = specs(parser().parse_args([*words]))
        return spec.name

    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert served() == "pycoder-dense-Q4_K_M"
    assert f"`bitmirror serve -m {NAME}` downloads one that can chat" in capsys.readouterr().err
    ask(monkeypatch, "y\n")
    assert (served(), fetched) == (NAME, [NAME])
    assert served("-m", "pycoder") == "pycoder"
    (spec,) = specs(parser().parse_args(["-m", "pycoder", "-a", "coder,pycoder", "--alias", "x"]))
    assert (spec.name, spec.aliases) == ("coder", ["pycoder", "x"])
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("fetched")
def test_a_failed_download_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise FetchError("no network")

    monkeypatch.setattr(first_model, "fetch", fail)
    name, text = ask(monkeypatch, "y\n")
    assert name is None
    assert "note: no network" in text
    # The next conversation asks again.
    assert "Download it now?" in ask(monkeypatch, "y\n")[1]
