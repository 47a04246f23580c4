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
from tests.cpu.blocks import reference

ALL = pytest.mark.parametrize("entry", FORMATS.values(), ids=lambda f: f.name)


def random_blocks(entry: Format, n: int, seed: int = 0) -> np.ndarray:
    """Random bytes are valid blocks of every format; scales may be NaN or infinite."""
    return np.random.default_rng(seed).integers(0, 256, n * entry.block_bytes, dtype=np.uint8)


def test_the_promised_formats_are_there() -> None:
    """All that files store weights in; versions of the gguf package up to 0.19 do not know Q2_0."""
    names = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 NVFP4 TQ1_0 TQ2_0 Q1_0 "
    names += "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S"
    assert {f.name for f in FORMATS.values()} - {"Q2_0"} == set(names.split())


@ALL
def test_layout_is_that_of_gguf(entry: Format) -> None:
    assert (entry.block, entry.block_bytes) == gguf.GGML_QUANT_SIZES[entry.type]


@ALL
def test_dequantization_is_that_of_gguf_byte_for_byte(entry: Format) -> None:
    data = random_blocks(entry, 512)
    expected = reference(entry, data.reshape(512, -1)).reshape(-1)
    actual = dequantize(entry.type, data)
    same = actual.view(np.uint32) == expected.view(np.uint32)
    # Random scales include NaN, whose payload differs between machines.
    assert np.all(same | (np.isnan(actual) & np.isnan(expected)))


def test_every_scale_of_nvfp4() -> None:
    """256 codes: 0 and 127 are zero, 1 to 7 subnormal, and the highest bit does not count."""
    blocks = random_blocks(FORMATS[T.NVFP4], 64).reshape(64, -1)
    blocks[:, :4] = np.arange(256, dtype=np.uint8).reshape(64, 4)
    expected = gguf.quants.dequantize(blocks, T.NVFP4).astype(np.float32)
    assert dequantize(T.NVFP4, blocks.reshape(-1)).tobytes() == expected.tobytes()


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
    with pytest.raises(ModelError, match=r"F64.*blk\.0\.ffn_up\.weight"):
        format_of(T.F64, "blk.0.ffn_up.weight")
