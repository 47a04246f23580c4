"""``engine/verify/groups.py`` and ``bitmirror parity`` with several devices on the CPU: a model that they share, or of which
each has some layers, is compared with one device, and the part at fault is named."""

from pathlib import Path
from typing import Any

import pytest

from engine import parity
from engine.group.backend import DeviceGroup
from engine.models.relay import Course
from tests.group.test_group import files

FLAGS = ["-p", "40", "-n", "6", "-t", "1"]


def table(out: str) -> dict[str, int]:
    """The differing bits by what is compared."""
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("operation"))
    return {line.split("  ")[0]: int(line.split()[-1]) for line in lines[head + 1 : lines.index("", head)]}


@pytest.mark.parametrize(
    ("name", "mode", "n"),
    [("four hybrid heads", "tensor", 4), ("gemma4 mixture", "tensor", 3), ("four hybrid heads", "layer", 4)],
)
def test_equal_models(name: str, mode: str, n: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(files(name, tmp_path)["path_or_name"])
    assert parity.main([path, "--device", ",".join(["cpu"] * n), "-sm", mode, *FLAGS]) == 0
    out = capsys.readouterr().out
    assert (" + ".join(["cpu"] * n) in out) == (mode == "tensor")
    expected = {"passes", "cache", "answer of LLM.generate"} | ({"stages on cpu"} if mode == "layer" else set())
    if name == "four hybrid heads" and mode == "tensor":
        expected.add("logits of drafts")
    assert table(out) == dict.fromkeys(expected, 0)
    assert out.splitlines()[-1].endswith("values compared are equal, bit for bit.")


def test_the_part_at_fault_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = DeviceGroup.matmul_add

    def wrong(self: DeviceGroup, residual: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        return right(self, residual, self.scale(x, 2.0) if "blk.1.attn_output" in weight.name else x, weight, bias)

    monkeypatch.setattr(DeviceGroup, "matmul_add", wrong)
    path = str(files("five heads", tmp_path)["path_or_name"])
    assert parity.main([path, "--device", "cpu,cpu", "-sm", "tensor", *FLAGS]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: whole pass: logits of the last 16 rows, positions 0 to 15: " in out
    assert "The stage at fault: the mixer of layer 1 on cpu + cpu." in out
    one, several = (
        next(line for line in out.splitlines() if line.startswith(f"  {name}")) for name in ("one", "several")
    )
    assert one.split()[:2] == ["one", "device"] and several.split()[:2] == ["several", "devices"]


def test_a_copy_at_fault_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = Course.enter

    def wrong(self: Course, i: int) -> None:
        enter(self, i)
        if i == 2:
            self._relay.inputs(i).x[...] = 0  # type: ignore[index]

    monkeypatch.setattr(Course, "enter", wrong)
    path = str(files("five heads", tmp_path)["path_or_name"])
    assert parity.main([path, "--device", "cpu,cpu,cpu", *FLAGS]) == 1
    assert "so a copy between two devices is at fault" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--device", "cpu"], "--device is the GPU to compare with the CPU"),
        (
            ["--device", "cpu,cpu", "--report", "r.json"],
            "--report describes a GPU: leave it out, or name one with --device",
        ),
        (["--device", "cpu,cpu", "-sm", "none"], "one device has all of the model, so there is nothing to compare"),
    ],
)
def test_what_is_refused(flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main([*flags, *FLAGS]) == 2
    assert sentence in capsys.readouterr().err
