"""``bitmirror run --receipt`` and ``bitmirror verify``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import run
from engine.cli import verify
from engine.receipts import form
from engine.receipts.form import chain_of


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A receipt of the bundled model."""
    path = tmp_path_factory.mktemp("receipts") / "receipt.json"
    flags = ["--device", "cpu", "-c", "256", "-n", "12", "--seed", "3", "-ctk", "q8_0", "--receipt", str(path)]
    assert run.main(["def add(a, b):", *flags]) == 0
    return path


def test_a_receipt_is_written_and_verified(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    n_tokens = len(json.loads(written.read_text())["tokens"])
    assert verify.main([str(written), "--device", "cpu", "-t", "1"]) == 0
    assert (
        capsys.readouterr().out
        == f"same: this model gives the {n_tokens} tokens of the receipt, from the same logits.\n"
    )


def test_what_differs_is_said(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, receipt = tmp_path / "changed.json", json.loads(written.read_text())
    receipt["tokens"][4] ^= 1
    path.write_text(json.dumps(receipt))
    assert verify.main([str(path)]) == 1
    assert "something was changed" in capsys.readouterr().out
    path.write_text(json.dumps(receipt | {"chain": chain_of(receipt)}))
    assert verify.main([str(path), "--device", "cpu", "--json"]) == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["same"], found["token"]) == (False, 4)
    assert verify.main([str(written), "-m", "pycoder-draft", "--device", "cpu"]) == 1
    assert "another model" in capsys.readouterr().out


def test_bad_flags_are_one_sentence(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], [str(tmp_path / "none.json")], [str(written), "-m", str(tmp_path / "none.gguf")]):
        assert verify.main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for flags in (["--receipt", str(tmp_path / "no" / "receipt.json"), "x"], ["--receipt", "receipt.json", "--cnv"]):
        assert run.main(flags) == 2
        assert "--receipt" in capsys.readouterr().err


def test_the_form_is_checked_without_the_engine(written: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.json"
    path.write_text(written.read_text().replace('"seed": 3', '"seed": 4'))
    for receipt, status, word in ((written, 0, "sound"), (path, 1, "something was changed")):
        # Neither this package nor any other can be imported.
        words = [sys.executable, "-I", "-S", form.__file__, str(receipt)]
        found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert (found.returncode, found.stderr) == (status, "")
        assert word in found.stdout
