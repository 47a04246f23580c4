"""``docs/add-an-architecture.md``: its changes, made in a copy of the package, suffice to run the model that it adds."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.conftest import REPOSITORY
from tests.models.test_oracle import BOUND, _error, _golden
from tests.oracle import models
from tests.oracle.models import CASES, prompts, write_gguf
from tests.oracle.shared import permuted

PAGE = REPOSITORY / "docs" / "add-an-architecture.md"
CASE = CASES["qwen3"]
SCALE = 2.0

SCRIPT = """
import sys
import numpy as np
import engine
from tests.oracle.models import CASES, prompts
llm = engine.load(sys.argv[1], cache_type="f32", device="cpu")
np.savez(sys.argv[2], *[llm.logits(prompt.tolist()) for prompt in prompts(CASES["qwen3"])])
"""


def changes() -> list[tuple[str, str, str]]:
    """The file of each change of the page, the text that it replaces ("": the file is new), and the new one."""
    page, found = PAGE.read_text(encoding="utf-8"), []
    for name, body in re.findall(r"^```\{code-block\} python\n:caption: (\S+)\n\n(.*?)^```", page, re.M | re.S):
        found.append((name, "", body))
    for body in re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S):
        header, *lines = body.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        found.append((header.removeprefix("--- ").strip(), old, new))
    return found


def changed(folder: Path, left_out: str = "", part: str = "") -> Path:
    """A copy of the sources with the changes of the page, except those of one file, and without one part of the new text."""
    for name in ("engine", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "*.gguf")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    parts = sum(new.count(part) for _, _, new in changes()) if part else 0
    assert parts == bool(part), f"{PAGE.name} does not contain, once: {part}"
    for name, old, new in changes():
        path = folder / name
        assert path.exists() == bool(old)
        text = path.read_text(encoding="utf-8") if old else ""
        assert not old or text.count(old) == 1, f"{PAGE.name}: {name} does not contain, once: {old}"
        if name != left_out:
            new = new.replace(part, "") if part else new
            path.write_text(text.replace(old, new) if old else new, encoding="utf-8")
    return folder


def acorn(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The random Qwen 3 as an acorn: neighbours form pairs, and the embedding is half as large as what it is scaled to."""
    plain, freq_base = models._tensors, gguf.GGUFWriter.add_rope_freq_base

    def tensors(case: models.Case) -> dict[str, np.ndarray]:
        converted = plain(case)
        for name, value in converted.items():
            heads = {"attn_q.": case.n_head, "attn_k.": case.n_head_kv, "attn_q_norm": 1, "attn_k_norm": 1}
            n = next((n for part, n in heads.items() if part in name), 0)
            converted[name] = permuted(value, n) if n else value
        converted["token_embd.weight"] = converted["token_embd.weight"] / np.float32(SCALE)
        return converted

    def add(writer: gguf.GGUFWriter, base: float) -> None:
        freq_base(writer, base)
        writer.add_float32("qwen3.embedding_scale", SCALE)

    monkeypatch.setattr(models, "_tensors", tensors)
    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_freq_base", add)
    data = write_gguf(CASE, path).read_bytes()
    path.write_bytes(data.replace(b"qwen3", b"acorn"))  # a name of the same length, so that no offset changes
    return path


def run(tree: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", SCRIPT, str(path), str(tree / "logits.npz")]
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)


def errors(tree: Path) -> list[float]:
    """The errors of the logits, in standard deviations.  The output matrix is the embedding, so they are smaller as well."""
    logits = list(np.load(tree / "logits.npz").values())
    return [_error(logits[row["prompt"]][row["position"]] * SCALE, row) for row in _golden(CASE)["rows"]]


@pytest.mark.thorough
def test_the_steps_of_the_chapter_suffice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, path = changed(tmp_path / "tree"), acorn(tmp_path / "acorn.gguf", monkeypatch)
    done = run(tree, path)
    assert done.returncode == 0, done.stderr
    assert len(prompts(CASE)) == 3 and max(errors(tree)) <= BOUND


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted({name for name, _, _ in changes()}))
def test_no_step_of_the_chapter_is_superfluous(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, path = changed(tmp_path / "tree", left_out=name), acorn(tmp_path / "acorn.gguf", monkeypatch)
    done = run(tree, path)
    assert done.returncode != 0 or max(errors(tree)) > 100 * BOUND


@pytest.mark.thorough
@pytest.mark.parametrize(
    "part",
    ["neox=False", ', norm="heads"', 'embedding_scale=m.number("embedding_scale", 1.0),'],
    ids=("rope", "norm", "scale"),
)
def test_no_option_of_the_new_file_is_superfluous(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, path = changed(tmp_path / "tree", part=part), acorn(tmp_path / "acorn.gguf", monkeypatch)
    done = run(tree, path)
    assert done.returncode != 0 or max(errors(tree)) > 100 * BOUND


def test_the_new_file_and_two_words_are_all() -> None:
    files = [(name, bool(old), new.count("\n") - old.count("\n")) for name, old, new in changes()]
    assert files[1:] == [("engine/models/registry.py", True, 1)] * 2
    name, exists, lines = files[0]
    assert name == "engine/models/families/acorn.py" and not exists and lines < 30
