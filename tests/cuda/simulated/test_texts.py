"""Texts that become vectors on a simulated GPU: the bits of the CPU, for several texts in a pass and for one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.synthetic.model import make_model
from tests.cuda.simulated.device import use_simulated
from tests.cuda.simulated.test_parity import SHAPES
from tests.families import quantized, rewritten
from tests.oracle.encoders import EncoderCase
from tests.oracle.gemma_embedding import write_gguf
from tests.oracle.models import Case

# Together, more rows than narrow kernels take, which are padded; the last one alone, too, which one encoder and the decoder
# read.
TEXTS = [[3, 7, 11], [5], [1, 2] * 9]


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)


def check(path: Path, alone: int = len(TEXTS), **options: Any) -> None:
    """Compare the vectors of the texts, together, and of the first ones alone."""
    given: dict[str, Any] = {"n_ctx": 32, "n_threads": 1, **options}
    cpu, gpu = (engine.load(path, device=device, **given) for device in ("cpu", "cuda"))
    vectors = cpu.embed(TEXTS)
    assert np.isfinite(vectors).all()
    assert gpu.embed(TEXTS).tobytes() == vectors.tobytes()
    for text, vector in zip(TEXTS[:alone], vectors, strict=False):
        assert gpu.embed([text]).tobytes() == vector.tobytes()


@pytest.mark.thorough
def test_an_encoder(tmp_path: Path) -> None:
    path = EncoderCase("small", 1, 64, 2, 32).write_gguf(tmp_path / "a.gguf")
    check(path, cache_type="f32")


@pytest.mark.thorough
def test_a_quantized_encoder(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        kept = {name: tensors.pop(name) for name in ("position_embd.weight", "token_types.weight")}
        return quantized(tensors, "Q8_0") | kept

    path = EncoderCase("small", 1, 64, 2, 64).write_gguf(tmp_path / "a.gguf")
    check(rewritten(path, tmp_path / "b.gguf", change), alone=2)


@pytest.mark.thorough
def test_a_reranker(tmp_path: Path) -> None:
    """Short texts: a wide pass does not differ from that of ``test_an_encoder``."""
    path = EncoderCase("small", 1, 64, 2, 32, n_types=1, labels=1, padding=1).write_gguf(tmp_path / "a.gguf")
    cpu, gpu = (engine.load(path, device=device, n_ctx=32, n_threads=1, cache_type="f16") for device in ("cpu", "cuda"))
    scores = cpu.scores(cpu.pooled(TEXTS[:2]))
    assert gpu.scores(gpu.pooled(TEXTS[:2])).tobytes() == scores.tobytes()
    for text, score in zip(TEXTS[:2], scores, strict=True):
        assert gpu.scores(gpu.pooled([text]))[0] == score


@pytest.mark.thorough
def test_an_encoder_with_windows(tmp_path: Path) -> None:
    case = Case("small", "gemma3", 2, 64, 2, 1, 32, 64, 1e4, window=6, pattern=2)
    path = write_gguf(tmp_path / "a.gguf", case=case)
    check(rewritten(path, tmp_path / "b.gguf", lambda tensors: quantized(tensors, "Q8_0")), alone=2)


@pytest.mark.thorough
def test_a_decoder_with_windows(tmp_path: Path) -> None:
    check(make_model(tmp_path / "a.gguf", SHAPES["gemma3"], "Q4_0"), pooling="mean")
