"""The file of ``bitmirror parity --report``; ``tests/cuda/simulated/test_parity.py`` writes whole ones."""

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import UsageError
from engine.gguf.file import read_gguf
from engine.hub.resolve import resolve
from engine.verify.report import ReportFile, about, about_model, outcome, without_paths
from engine.verify.tally import Tally

GPU = {"gpu": {"name": "Abacus X1"}}


@pytest.fixture
def gpu() -> Any:
    device = pytest.importorskip("engine.cuda.runtime.driver", reason="the GPU backend needs numba-cuda")
    return device.DeviceInfo(0, "Abacus X1", (8, 6), 12 << 30, 11 << 30, 28, 99 << 10, "580.1, CUDA 13.0")


def test_the_machine_and_the_versions(gpu: Any) -> None:
    found = about(gpu)
    assert found["gpu"] == {
        "name": "Abacus X1",
        "compute_capability": "8.6",
        "memory_mib": 12288,
        "multiprocessors": 28,
        "shared_memory_kib": 99,
        "driver": "580.1, CUDA 13.0",
    }
    assert found["versions"]["numba"] == version("numba") and found["versions"]["python"] == platform.python_version()
    assert found["cpu"]["threads"] > 0 and found["cpu"]["memory_mib"] > 100 and found["cpu"]["name"]
    assert ("avx2" in found["cpu"]["features"]) == (found["cpu"]["instructions"] != "plain")
    assert found.keys() == {"gpu", "cpu", "system", "versions"}
    assert json.loads(json.dumps(found)) == found


def test_a_model_is_identified_without_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve("pycoder-draft")
    found = about_model(path, gguf := read_gguf(path))
    assert found["file"] == path.name and found["bytes"] == gguf.n_bytes and found["architecture"] == "qwen3"
    assert sum(found["tensors"].values()) == len(gguf.tensors) and found["tensors"]["Q4_K"] > 0
    assert str(path.parent) not in json.dumps(found)
    monkeypatch.setenv("HOME", "/home/somebody")
    words = f"{path}: this is in /home/somebody/models/a.gguf"
    assert without_paths(words, path) == f"{path.name}: this is in ~/models/a.gguf"
    monkeypatch.setenv("HOME", "/")  # as in some containers
    assert without_paths(f"{path}: this is in /models", path) == f"{path.name}: this is in /models"


def test_the_lines_are_those_of_the_table() -> None:
    lockstep = pytest.importorskip("engine.verify.lockstep", reason="the GPU backend needs numba-cuda")
    tally = Tally()
    for layer, wrong in ((0, 0), (1, 1), (1, 0)):
        site = lockstep.Site(layer, "matmul", "attn_q", "matmul_quantized", "matmul_quantized[Q4_K]")
        found = np.arange(6, dtype=np.float32).reshape(2, 3)
        found[0, 0] = wrong
        tally.note(site, lockstep.Check("result", np.arange(6, dtype=np.float32).reshape(2, 3), found))
    tally.whole("cache", "what is visible", lockstep.Check("keys", np.zeros(5), np.zeros(5)))
    results = outcome(tally, "what differs", "different")
    seconds = [line.pop("seconds") for line in results["comparisons"]]
    assert all(0 <= each < 60 for each in seconds)
    bits = int(np.float32(1).view(np.uint32)).bit_count()
    assert results == {
        "result": "different",
        "problem": "what differs",
        "values": 23,
        "differing_bits": bits,
        "comparisons": [
            {
                "operation": "matmul",
                "tensors": "attn_q",
                "kernel": "matmul_quantized",
                "compared": ["result"],
                "shapes": ["3"],
                "layers": ["0", "1"],
                "values": 18,
                "differing_bits": bits,
            },
            {
                "operation": "cache",
                "tensors": "",
                "kernel": "",
                "compared": ["what is visible"],
                "shapes": [""],
                "layers": ["-"],
                "values": 5,
                "differing_bits": 0,
            },
        ],
    }
    assert [(row[0], row[-2], row[-1]) for row in tally.rows()] == [("matmul", "18", str(bits)), ("cache", "5", "0")]


def test_runs_on_one_machine_add_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    first = ReportFile(str(path), GPU)
    assert not list(tmp_path.iterdir())
    first.add({"file": "a.gguf"})
    ReportFile(str(path), GPU).add({"file": "b.gguf"})
    assert json.loads(path.read_text()) == {
        "format": "bitmirror-parity",
        "version": 1,
        **GPU,
        "models": [{"file": "a.gguf"}, {"file": "b.gguf"}],
    }
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"format": "bitmirror-parity", "version": 1, "gpu": {"name": "Abacus I"}}', "of another machine or of other"),
        ('{"format": "bitmirror-parity", "version": 2}', "is no report of bitmirror parity"),
        ("[1, 2]", "is no report of bitmirror parity"),
        ("not \x00 JSON", "is no report of bitmirror parity"),
        ("", "is no report of bitmirror parity"),
    ],
)
def test_other_files_are_not_replaced(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text(content)
    with pytest.raises(
        UsageError, match=rf"^the report cannot be written to .*{says}.*; give --report another name\.$"
    ):
        ReportFile(str(path), GPU)
    assert path.read_text() == content and list(tmp_path.iterdir()) == [path]


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    for name, says in (("missing/report.json", "No such file"), ("", "Is a directory"), ("x" * 300, "too long")):
        with pytest.raises(UsageError, match=f"{says}.*; give --report another name"):
            ReportFile(str(tmp_path / name), GPU)
    report = ReportFile(str(tmp_path / "report.json"), GPU)
    (tmp_path / "report.json").mkdir()
    with pytest.raises(UsageError, match="Is a directory; give --report another name"):
        report.add({})
