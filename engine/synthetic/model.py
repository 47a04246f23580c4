"""Random models of real shapes: every tensor of the architecture in the requested format, without training.

Speed does not depend on the values of the weights, so a benchmark needs only their shapes and formats; tests need small
models with awkward ones.  ``bitmirror synthetic --shape qwen3-8b:Q4_K_M`` writes such a GGUF file at the speed
of the disk: every matrix is cut from a buffer of random blocks, so memory use stays at a few buffers whatever the size
of the file, and the same seed gives the same bytes.

A weight of a matrix with n columns has the variance 1/n, so that an input of unit variance gives an output of about
unit variance: activations stay near 1 through all layers and logits have a standard deviation near 3, as trained
models have.
"""

import math
import os
import shutil
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

from engine.errors import UsageError
from engine.gguf.quants import FORMATS
from engine.models.delta_net_config import DeltaNetConfig
from engine.synthetic.shape import D2T, N_VOCAB_TINY, Gemma4Shape, Shape
from engine.synthetic.shapes import parse_shape, quants, shapes, tensor_type

# --- blocks: random bits with a scale that gives the requested variance ----------------------------------------


@dataclass(frozen=True)
class _Scales:
    """The offsets in a block of its float16 scale ``d`` and of ``dm``, the factor of its minimums, if it has one; ``rms`` is
    the root mean square of the weights when all other bits are random, d = 1 and dm = ``ratio``, the value that
    centres them on zero."""

    d: int
    rms: float
    dm: int | None = None
    ratio: float = 0.0


_BLOCKS = {
    T.Q4_0: _Scales(0, 4.6368),
    T.Q4_1: _Scales(0, 4.6098, 2, -7.5),
    T.Q5_0: _Scales(0, 9.2466),
    T.Q5_1: _Scales(0, 9.2331, 2, -15.5),
    T.Q8_0: _Scales(0, 73.902),
    T.Q2_K: _Scales(80, 13.874, 82, 1.5),
    T.Q3_K: _Scales(108, 43.339),
    T.Q4_K: _Scales(0, 258.32, 2, 7.5),
    T.Q5_K: _Scales(0, 526.93, 2, 15.5),
    T.Q6_K: _Scales(208, 1365.7),
    T.IQ2_XXS: _Scales(0, 53.362),
    T.IQ4_NL: _Scales(0, 67.439),
    T.IQ4_XS: _Scales(0, 1246.3),
    T.IQ2_XS: _Scales(0, 55.900),
    T.IQ2_S: _Scales(0, 56.393),
    T.IQ3_XXS: _Scales(0, 142.37),
    T.IQ3_S: _Scales(0, 140.20),
    T.IQ1_S: _Scales(0, 7.2014),
    T.IQ1_M: _Scales(48, 7.1990),
    T.TQ2_0: _Scales(64, 1.2247),
    T.TQ1_0: _Scales(52, 0.81726),
    T.Q1_0: _Scales(0, 1.0),
}

if "Q2_0" in T.__members__:
    _BLOCKS[T["Q2_0"]] = _Scales(0, 1.2247)

_BEFORE_LOGITS = ("output_norm.weight", "token_embd_norm.weight", "shared_head_norm.weight")
"""How the names of norms before logits end."""

_VECTORS = (".ssm_a", ".ssm_d", ".ssm_norm.weight")
"""How the names of vectors end that have two dimensions in some files."""

_INTEGERS = {T.I32: 4, T.I64: 8}
"""Bytes of the elements of tables."""

_FP4_RMS = 5.8524 / 2
"""Root mean square of the sixteen e2m1 values."""

_SPREAD = math.sqrt((1.5**3 - 0.5**3) / 3)
"""Root mean square of the factors by which the scales of blocks differ."""

_BUFFER = 4 << 20
"""Smallest size of a buffer of random blocks, in bytes."""


def _random(seed: int, label: str) -> np.random.PCG64:
    """The source of random bits for ``label``: a raw bit stream, which NumPy keeps the same in all its versions."""
    return np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(label.encode())]))


