"""``check_tensors``: block scales that are not finite or absurdly large, with ``gguf.quants`` as the oracle of layouts."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T

import engine.gguf.file as loader
from engine.gguf.file import read_gguf
from tests import ggufs
from tests.ggufs import Spec, refused


def random_blocks(type_: T, n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``n`` blocks of random bytes whose scale fields hold small numbers; the fields by the format's layout."""
    blocks = np.random.default_rng(3).integers(0, 256, (n, GGML_QUANT_SIZES[type_][1]), dtype=np.uint8)
    for scale in loader.SCALES[type_]:
        if type_ == T.IQ1_M:
            blocks[:, 49::2] = blocks[:, 49::2] & 0x0F | [0x60, 0x60, 0x10, 0x30]  # 0x3166, in four high nibbles
        elif type_ == T.MXFP4:
            blocks[:, 0] = 120
        else:
            width = np.dtype(scale.dtype).itemsize
            blocks[:, scale.offset + width - 1] = 0x30  # the byte of sign and exponent: about 0.1
    return blocks


def with_scale(type_: T, scale: Any, bits: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Five blocks with ``bits`` in field ``scale`` of block 3."""
    blocks = random_blocks(type_, 5)
    if type_ == T.IQ1_M:
        nibbles = np.array([bits >> 4 * i & 0xF for i in range(4)], np.uint8)
        blocks[3, 49:56:2] = blocks[3, 49:56:2] & 0x0F | nibbles << 4
    else:
        width = np.dtype(scale.dtype).itemsize
        blocks[3, scale.offset : scale.offset + width] = list(bits.to_bytes(width, "little"))
    return blocks


SCALED = [(type_, scale) for type_, scales in loader.SCALES.items() for scale in scales]
DEQUANTIZED = {type_ for type_ in loader.SCALES if type_ not in {T.F64, T.Q1_0}}  # formats gguf.quants knows


def test_every_format_with_floats_has_its_scales_checked() -> None:
    integers = {T.I8, T.I16, T.I32, T.I64}
    assert set(loader.SCALES) == set(ggufs.STORED) - integers - {T.NVFP4}  # NVFP4 scales: every byte is finite


@pytest.mark.parametrize("type_", loader.SCALES, ids=lambda t: t.name)
def test_scale_fields_are_all_floats_of_a_block(type_: T, tmp_path: Path) -> None:
    """With small scales a block of random bytes is finite, by the reference's dequantization."""
    blocks = random_blocks(type_, 64)
    if type_ in DEQUANTIZED:
        assert np.isfinite(gguf.quants.dequantize(blocks.reshape(1, -1), type_)).all()
    data = ggufs.build((), [Spec("t", (64 * GGML_QUANT_SIZES[type_][0],), type_, blocks.tobytes())])
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    read_gguf(path, check_tensors=True)


@pytest.mark.parametrize(("type_", "scale"), SCALED, ids=lambda x: getattr(x, "name", None))
@pytest.mark.parametrize("excess", ["inf", "nan", "large"])
def test_bad_scales_are_found(type_: T, scale: Any, excess: str, tmp_path: Path) -> None:
    bits = {
        "inf": scale.inf,
        "nan": min(scale.inf | 1, 255 if scale.dtype == "u1" else 2**64),
        "large": scale.limit + 1,
    }
    blocks = with_scale(type_, scale, bits[excess])
    if type_ in DEQUANTIZED:
        with np.errstate(all="ignore"):
            row = gguf.quants.dequantize(blocks[3:4], type_)
        if excess == "large" and scale.limit + 1 < scale.inf:
            assert np.isfinite(row).all()
        elif type_ != T.MXFP4:  # whose 0xff the reference reads as 2^127
            assert not np.isfinite(row).all()
    data = ggufs.build((), [Spec("t", (5 * GGML_QUANT_SIZES[type_][0],), type_, blocks.tobytes())])
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    start = read_gguf(path).tensors["t"].offset
    error = refused(data, tmp_path, check_tensors=True)
    assert error.field == f"tensor 't' block 3 {scale.name}"
    assert error.offset == start + 3 * GGML_QUANT_SIZES[type_][1] + scale.offset
    large = excess == "large" and scale.limit + 1 < scale.inf
    assert ("larger than 16384" if large else "not a finite number") in error.problem


@pytest.mark.parametrize(("type_", "scale"), SCALED, ids=lambda x: getattr(x, "name", None))
def test_largest_scale_is_accepted(type_: T, scale: Any, tmp_path: Path) -> None:
    negative = 0 if scale.dtype == "u1" else 1 << 8 * np.dtype(scale.dtype).itemsize - 1
    for bits in (scale.limit, scale.limit | negative):
        data = with_scale(type_, scale, bits).tobytes()
        path = tmp_path / "model.gguf"
        path.write_bytes(ggufs.build((), [Spec("t", (5 * GGML_QUANT_SIZES[type_][0],), type_, data)]))
        read_gguf(path, check_tensors=True)


def test_scales_are_checked_past_the_first_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_CHUNK", 4)
    values = np.ones(11, np.float32)
    values[9] = np.nan
    error = refused(ggufs.build((), [Spec("t", (11,), data=values.tobytes())]), tmp_path, check_tensors=True)
    assert error.field == "tensor 't' block 9 value"
