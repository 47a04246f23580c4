"""The table of formats against ``gguf.quants``, and the proof that int32 is wide enough."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from engine.cpu.embed import dequantize
from engine.errors import ModelError
from engine.gguf.file import read_gguf
from engine.gguf.quants import ACTIVATION_MAX, FORMATS, Format, format_of
from tests.conftest import REPOSITORY

ALL = pytest.mark.parametrize("entry", FORMATS.values(), ids=lambda f: f.name)


def random_blocks(entry: Format, n: int, seed: int = 0) -> np.ndarray:
    """Random bytes are valid blocks of every format; scales may be NaN or infinite."""
    return np.random.default_rng(seed).integers(0, 256, n * entry.block_bytes, dtype=np.uint8)


def test_the_promised_formats_are_there() -> None:
    names = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ2_XXS IQ4_NL IQ4_XS MXFP4"
    assert {f.name for f in FORMATS.values()} == set(names.split())


@ALL
def test_layout_is_that_of_gguf(entry: Format) -> None:
    assert (entry.block, entry.block_bytes) == gguf.GGML_QUANT_SIZES[entry.type]


@ALL
def test_dequantization_is_that_of_gguf_byte_for_byte(entry: Format) -> None:
    data = random_blocks(entry, 512)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data.reshape(512, -1), entry.type).astype(np.float32).reshape(-1)
    actual = dequantize(entry.type, data)
    same = actual.view(np.uint32) == expected.view(np.uint32)
    # Random scales include NaN, whose payload differs between machines.
    assert np.all(same | (np.isnan(actual) & np.isnan(expected)))


def test_dequantization_of_the_bundled_model() -> None:
    for tensor in read_gguf(REPOSITORY / "engine/data/pycoder-draft-Q4_K_M.gguf").tensors.values():
        expected = gguf.quants.dequantize(tensor.data, tensor.type).astype(np.float32)
        assert dequantize(tensor.type, tensor.data).tobytes() == expected.tobytes(), tensor.name


@ALL
def test_int32_is_wide_enough(entry: Format) -> None:
    assert entry.dot_bound < 2**31
    assert entry.min_bound < 2**31
    # vpmaddwd adds two products in 32 bits, and the 16 sums of activations are kept in 16 bits.
    assert 2 * entry.weight_max * ACTIVATION_MAX < 2**31
    assert entry.weight_max < 2**15
    assert 16 * ACTIVATION_MAX < 2**15


def test_an_unknown_format_is_named_with_its_tensors() -> None:
    with pytest.raises(ModelError, match=r"IQ1_S.*blk\.0\.ffn_up\.weight"):
        format_of(T.IQ1_S, "blk.0.ffn_up.weight")