def _uniform(bits: np.random.PCG64, n: int) -> np.ndarray:
    """float32 [n], uniform with mean 0 and variance 1."""
    raw = bits.random_raw((n + 1) // 2).view(np.int32)[:n]
    return raw.astype(np.float32) * np.float32(math.sqrt(3) / 2**31)


def random_blocks(kind: T, n: int, std: float, bits: np.random.PCG64) -> np.ndarray:
    """uint8 [n, block bytes]: blocks of format ``kind`` whose weights have mean 0 and standard deviation ``std``.

    The scales of blocks differ, by a factor between 0.5 and 1.5, so that a scale applied to the wrong block shows.
    """
    size = FORMATS[kind].block_bytes
    if not FORMATS[kind].quantized:
        values = _uniform(bits, n) * np.float32(std)
        if kind == T.BF16:
            return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(n, size)
        return values.astype("<f2" if kind == T.F16 else "<f4").view(np.uint8).reshape(n, size)
    out = bits.random_raw((n * size + 7) // 8).view(np.uint8)[: n * size].reshape(n, size)
    vary = bits.random_raw((n + 3) // 4).view(np.uint16)[:n]
    if kind == T.MXFP4:  # a scale is a power of two: mix two neighbours so that the mean square is right
        wanted = std / _FP4_RMS
        exponent = math.floor(math.log2(wanted))
        share = ((wanted / 2.0**exponent) ** 2 - 1) / 3
        out[:, 0] = 127 + exponent + (vary < share * 65536)
        return out
    if kind == T.NVFP4:
        factors = bits.random_raw(n).view(np.uint16) / 65536 + 0.5
        out[:, :4] = _codes(std / _FP4_RMS / _SPREAD * factors, bits).reshape(n, 4)
        return out
    at = _BLOCKS[kind]
    d = (vary.astype(np.float32) / 65536 + np.float32(0.5)) * np.float32(std / at.rms / _SPREAD)
    if at.dm is None:
        # The integers of these formats are asymmetric (-8 .. 7); signs, which real files also have, compensate that.  A
        # common mean would multiply the all-ones direction by its sqrt(columns) in every layer and drown the rest.
        d = np.where(vary & 1, d, -d)
    if kind == T.IQ1_M:  # the high nibbles of four words
        nibbles = d.astype("<f2").view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) << 4 & 0xF0
        out[:, at.d + 1 :: 2] = out[:, at.d + 1 :: 2] & 15 | nibbles.astype(np.uint8)
        return out
    out[:, at.d : at.d + 2] = d.astype("<f2").view(np.uint8).reshape(n, 2)
    if at.dm is not None:
        out[:, at.dm : at.dm + 2] = (d * np.float32(at.ratio)).astype("<f2").view(np.uint8).reshape(n, 2)
    return out


def _codes(scales: np.ndarray, bits: np.random.PCG64) -> np.ndarray:
    """uint8 [n]: scales of NVFP4, float [n], each one of its two neighbours, so that the mean square is right."""
    code = np.arange(127)
    values = np.where(code < 8, code * 2.0**-9, (8 + code % 8) * 2.0 ** (code // 8 - 10.0))
    above = np.searchsorted(values, scales, side="right").clip(1, 126)
    low, high = values[above - 1] ** 2, values[above] ** 2
    share = (scales**2 - low) / (high - low)
    n = scales.size
    return (above - 1 + (bits.random_raw((n + 3) // 4).view(np.uint16)[:n] < share * 65536)).astype(np.uint8)


def _prime_above(n: int) -> int:
    n |= 1
    while any(n % k == 0 for k in range(3, math.isqrt(n) + 1, 2)):
        n += 2
    return n


def _is_vector(name: str, size: tuple[int, ...]) -> bool:
    return len(size) == 1 or name.endswith(_VECTORS)


def _vector(name: str, shape: Shape, n: int, seed: int) -> np.ndarray:
    """float32 [n]: a norm, a bias, a scale, the decay of a delta net, or the RoPE factors of gemma4 or of Llama 3 (its model
    card's formula)."""
    bits = _random(seed, name)
    if shape.gemma4 and name == "rope_freqs.weight":
        return proportional_rope(n)
    if name == "rope_freqs.weight":
        low, high = 1.0, 4.0
        turns = shape.rope_n_ctx * shape.rope_base ** (-2.0 * np.arange(n) / shape.head_dim) / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1.0 / ((1.0 - smooth) / shape.rope_factor + smooth)).astype(np.float32)
    if name.endswith(".ssm_a"):
        return -_between(bits, n, 0.1, 8.0)
    if name.endswith(".ssm_dt.bias"):
        # A state decays by exp(a * softplus(x + dt)): by 0.5 % to 5 % per token with x = 0, and since x has a variance of
        # about 1, rarely by more than a half.
        step = _between(bits, n, 0.005, 0.05) / -_vector(name.replace("ssm_dt.bias", "ssm_a"), shape, n, seed)
        return np.log(np.expm1(step)).astype(np.float32)
    if name.endswith(".bias"):
        return _uniform(bits, n) * np.float32(0.1)
    if name.endswith(".ffn_gate_inp_shexp.weight"):  # a matrix of one row
        return _uniform(bits, n) * np.float32(n**-0.5)
    if name.endswith("exps.scale"):
        return _between(bits, n, 0.5, 2.0)
    centre = 3.0 if name.endswith(_BEFORE_LOGITS) else 1.0  # before logits
    if shape.is_unscaled and name.endswith("attn_q_norm.weight"):
        centre = n**-0.5  # scores have no other scale
    elif name.endswith("ffn_gate_inp.scale"):
        centre = n**0.5  # of a router's input, whose elements have the variance 1 / n
    elif name.endswith("altup_router_norm.weight"):
        centre = n  # of the same, which is divided by n
    return np.float32(centre) * (1 + _uniform(bits, n) * np.float32(0.1))


def _table(bits: np.random.PCG64, n: int, n_used: int, n_expert: int) -> np.ndarray:
    """int32 [n, n_used]: different experts for each of n tokens."""
    first = (bits.random_raw(n) % n_expert).astype("<i4")
    return (first[:, None] + np.arange(n_used, dtype="<i4")) % np.int32(n_expert)


def proportional_rope(n: int) -> np.ndarray:
    """float32 [n]: the divisors of the frequencies of gemma4's global heads of 2 n elements, such that only the first quarter
    of the pairs is rotated."""
    return np.where(np.arange(n) < n // 4, 1, 1e30).astype(np.float32)


def _between(bits: np.random.PCG64, n: int, low: float, high: float) -> np.ndarray:
    """float32 [n] from low to high, with uniform logarithms."""
    share = bits.random_raw(n) / 2.0**64
    return (low * (high / low) ** share).astype(np.float32)


# --- the file --------------------------------------------------------------------------------------------------

_MERGES = (
    *("Ġ t", "Ġ a", "h e", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "e n", "o r", "Ġ c", "e s", "Ġ w"),
    *("i s", "i t", "a n", "n d", "a l", "o u", "Ġ f", "Ġ p", "in g", "Ġ b", "e d", "Ġ o", "Ġa nd", "l e", "Ġ d"),
)

_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def vocabulary(n: int = N_VOCAB_TINY) -> tuple[list[str], list[int], list[str]]:
    """n tokens, their types, and merges, of a byte-level BPE that can write any text: 256 bytes in GPT-2's alphabet,
    some merges, three specials, and the rest unused."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    normal = [alphabet[b] for b in range(256)] + [pair.replace(" ", "") for pair in _MERGES]
    unused = [f"[PAD{i}]" for i in range(len(normal) + len(_SPECIALS), n)]
    kind = gguf.TokenType
    types = [kind.NORMAL] * len(normal) + [kind.CONTROL] * len(_SPECIALS) + [kind.UNUSED] * len(unused)
    return normal + _SPECIALS + unused, [int(t) for t in types], list(_MERGES)


def _add_metadata(writer: gguf.GGUFWriter, name: str, shape: Shape, quant: str) -> None:
    writer.add_type("model")
    writer.add_name(f"Random {name} {quant}")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    file_type = getattr(gguf.LlamaFileType, "ALL_F32" if quant == "F32" else f"MOSTLY_{quant}", None)
    if file_type is not None:
        writer.add_file_type(file_type)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_block)
    add_widths(writer, shape.gemma4, shape.n_layer, shape.head_counts_kv, shape.widths)
    writer.add_head_count(shape.head_counts)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.value_dim)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.n_rot or shape.head_dim)
    writer.add_vocab_size(shape.n_vocab)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.architecture == "gemma4":
        writer.add_final_logit_softcapping(30.0)
    if shape.experts:
        writer.add_expert_count(shape.experts.n_expert)
        writer.add_expert_used_count(shape.experts.n_used)
        writer.add_expert_feed_forward_length(shape.experts.n_ff)
        if shape.experts.n_ff_shared:
            writer.add_expert_shared_feed_forward_length(shape.experts.n_ff_shared)
    if shape.delta_net:
        add_delta_net(writer, shape.delta_net, shape.recurrent, shape.n_rot or shape.head_dim)
        writer.add_full_attention_interval(shape.interval)
        writer.add_nextn_predict_layers(shape.n_mtp)
    for key, value in shape.metadata().items():
        kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kind.get(type(value), writer.add_array)(f"{shape.architecture}.{key}", value)
    tokens, types, merges = vocabulary(shape.n_vocab)
    writer.add_tokenizer_model("gpt2")
    pre = "qwen35" if shape.delta_net else "qwen2" if shape.architecture.startswith("qwen") else "gpt-2"
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    if shape.mask_token is not None:
        writer.add_mask_token_id(shape.mask_token)
    writer.add_chat_template(_CHAT_TEMPLATE)


def add_widths(
    writer: gguf.GGUFWriter,
    gemma: Gemma4Shape | None,
    n_layer: int,
    n_head_kv: int | list[int],
    n_ff: int | list[int],
) -> None:
    """Add heads of keys and widths of feed-forward networks, which in gemma4 and its assistants differ between layers."""
    if gemma:
        assert isinstance(n_head_kv, int) and isinstance(n_ff, int)
        add_gemma4(writer, gemma, n_layer, n_head_kv, n_ff)
        return
    writer.add_head_count_kv(n_head_kv)
    if n_ff:
        writer.add_feed_forward_length(n_ff)


def add_gemma4(writer: gguf.GGUFWriter, gemma: Gemma4Shape, n_layer: int, n_head_kv: int, n_ff: int) -> None:
    """Add the metadata of gemma4 or an assistant that other models lack or write differently; arrays where layers differ."""
    sliding, widths = gemma.sliding(n_layer), gemma.widths(n_layer, n_ff)
    heads = [gemma.n_head_kv_sliding if slides else n_head_kv for slides in sliding]
    writer.add_head_count_kv(heads if len(set(heads)) > 1 else n_head_kv)
    writer.add_feed_forward_length(widths if len(set(widths)) > 1 else n_ff)
    writer.add_key_length_swa(gemma.head_dim_sliding)
    writer.add_value_length_swa(gemma.head_dim_sliding)
    writer.add_rope_dimension_count_swa(gemma.head_dim_sliding)
    writer.add_rope_freq_base_swa(10000.0)
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(gemma.n_shared)
    writer.add_embedding_length_per_layer_input(gemma.n_per_layer)
    if gemma.n_embd_out:
        writer.add_embedding_length_out(gemma.n_embd_out)
        writer.add_nextn_predict_layers(n_layer)


def add_delta_net(writer: gguf.GGUFWriter, net: DeltaNetConfig, recurrent: Sequence[bool], n_rot: int) -> None:
    """Add the metadata of a hybrid in addition to that of its attention."""
    writer.add_ssm_conv_kernel(net.n_conv)
    writer.add_ssm_state_size(net.state_size)
    writer.add_ssm_group_count(net.n_k)
    writer.add_ssm_time_step_rank(net.n_v)
    writer.add_ssm_inner_size(net.n_v * net.state_size)
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", list(recurrent))
    # The stream of positions (time, height, width, none) that rotates each pair: they alternate, and are equal in text.
    pairs = n_rot // 2
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])


def make_model(path: str | Path, shape: str | Shape, quant: str = "Q4_K_M", seed: int = 0) -> Path:
    """Write a random model of a named shape (or of a Shape) to ``path`` and return it; the same seed gives the same bytes.

    The file appears when it is complete; until then a file with the suffix ``.part`` is next to it.
    Raises UsageError if there is no such shape or quantization, if the folder of ``path`` does not exist or its disk has too
    little room, or if ``path`` cannot be written.
    """
    name = shape if isinstance(shape, str) else shape.architecture
    if isinstance(shape, str):
        name, quant = parse_shape(f"{shape}:{quant}")
        shape = shapes()[name]
    elif quant not in quants():
        raise UsageError(f"there is no quantization {quant!r}; use one of {', '.join(quants())}.")
    path = Path(path)
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}; create it, or choose another path.")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file that can be replaced; choose another path.")
    writer = gguf.GGUFWriter(None, shape.architecture)
    _add_metadata(writer, name, shape, quant)
    kinds: dict[str, T] = {}
    rows: dict[tuple[T, int], int] = {}  # most rows of a matrix, or of experts, of a format and width
    for tensor, size in shape.tensors():
        kind = T.F32 if _is_vector(tensor, size) else tensor_type(shape, quant, tensor, size[-1])
        if tensor == D2T:
            kind = T.I64
        kinds[tensor] = kind
        if not _is_vector(tensor, size) and kind != T.I32:
            rows[kind, size[-1]] = max(rows.get((kind, size[-1]), 0), math.prod(size[:-1]))
        row_bytes = FORMATS[kind].row_bytes(size[-1]) if kind in FORMATS else _INTEGERS[kind] * size[-1]
        packed = (*size[:-1], row_bytes)
        writer.add_tensor_info(tensor, packed, np.dtype(np.uint8), math.prod(packed), raw_dtype=kind)
    total = sum(info.nbytes for info in writer.tensors[0].values())
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # other processes may write the same model
    try:
        free = shutil.disk_usage(path.parent).free
        if free < total * 1.01:
            raise UsageError(
                f"the model needs {total / 1e9:.1f} GB and {path.parent} has {free / 1e9:.1f} GB free; "
                "choose a directory with more room."
            )
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        _write_data(part, shape, kinds, rows, seed)
        os.replace(part, path)
    except OSError as error:
        raise UsageError(f"the model cannot be written to {path}: {error.strerror}; choose another path.") from None
    finally:
        with suppress(OSError):
            part.unlink()
    return path


def _write_data(path: Path, shape: Shape, kinds: dict[str, T], rows: dict[tuple[T, int], int], seed: int) -> None:
    buffers: dict[tuple[T, int, int], memoryview] = {}
    with path.open("ab") as file:
        for tensor, size in shape.tensors():
            file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            if tensor == D2T:
                file.write((np.arange(size[0], dtype="<i8") * (shape.n_vocab // size[0])).tobytes())
                continue
            if _is_vector(tensor, size):
                file.write(_vector(tensor, shape, math.prod(size), seed).astype("<f4").tobytes())
                continue
            bits = _random(seed, tensor)
            kind, columns = kinds[tensor], size[-1]
            if kind == T.I32:
                assert shape.experts is not None
                file.write(_table(bits, size[0], size[1], shape.experts.n_expert).tobytes())
                continue
            width = FORMATS[kind].block_bytes
            # A row of this table is one vector for each layer, and each is scaled up by the root of its length.
            per_layer = shape.per_layer if tensor == "per_layer_token_embd.weight" else 0
            if (kind, columns, per_layer) not in buffers:
                # A prime number of blocks, no fewer than rows: every row of a tensor starts at another block.
                n = _prime_above(max(rows[kind, columns], _BUFFER // width, columns))
                source = _random(seed, f"{kind.name} {columns}")
                std = (per_layer or columns) ** -0.5
                buffers[kind, columns, per_layer] = random_blocks(kind, n, std, source).reshape(-1).data
            buffer = buffers[kind, columns, per_layer]
            at = int(bits.random_raw()) % (len(buffer) // width) * width
            left = math.prod(size[:-1]) * FORMATS[kind].row_bytes(columns)
            while left:
                piece = buffer[at : at + left]
                file.write(piece)
                left -= len(piece)
                at = 0
        file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
