"""Texts that become vectors on a GPU: the bits of the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED
from tests.conftest import REPOSITORY
from tests.families import Tensors, quantized, rewritten
from tests.oracle.encoders import EncoderCase
from tests.oracle.gemma_embedding import write_gguf
from tests.oracle.models import Case

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if SIMULATED:
    pytest.skip("needs a real GPU", allow_module_level=True)

import engine
from engine.devices import open_device
from engine.errors import DeviceError

pytestmark = pytest.mark.gpu


def encoder(kind: str, nomic: bool = False) -> Callable[[Path], Path]:
    """Writes an encoder whose matrices have a format."""

    def change(tensors: Tensors) -> Tensors:
        kept = {name: tensors.pop(name) for name in ("position_embd.weight", "token_types.weight") if name in tensors}
        return (quantized(tensors, kind) if kind != "F32" else tensors) | kept

    def write(folder: Path) -> Path:
        path = EncoderCase("of a usual width", 3, 384, 12, 1536, nomic=nomic).write_gguf(folder / "a.gguf")
        return rewritten(path, folder / "b.gguf", change)

    return write


def gemma(kind: str) -> Callable[[Path], Path]:
    """Writes an EmbeddingGemma whose matrices have a format, and whose rows see 20 tokens on each side or the whole text."""

    def write(folder: Path) -> Path:
        case = Case("of a usual width", "gemma3", 4, 384, 3, 1, 256, 512, 1e6, window=40, pattern=3)
        path = write_gguf(folder / "a.gguf", case=case)
        return path if kind == "F32" else rewritten(path, folder / "b.gguf", lambda tensors: quantized(tensors, kind))

    return write


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (encoder("F32"), {"cache_type": "f32"}),
        (encoder("Q8_0"), {}),
        (encoder("Q8_0"), {"cache_type": "i8"}),
        (encoder("Q8_0", nomic=True), {}),
        (gemma("F32"), {"cache_type": "f32"}),
        (gemma("Q8_0"), {"cache_type": "f16"}),
        (gemma("Q8_0"), {"cache_type": "q8_0"}),
        (gemma("Q8_0"), {"cache_type": "i8"}),
        (lambda folder: REPOSITORY / "engine" / "data" / "pycoder-dense-Q4_K_M.gguf", {"pooling": "mean"}),
    ],
    ids=[
        *("bert-F32", "bert-Q8_0", "bert-Q8_0-i8", "nomic-bert-Q8_0"),
        *("gemma-F32", "gemma-Q8_0", "gemma-Q8_0-q8_0", "gemma-Q8_0-i8"),
        "qwen3",
    ],
)
def test_vectors(write: Callable[[Path], Path], options: dict[str, Any], tmp_path: Path) -> None:
    """Of texts of every length together, and of some of them alone."""
    _ = engine.load  # chooses the folder of compiled kernels
    try:
        open_device("cuda")
    except DeviceError as error:
        pytest.skip(str(error))
    path, rng = write(tmp_path), np.random.default_rng(0)
    texts = [rng.integers(0, 289, n).tolist() for n in (1, 2, 15, 16, 17, 63, 64, 65, 200, 511, 512, *range(3, 40))]
    cpu, gpu = (engine.load(path, device=device, n_ctx=512, **options) for device in ("cpu", "cuda"))
    vectors = cpu.embed(texts)
    assert np.isfinite(vectors).all()
    assert gpu.embed(texts).tobytes() == vectors.tobytes()
    for text, vector in zip(texts[:11], vectors, strict=False):
        assert gpu.embed([text]).tobytes() == vector.tobytes()
