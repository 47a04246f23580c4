"""The notebooks in ``examples/notebooks``: their cells run in order, and what they assert holds."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    """The cells of a kind, "code" or "markdown"."""
    found = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def test_every_notebook_is_described() -> None:
    names = {path.name for path in NOTEBOOKS}
    assert names == {"tour.ipynb", "sampling.ipynb", "speculation.ipynb", "one-token.ipynb"}
    book = (REPOSITORY / "docs" / "examples.md").read_text(encoding="utf-8")
    assert all(f"examples/notebooks/{name}" in book for name in names)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_clean(notebook: Path) -> None:
    """It has no outputs, which would differ from run to run; it asserts what it says; its links lead somewhere."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids)
    code = cells(notebook, "code")
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    trees = [ast.parse("".join(cell["source"])) for cell in code]
    assert sum(isinstance(node, ast.Assert) for tree in trees for node in ast.walk(tree)) >= 4
    for cell in cells(notebook, "markdown"):
        for target in "".join(cell["source"]).split("](")[1:]:
            assert (notebook.parent / target.partition(")")[0]).is_file(), target


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All code cells, in order and in one namespace, in the folder of the notebook."""
    monkeypatch.chdir(notebook.parent)
    monkeypatch.syspath_prepend(notebook.parent.parent)  # what a cell adds is removed after the test, too
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for i, cell in enumerate(cells(notebook, "code")):
        exec(compile("".join(cell["source"]), f"{notebook.name}, code cell {i + 1}", "exec"), namespace)
    captured = capsys.readouterr()
    assert captured.out.count("\n") >= 5 and captured.err == ""


def test_a_wrong_assertion_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    source = NOTEBOOKS[0]
    content = json.loads(source.read_text(encoding="utf-8"))
    content["cells"] = [
        {"cell_type": "code", "source": ["one = 1\n"]},
        {"cell_type": "code", "source": ["assert one == 2"]},
    ]
    changed = tmp_path / "changed.ipynb"
    changed.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(AssertionError):
        test_a_notebook_runs(changed, monkeypatch, capsys)
