"""The comparison of a conversation from files with the rate of the disk."""

import os
from pathlib import Path

import pytest

from benchmarks import conversations
from engine.synthetic.model import make_model


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="files cannot be dropped from the page cache")
def test_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "m.gguf", "tiny-llama", "Q4_1", seed=5)
    conversations.main([str(model), "--device", "cpu", "--tokens", "200", "--runs", "1", "--folder", str(tmp_path)])
    _, _, *rows = capsys.readouterr().out.splitlines()
    found = {name: float(n_bytes) for name, _, n_bytes, *_ in (row.split("\t") for row in rows)}
    assert found.keys() == {"text", "raw", "state", "pages"} and found["text"] == 0 < found["raw"] == found["state"]
