"""A server that cannot start says why in one sentence."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")

from engine import serve


@pytest.mark.parametrize("flags", [("-m", "FILE"), ("-m", "FILE", "--host", "256.0.0.1", "--api-key", "k")])
def test_one_sentence_and_status_2(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged file, and an address that does not exist."""
    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF broken")
    words = [str(file) if flag == "FILE" else flag for flag in flags]
    assert serve.main([*words, "--port", "0", "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("listening on")] == [lines[-1]]
    assert lines[-1].startswith("error: ")


def test_uvloop_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With uvloop, the system lets a single client wait and refuses others."""

    def new_event_loop() -> None:
        raise AssertionError("uvloop is used")

    monkeypatch.setattr(sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setitem(sys.modules, "uvloop", SimpleNamespace(new_event_loop=new_event_loop))
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF broken")
    assert serve.main(["-m", str(file), "--port", "0", "--device", "cpu"]) == 2
