"""The fingerprint of a model: it differs if any byte of the file or anything else does that an answer depends on."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import engine
from engine import fingerprint
from engine.gguf.digest import model_digest
from engine.gguf.file import read_gguf
from engine.hub.resolve import resolve
from engine.receipts.form import chain_of, fingerprint_of


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundled model, and an empty cache."""
    monkeypatch.setattr(fingerprint, "cache_dir", lambda: tmp_path / "cache")
    return Path(shutil.copy(resolve("pycoder-draft"), tmp_path / "model.gguf"))


def changed(path: Path, at: int) -> None:
    """Change one bit of a file, and leave its size and its time of modification as they were."""
    times = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_it_depends_on_what_answers_depend_on(model: Path) -> None:
    found = {}
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "same": {"n_ctx": 512, "n_threads": 1, "batch_size": 32, "parallel": 2},
        "keys": {"cache_type_k": "q8_0"},
        "budget": {"kv_budget": 256},
    }
    for name, options in cases.items():
        with engine.load(model, device="cpu", **{"n_ctx": 256} | options) as llm:
            found[name] = llm.fingerprint
            assert llm.fingerprint == fingerprint_of(llm.identity(remembered=False))
    assert found["same"] == found["plain"]
    assert len(set(found.values())) == 3


def test_every_bit_of_the_weights_counts(model: Path) -> None:
    gguf = read_gguf(model)
    tensor = max(gguf.tensors.values(), key=lambda tensor: tensor.nbytes)
    before, at = fingerprint.weights_digest(gguf), tensor.offset + tensor.nbytes - 1
    del gguf, tensor
    changed(model, at)
    assert fingerprint.weights_digest(read_gguf(model)) != before


def test_the_digest_is_remembered_but_need_not_be_trusted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = read_gguf(model)
    expected = model_digest(gguf)
    assert fingerprint.weights_digest(gguf) == expected
    (memo,) = (tmp_path / "cache" / "digests").iterdir()
    memo.write_text("0" * 64)
    assert fingerprint.weights_digest(gguf) == "0" * 64
    assert fingerprint.weights_digest(gguf, remembered=False) == expected
    assert memo.read_text() == expected
    monkeypatch.setattr(fingerprint, "model_digest", lambda *given, **options: "1" * 64)
    assert fingerprint.weights_digest(read_gguf(model)) == expected


def test_no_digest_is_remembered_where_others_can_write(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "digests"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    expected = model_digest(read_gguf(model))
    assert fingerprint.weights_digest(read_gguf(model)) == expected
    assert not list(folder.iterdir())


def test_a_replay_does_not_trust_what_is_remembered(model: Path, tmp_path: Path) -> None:
    with engine.load(model, n_ctx=64, device="cpu") as llm:
        receipt = llm.complete([5, 6], max_tokens=2, seed=1, receipt=True).receipt()
    (memo,) = (tmp_path / "cache" / "digests").iterdir()
    claimed = receipt["model"] | {"weights": "0" * 64}
    receipt = receipt | {"model": claimed, "fingerprint": fingerprint_of(claimed)}
    receipt["chain"] = chain_of(receipt)
    memo.write_text("0" * 64)
    with engine.load(model, n_ctx=64, device="cpu") as llm:
        assert llm.fingerprint == receipt["fingerprint"]
        assert "weights" in llm.verify(receipt).problem
