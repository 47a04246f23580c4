"""Every kernel is compiled for every target, without a GPU, and its PTX keeps the contract (``engine/cuda/runtime/ptx.py``).

The first tier compiles the first example of every kernel for the target that kernels are tuned for.  ``--all`` also compiles
it for the lowest target that supports it, and more examples for the former: all, or every second one of kernels with many
examples, or every third one of kernels that take long.  ``--gpu``, which runs on more cores, compiles the other
examples, and the first one for all targets."""

import math
import os
import pkgutil
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator does not compile", allow_module_level=True)

import numba
from numba import cuda

import engine.cuda
from engine.cache.types import BLOCK, CACHE_TYPES
from engine.cuda import compressed_attention, digest, exchange, permit, sample
from engine.cuda.attention import attend as attention
from engine.cuda.attention import direct as direct_attention
from engine.cuda.attention import integer_steps, integer_tile, integer_tiled
from engine.cuda.attention import latent as latent_attention
from engine.cuda.attention import tiled as tiled_attention
from engine.cuda.intrinsics import fma, let_next_begin, mma16, mma32, wait_for_inputs
from engine.cuda.products import quantize, wide_experts, wide_matmul
from engine.cuda.products.experts import Finish
from engine.cuda.runtime.compiler import (
    F32P,
    KERNELS,
    SHARED_OF_DRIVER,
    TARGETS,
    U32P,
    Intermediate,
    Kernel,
    compile_ptx,
    entry_name,
    i32,
    intermediate,
)
from engine.cuda.runtime.device import shared_percent
from engine.cuda.runtime.ptx import check, instructions, statements
from engine.ops.experts import Routing
from tests.tiers import few
from tests.tiles import CHOSEN, WIDE, assembled, use_of

pytestmark = [pytest.mark.together("ptx"), pytest.mark.begin(-3)]

NOT_IMPORTED: list[str] = []
"""Modules of ``engine/cuda`` whose import fails; the kernels of the others are checked nevertheless."""

for module in pkgutil.walk_packages(engine.cuda.__path__, "engine.cuda."):
    if not module.name.endswith(".simulator"):
        try:
            import_module(module.name)
        except ImportError as error:
            NOT_IMPORTED.append(f"{module.name}: {error}")

TUNED = (9, 0)
"""The target that every example is compiled for; for other targets only the first example of each kernel is."""

SPILLED_ELSEWHERE = 256
"""Bytes of registers that may be spilled on older targets: the kernels are designed for the registers of newer ones."""

SPILLED_OLDER = {"attend_tiles": 304}
"""Bytes that a kernel may spill on older targets in place of that: it looks up where keys lie before it needs them."""

SPILLED = 16
"""Bytes of registers that may be spilled on any target: whether a kernel fits into its registers depends on the version of
the assembler.  For ``TUNED``, that of CUDA 13.0 spills 8 to 16 bytes in four examples, and that of 13.5 in one of them."""

LOCAL_NEWER = {"matmul_float_wide"}
"""Kernels with a small array that some versions of NVVM (13.3) keep in local memory on newer targets."""

SPILLED_TUNED = {
    ("down", ("Q5_0",)): 36,
    ("down", ("Q5_1",)): 36,
    ("attend_integers", ("i8",)): 572,
    ("attend_integer_chunks", ("i12",)): 40,
}
"""Bytes that kernels may spill on the target that they are tuned for: with enough registers for everything, fewer blocks fit
on a multiprocessor, and ``down`` takes 15 % longer; a lane of ``attend_integers`` keeps 256 dimensions of two pairs, and some
of what it needs between groups of chunks is spilled, as by ``attend_integer_chunks``; the most where scores are bounded."""

_FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"]
_FORMATS += ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ4_XS"]
_LARGE_UNITS = ["IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ2_0", "TQ1_0"]
_FEW_BITS = [*_LARGE_UNITS, "NVFP4", "Q1_0"]

_ROPE = [
    ("f16", "f16", 128, 128, 128, True, True, False, True, False, False),
    ("f16", "f16", 256, 256, 64, True, True, False, True, True, False),
    ("f32", "f32", 64, 64, 64, False, False, False, False, False, False),
    ("f16", "f32", 96, 64, 32, True, False, True, True, False, False),
    ("f32", "f16", 98, 66, 96, True, False, True, True, False, False),
    ("q8_0", "q8_0", 512, 512, 512, True, True, False, True, False, True),
    ("q4_0", "q4_0", 256, 256, 256, True, True, False, True, False, True),
    ("q8_0", "q4_0", 128, 64, 128, False, False, True, True, False, False),
    ("f16", "q8_0", 512, 512, 512, True, True, False, True, False, True),
    ("q8_0", "q4_0", 128, 128, 128, True, True, False, True, False, False, True, True, True),
    ("f16", "f16", 96, 96, 0, False, False, True, True, False, False, True, False, True),
]

_ROPE_CHAINS = [
    ("f16", "f16", 128, 128, 128, True, True, False, False, False, False, 8),
    ("i8", "i8", 128, 128, 128, True, True, False, False, False, False, 4),
    ("i12", "i12", 256, 64, 128, True, True, True, True, True, True, 16),
    ("q8_0", "q4_0", 64, 96, 64, False, False, True, False, False, False, 12),
    ("f32", "f32", 16, 256, 0, False, False, False, False, False, False, 4),
]

_ATTENTION = [
    attention.geometry(1, 32, 8, 128, 128, half=True, n_partials=64, multiprocessors=132, early=True),
    attention.geometry(16, 32, 8, 128, 128, half=True, n_partials=64, multiprocessors=132, early=False),
    attention.geometry(1, 9, 3, 64, 64, half=False, n_partials=8, multiprocessors=40, early=True),
    attention.geometry(3, 4, 1, 256, 256, half=True, n_partials=9, multiprocessors=132, early=True),
    attention.geometry(2, 8, 8, 192, 128, half=False, n_partials=9, multiprocessors=132, early=False),
    attention.geometry(1, 24, 4, 256, 256, half=True, n_partials=64, multiprocessors=132, early=True, gated=True),
    attention.geometry(4, 16, 2, 256, 256, half=True, n_partials=64, multiprocessors=132, early=True, gated=True),
    attention.geometry(1, 64, 8, 64, 64, half=True, n_partials=64, multiprocessors=132, early=True, sinks=True),
    attention.geometry(1, 96, 8, 96, 96, half=True, n_partials=64, multiprocessors=132, early=True),
    attention.geometry(8, 40, 10, 80, 80, half=True, n_partials=64, multiprocessors=132, early=True),
    attention.geometry(1, 16, 8, 256, 256, half=True, n_partials=64, multiprocessors=132, early=True, cap=50.0),
    attention.geometry(
        4, 3, 1, 256, 256, half=True, n_partials=9, multiprocessors=132, early=True, past=True, spans=True
    ),
]

_LATENTS = [
    (1, 16, 512, 64, True),
    (4, 20, 512, 64, True),
    (1, 128, 512, 64, True),
    (1, 20, 512, 64, False),
    (2, 3, 64, 16, True),
]

_COMPRESSED = [((64, 512, True), 227 << 10), ((64, 512, False), 227 << 10), ((64, 512, True), 99 << 10)]

_DIRECT = [
    ((2, 6, 2, 64, 96, "q8_0", "f16", 8), False),
    ((1, 32, 8, 128, 128, "q4_0", "q4_0", 513), True),
    ((1, 16, 8, 256, 256, "q8_0", "q8_0", 17), True),
    ((1, 16, 1, 512, 512, "f16", "f16", 512), True),
    ((3, 24, 4, 256, 256, "q4_0", "q4_0", 512), False),
    ((1, 96, 8, 96, 96, "q8_0", "q8_0", 512), True),
]

_TILED = [
    (16, 8, 256, 256, "f16", "f16", False),
    (32, 8, 128, 128, "f16", "f16", False),
    (8, 4, 256, 256, "f32", "f32", True),
    (24, 4, 256, 256, "q8_0", "q8_0", True),
    (32, 8, 128, 128, "q8_0", "q8_0", False),
    (16, 1, 512, 512, "q4_0", "f16", False),
]

_TILED_SINKS = [(64, 8, 64, 64, "f16", "f16", False), (32, 8, 128, 128, "q8_0", "q4_0", True)]

_INTEGERS = [
    ((32, 8, 128, 128, "i8"), False),
    ((32, 8, 128, 128, "i12"), False),
    ((24, 4, 256, 256, "i8"), True),
    ((16, 1, 512, 512, "i8"), False),
    ((64, 8, 64, 64, "i12"), True),
]

_ROUTINGS = [
    (32, Routing(biased=True)),
    (128, Routing("sigmoid", selected=True, floor=2**-14, weight_scale=2.5)),
    (64, Routing("softmax", normalized=False)),
    (256, Routing("sigmoid", selected=True, floor=2**-14, weight_scale=2.5, n_group=8, n_group_used=4)),
    (160, Routing("softmax", normalized=False, weight_scale=16.0, n_group=8, n_group_used=3, group_best=1)),
    (512, Routing("softmax", biased=True, selected=True, floor=2**-14)),
    (256, Routing("sqrt_softplus", floor=2**-14, weight_scale=1.5, tabled=True)),
    (256, Routing("sqrt_softplus", selected=True, floor=2**-14, weight_scale=1.5)),
]

_EXPERTS = [
    (("MXFP4", "MXFP4"), 1, 4, False, False, 32, False, _ROUTINGS[0][1], Finish(False, True)),
    (("MXFP4", "MXFP4"), 16, 4, False, False, 0, False, Routing(), Finish(False, True)),
    (("MXFP4",), 1, 4, False, True, 0, False, Routing(), Finish(False, True)),
    (("NVFP4", "NVFP4"), 8, 8, True, False, 0, False, Routing(), Finish(True, False)),
    (("Q4_K",), 8, 8, True, True, 0, False, Routing(), Finish(True, True)),
    *((("Q4_K", "Q4_K"), 1, 8, True, False, n, n == 160, law) for n, law in _ROUTINGS[1:]),
]
"""Products of experts by other laws of the choice, and with factors and biases."""


def _integer_tiles(
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int,
    name: str,
    gated_and_sinks: bool,
    cap: float = 0.0,
    spans: bool = False,
    several: bool = False,
) -> tuple[Any, ...]:
    tile = integer_tile.tile_of(CACHE_TYPES[name], d_k, d_v, 227 << 10)
    assert tile
    return integer_tiled.geometry(1024, n_head, n_head_kv, tile, gated_and_sinks, gated_and_sinks, cap, spans, several)[
        0
    ].constants


EXAMPLES: dict[str, list[tuple[Any, ...]]] = {
    "accept": [("exact",), ("ratio",), ("p-min",)],
    "activate": [
        ("swiglu",),
        ("geglu",),
        ("swiglu_oai",),
        ("swiglu_clamped",),
        ("swiglu_limited",),
        ("relu2",),
        ("gelu",),
        ("gelu_erf",),
        ("xielu",),
    ],
    "add": [(), (True,)],
    "add_gated": [()],
    "clear_packets": [()],
    "copy_rows": [()],
    "gate_heads": [()],
    "gather": [(1,), (7,)],
    "gather_combine_quantize": [
        (256, 1, quantize.NARROW, 128, True, False),
        (32, 3, quantize.NARROW, 64, True, True, 32, True),
        (256, 1, quantize.NARROW, 128, False, False, 128, False, 8, True),
        (256, 7, quantize.NARROW, 256, True, True, 0, False, 8, False, True),
    ],
    "gather_gated_norm_quantize": [(256, 1, quantize.NARROW, 128), (32, 7, quantize.NARROW, 96, False)],
    "gather_norm_quantize": [(256, 4096, 1), (32, 96, 3), (256, 5120, 7)],
    "gather_quantize": [(256, "plain", 1), (256, "swiglu", 3), (32, "geglu", 7)],
    "gather_words": [(1,), (7,)],
    "wide_combine_quantize": [
        (8, 128, True, False),
        (4, 256, True, True, 32, True, 8, False, True),
        (12, 64, True, False, 64),
        (16, 128, False, False, 128, False, 8, True),
    ],
    "wide_quantize": [("swiglu", 8), ("plain", 16), ("geglu", 12)],
    "wide_gather_combine_quantize": [
        (8, 1, 128, True, False),
        (4, 7, 256, True, True, 0, True, 8),
        (16, 3, 128, False, False, 128, False, 8, True),
    ],
    "wide_gather_quantize": [("swiglu", 8, 1), ("plain", 16, 3), ("geglu", 4, 7)],
    "wide_gather_norm_quantize": [
        (256, 4096, 1, 8, 4),
        (32, 96, 3, 0, 1),
        (256, 5120, 7, 16, 16),
        (256, 4096, 1, 8, 4, 8, True),
        (256, 5120, 7, 16, 16, 16, False),
    ],
    "kda_conv": [(128, 4, False, True), (128, 4, True, True), (32, 3, False, False)],
    "kda_keep": [(False,), (True,)],
    "kda_scan": [(128, False), (128, True), (32, True)],
    "join_digests": [()],
    "keep_inputs": [(False,), (True,)],
    "keep_tokens": [(False,), (True,)],
    "mamba_conv": [(4, False, True), (4, True, True), (3, False, False)],
    "mamba_scan": [(128, False), (128, True), (256, False), (32, True)],
    "short_conv": [(3, False, True), (4, True, True), (3, False, False)],
    "altup_active": [()],
    "altup_correct": [()],
    "altup_enter": [()],
    "altup_leave": [()],
    "altup_predict": [()],
    "append": [(True, False), (False, True)],
    "argmax": [(sample.GROUPS,), (sample.OWNED_GROUPS,)],
    "attend_chunks": [geometry.attend.constants for geometry in _ATTENTION],
    "attend_compressed": [
        compressed_attention.geometry(2048, *sizes, 128, 8, 132, shared, False, False).attend.constants
        for sizes, shared in _COMPRESSED
    ],
    "attend_compressed_chunks": [
        compressed_attention.geometry(rows, *sizes, 128, 8, 132, shared, True, rows > 1).attend.constants
        for rows, (sizes, shared) in zip((1, 16), _COMPRESSED[:2], strict=True)
    ],
    "attend_in_place": [
        direct_attention.geometry(*sizes, multiprocessors=132, early=early).attend.constants for sizes, early in _DIRECT
    ]
    + [
        direct_attention.geometry(1, 16, 8, 256, 256, name, name, 128, 132, True, cap=50.0).attend.constants
        for name in ("f16", "q8_0")
    ]
    + [direct_attention.geometry(4, 3, 1, 256, 256, "q8_0", "q8_0", 9, 132, True, spans=True).attend.constants],
    "append_keys": [(True, False), (False, True)],
    "attend_latents": [
        latent_attention.geometry(*sizes, 512, 132, shared, True).attend.constants
        for sizes in _LATENTS
        for shared in (227 << 10, 99 << 10)
        if sizes[4] or shared > 99 << 10
    ]
    + [
        latent_attention.geometry(1, 128, 512, 64, half, 32, 132, shared, False, listed=True).attend.constants
        for half, shared in ((True, 227 << 10), (False, 227 << 10), (True, 99 << 10))
    ],
    "attend_tiles": [
        tiled_attention.geometry(1024, *sizes, 227 << 10, sizes in _TILED_SINKS)[0].constants
        for sizes in (*_TILED, *_TILED_SINKS)
    ]
    + [
        tiled_attention.geometry(1024, *sizes, False, 227 << 10, latent=True)[0].constants
        for sizes in ((16, 1, 576, 512, "f16", "f16"), (20, 1, 576, 512, "f32", "f32"))
    ]
    + [
        tiled_attention.geometry(1024, *sizes, False, 227 << 10, cap=50.0)[0].constants
        for sizes in ((16, 8, 256, 256, "f16", "f16"), (32, 16, 128, 128, "q8_0", "q8_0"))
    ]
    + [tiled_attention.geometry(1024, 3, 1, 256, 256, "f16", "f16", False, 227 << 10, spans=True)[0].constants]
    + [
        tiled_attention.geometry(1024, *sizes, False, 227 << 10, several=True)[0].constants
        for sizes in ((32, 8, 128, 128, "f16", "f16"), (14, 2, 64, 64, "q8_0", "q8_0"))
    ],
    "attend_integer_chunks": [
        integer_steps.geometry(1, *sizes, 513, 132, shared, True).attend.constants
        for sizes, _ in _INTEGERS
        for shared in (0, 227 << 10)
    ]
    + [integer_steps.geometry(1, 32, 16, 128, 128, "i12", 128, 132, 227 << 10, True, cap=50.0).attend.constants]
    + [integer_steps.geometry(4, 3, 1, 256, 256, "i8", 9, 132, 227 << 10, True, spans=True).attend.constants]
    + [integer_steps.geometry(64, 32, 8, 128, 128, "i8", 9, 132, 227 << 10, True, mixed=True).attend.constants],
    "attend_integers": [_integer_tiles(*sizes, gated_and_sinks=both) for sizes, both in _INTEGERS]
    + [_integer_tiles(16, 8, 256, 256, "i8", False, 50.0), _integer_tiles(32, 16, 128, 128, "i12", False, 50.0)]
    + [_integer_tiles(3, 1, 256, 256, "i8", False, spans=True)]
    + [_integer_tiles(32, 8, 128, 128, "i8", False, several=True)],
    "begin_block": [()],
    "begin_draft": [(2, False), (1, True)],
    "beside": [()],
    "choose": [(1024,)],
    "collapse": [()],
    "columns": [()],
    "combine": [
        *(geometry.combine.constants for geometry in (*_ATTENTION[1:6], _ATTENTION[7])),
        (512, True, False, 32),
        (128, True, True, 32, True),
        (128, True, False, 128),
        (512, True, False),
        (256, True, False, 0, False, 8, True),
    ],
    "combine_quantize": [
        (256, 128, True, False),
        (32, 64, True, False),
        (256, 256, True, True),
        (32, 96, False, False),
        (256, 512, True, False, 32),
        (32, 64, True, True, 32),
        (32, 64, True, False, 0, True),
        (256, 128, True, True, 32, True),
        (256, 128, True, False, 128),
        (256, 128, True, False, 128, False, 8, True),
        (32, 64, True, False, 0, True, 8, True),
        (256, 512, True, False),
        (32, 512, True, False),
        (256, 256, True, False, 0, False, 8, False, True),
        (256, 128, True, True, 128, True, 8, False, False, quantize.WIDE),
    ],
    "compress": [(512, True, False, False), (128, True, True, True), (48, False, False, False)],
    "convolve": [(128, 4), (96, 3), (32, 1), (128, 4, True)],
    "couple": [(128,), (96,), (32, True), (128, False, True)],
    "delta_inputs": [(128, 4, 3), (96, 3, 1), (32, 1, 2, True)],
    "delta_net": [(128, 4, 1), (128, 4, 8), (128, 4, 16), (96, 3, 16), (32, 4, 8), (64, 1, 1), (128, 4, 8, True)],
    "delta_rule": [(128,), (96,), (32,), (128, True), (128, False, True)],
    "delta_steps": [(128,), (96,), (32, True)],
    "down": [
        ("MXFP4", 4, False, 4, Finish(False, True)),
        ("Q8_0", 8, True, 2),
        ("Q5_0", 8, True, 1),
        ("Q5_1", 8, False, 4, Finish(True, True)),
        ("Q4_0", 8, True, 1),
    ],
    "digest": [(digest.THREADS,)],
    "draw": [(sample.GROUPS, False), (sample.GROUPS, True)],
    "edit": [(sample.EDIT_THREADS,)],
    "embed_float": [("F16",), ("F32",), ("BF16",)],
    "embed_quantized": [("Q4_K",), *((name,) for name in _FORMATS[::3] + _FEW_BITS[::2] if name != "Q4_K")],
    "ends": [()],
    "expand": [()],
    "gated_norm": [(128,), (32,), (128, False)],
    "gated_norm_quantize": [(256, 128), (32, 96), (256, 256), (256, 128, quantize.NARROW, False)],
    "gate_up": [
        ("MXFP4", 4, False, 32, False, "swiglu_oai", Routing(biased=True), Finish(False, True)),
        ("Q8_0", 8, True, 128, False, "swiglu"),
        ("Q5_0", 8, True, 64, True, "swiglu", Routing(gating="sigmoid", selected=True, n_group=2), Finish(True, False)),
        *((name, 8, False, 128, False, "geglu") for name in ("Q4_1", "IQ4_NL")),
    ],
    "join": [(8, True, True), (8, False, True), (8, False, False), (8, True, True, False)],
    "join_compressed": [(512,)],
    "join_chunks": [(128, True), (64, False), (512, True), (256, True, 8, True)],
    "keep": [(False,), (True,)],
    "keep_rows": [()],
    "latent_rope": [
        *((True, 512, 64, False, True), (False, 512, 64, True, False), (True, 40, 6, True, True)),
        (True, 512, 64, False, True, False),
    ],
    "lay_out": [()],
    "layer_norm": [(4096, False), (768, True), (96, True), (128, False, 96)],
    "layer_norm_quantize": [
        (256, 4096, False),
        (32, 768, True),
        (32, 96, True),
        (256, 4096, False, True),
        (16, 2880, True),
    ],
    "list_heads": [()],
    "matmul_experts": [
        (("Q4_K", "Q4_K"), 1, 8, True, False, 256),
        (("Q4_K", "Q4_K"), 8, 8, True, False),
        (("Q6_K",), 8, 8, True, True),
        (("Q4_K", "Q6_K"), 1, 10, False, False, 512),
        (("Q6_K", "Q6_K"), 1, 8, True, False, 256),
        (("Q8_0", "Q4_0"), 1, 8, False, False),
        (("Q8_0",), 16, 8, True, True),
        (("Q4_K", "Q4_K"), 1, 8, False, False, 128, True),
        (("Q8_0", "Q8_0"), 1, 8, False, False, 128, True),
        *_EXPERTS,
        *(((name,), (1, 8, 16)[k % 3], 8, k % 2 == 0, True) for k, name in enumerate(_FORMATS[::2] + _FEW_BITS)),
    ],
    "matmul_experts_float": [("F16", 8, False), ("F32", 8, True), ("BF16", 4, True, Finish(True, True))],
    "quantize_pairs": [("plain", 8), ("swiglu", 1), ("xielu", 1)],
    "matmul_experts_warpgroups": [
        *(("Q4_K", True), ("Q6_K", True), ("Q5_K", False, Finish(True, True))),
        *(("IQ3_S", True), ("Q2_K", False)),
    ],
    "matmul_experts_streamed": [
        *(("Q4_K", 8, 4, 8), ("Q6_K", 1, 4, 3), ("Q5_K", 8, 2, 16, True, Finish(True, True))),
        *(("MXFP4", 4, 2, 90, False, Finish(False, True)), ("NVFP4", 1, 4, 20), ("IQ2_XS", 1, 4, 3)),
    ],
    "matmul_experts_wide": [
        *(("IQ4_XS", 1), ("Q4_K", 8), ("Q8_0", 1)),
        *(("MXFP4", 4, False, Finish(False, True)), ("NVFP4", 1, False, Finish(True, False))),
        ("Q4_K", 8, False, Finish(True, True)),
        *(("IQ2_XS", 8), ("IQ1_S", 1), ("TQ1_0", 8), ("NVFP4", 1), ("Q1_0", 8)),
    ],
    "matmul_float": [("F16", False), ("F32", True), ("BF16", False)],
    "matmul_float_wide": [("BF16", 16, True, 4), ("F32", 8, False, 1)],
    "matmul_give": [
        (("Q4_K",), 1, True, True),
        (("Q4_K", "Q4_K"), 1, False, False, 0, False, 1),
        (("Q6_K",), 8, True, True, 0, True, 7),
    ],
    "matmul_heads": [("Q8_0", 1), ("Q8_0", 16), ("Q4_K", 1), ("Q4_K", 8), ("Q5_0", 8), ("Q6_K", 16)],
    "matmul_heads_float": [("F32",), ("BF16",)],
    "matmul_join": [
        ("Q6_K", 2, 8, True),
        ("Q4_K", 3, 8, False),
        ("Q6_K", 1, 6, True, "swiglu", False),
        ("Q4_K", 2, 8, False, "swiglu_oai", True, Finish(False, True)),
        ("Q4_K", 3, 4, True, "relu2", False, Finish(True, True)),
        *(
            (name, (1, 2, 6)[k % 3], (8, 8, 4)[k % 3], k % 3 == 1)
            for k, name in enumerate(_FORMATS[7::2] + _LARGE_UNITS)
        ),
    ],
    "matmul_quantized": [
        (("Q4_K",), 1, False, False),
        (("Q4_K",), 8, True, True),
        (("Q4_K", "Q4_K", "Q6_K"), 1, False, False),
        (("Q5_0", "Q8_0"), 16, False, False),
        (("Q4_0", "Q5_1", "Q8_0"), 1, True, False),
        *(((name,), 1, k % 2 == 0, k % 2 == 0, 0, k % 2 == 0) for k, name in enumerate(_FORMATS[:7])),
        (("Q4_K", "Q4_K", "Q6_K"), 1, False, False, 4),
        (("Q4_K", "Q4_K", "Q6_K"), 8, False, False, 4),
        (("Q4_K",), 8, True, False, 12),
        *(((name,), (1, 8)[k % 2], True, False, 16) for k, name in enumerate(_FORMATS[7:] + _LARGE_UNITS)),
        *(((name,), (8, 16)[k % 2], bool(k % 2), k % 4 == 0) for k, name in enumerate(_FORMATS)),
        *(((name,), (1, 16)[k % 2], bool(k % 2), False) for k, name in enumerate(_FEW_BITS)),
    ],
    "matmul_wide": [("Q6_K",), ("Q4_K",), ("Q8_0",), *((name,) for name in _FEW_BITS)],
    "matmul_chains": [(4,), (16,), (12,)],
    "matmul_warpgroups": [
        ("Q4_K", 16, 2, False),
        ("Q6_K", 4, 4, True),
        ("Q5_K", 8, 3, False),
        ("Q4_K", 4, 4, False),
        ("Q4_K", 4, 3, True),
        ("Q4_K", 8, 3, True),
        ("Q6_K", 8, 3, False),
        ("Q6_K", 16, 2, True),
        ("Q5_K", 4, 4, False),
        ("Q4_K", 12, 2, False),
        ("Q6_K", 12, 2, True),
        ("IQ4_XS", 16, 2, False),
        ("IQ3_S", 16, 2, False),
        ("IQ2_S", 4, 4, True),
        ("Q2_K", 16, 2, False),
        ("Q3_K", 8, 3, True),
        ("IQ1_M", 12, 2, False),
        ("Q4_K", 8, 3, True, "Q6_K"),
        ("IQ3_S", 4, 4, False, "Q5_K"),
    ],
    "maxima": [(sample.GROUPS, sample.WARPS), (sample.owned_groups(2), sample.WARPS)],
    "mtp_input": [(), (4,)],
    "observe": [(32, False), (9, True), (128, False)],
    "place_columns": [()],
    "places": [()],
    "rows_before": [()],
    "spread_logits": [()],
    "per_layer_inputs": [(256,), (96,)],
    "permit": [(permit.THREADS,)],
    "receive": [(exchange.THREADS,)],
    "send": [(exchange.THREADS,)],
    "propose": [(False,), (True,)],
    "quantize": [
        (256, "swiglu"),
        (32, "plain"),
        (32, "geglu"),
        (256, "plain", quantize.WIDE),
        (32, "swiglu_oai"),
        (256, "relu2"),
        (32, "gelu_erf"),
    ],
    "read_sum": [()],
    "repeat": [()],
    "repack": [(144,), (17,), (1152, 2, False), (176, 2, True)],
    "rms_norm": [()],
    "rms_norm_add": [()],
    "rms_norm_groups": [()],
    "rms_norm_add_quantize": [
        (256, 3840, True),
        (256, 5376, True),
        (256, 2560, False),
        (32, 2816, True),
        (32, 96, True),
        (32, 96, False),
    ],
    "rms_norm_quantize": [
        (256, 4096),
        (32, 576),
        (32, 96),
        (256, 4096, quantize.WIDE),
        (16, 2880),
        (128, 2048),
        (256, 4096, 16, 16),
        (32, 2880, quantize.NARROW, 4),
    ],
    "rms_norm_router": [(256, 2048), (256, 4096), (32, 96), (256, 2816)],
    "rope": _ROPE,
    "rope_chains": _ROPE_CHAINS,
    "round_heads": [(512, False), (128, True), (96, False)],
    "round_rows": [(512, False, False), (128, True, True)],
    "rotate_tail": [(512, True, False), (512, False, True), (128, False, False)],
    "route": [(256, 8), (1024, 16), (10, 3), (128, 8, True), *((n, 8, n == 160, law) for n, law in _ROUTINGS)],
    "scale": [()],
    "score": [(64, 128, True, False), (7, 48, False, True)],
    "softcap": [()],
    "sparsify": [()],
    "sort_pairs": [(), (128,), (32, True)],
    "weigh_products": [(True,), (False,)],
    "stream_weights": [()],
    "take_quantize": [(256, "swiglu"), (256, "plain"), (32, "geglu")],
}
"""Examples of the constants of each kernel; the first is the most common one."""

EXPECTED: dict[str, tuple[str, ...]] = {
    # The data that the host reads must be written before the word that announces it.
    "accept": ("membar.sys", "bar.warp.sync"),
    "matmul_experts": ("mma.sync.aligned.", "ld.global.L1::no_allocate.v", "ld.global.v"),
    "matmul_join": ("mma.sync.aligned.", "ld.global.L1::no_allocate.v", "ld.global.v4"),
    "matmul_experts_streamed": (
        "mma.sync.aligned.",
        "cp.async.cg",
        "cp.async.bulk.",
        "mbarrier.try_wait.",
        "ld.shared.v4",
    ),
    "matmul_experts_wide": ("mma.sync.aligned.", "cp.async.cg", "cp.async.ca", "ld.shared.v4"),
    "wide_combine_quantize": ("ld.global.v4",),
    "wide_gather_combine_quantize": ("ld.global.v4", "st.relaxed.sys", "ld.relaxed.sys"),
    "wide_quantize": ("ld.global.v4",),
    "wide_gather_quantize": ("ld.global.v4", "st.relaxed.sys", "ld.relaxed.sys"),
    "matmul_give": ("mma.sync.aligned.", "ld.global.L1::no_allocate.v", "st.relaxed.sys"),
    "matmul_quantized": ("mma.sync.aligned.", "ld.global.L1::no_allocate.v", "ld.global.v"),
    "matmul_wide": ("mma.sync.aligned.", "cp.async.", "ld.shared.v4"),
    **dict.fromkeys(
        ("matmul_experts_warpgroups", "matmul_warpgroups"),
        ("wgmma.mma_async.sync.aligned.m64n", "cp.async.bulk.", "mbarrier.try_wait."),
    ),
    "gate_up": ("mma.sync.aligned.", "ld.global.L1::no_allocate.v", "ld.global.v2"),
    "down": ("mma.sync.aligned.", "ld.global.L1::no_allocate.v", "ld.global.v2"),
}
"""Prefixes of instructions that a kernel must contain, for all its constants."""

LONG = {"attend_chunks", "attend_compressed", "attend_in_place", "attend_integer_chunks", "attend_integers"}
LONG |= {"attend_latents", "attend_tiles", "combine_quantize", "delta_net", "delta_rule", "matmul_experts_wide"}
LONG |= {"matmul_experts_streamed", "matmul_experts_warpgroups", "matmul_warpgroups", "matmul_wide"}
"""Kernels that take 3 to 13 seconds to compile."""

MANY = {"combine", "matmul_experts", "matmul_join", "matmul_quantized"}
"""Kernels with many examples."""


def case(name: str, k: int | str, constants: tuple[Any, ...], target: tuple[int, int]) -> Any:
    lowest = next(t for t in TARGETS if name not in WIDE or t >= (8, 0))
    lowest = KERNELS[name].target or lowest
    marks = []
    one_in = 6 if name in LONG else 4 if name in MANY else 3
    if target not in (lowest, TUNED) or (isinstance(k, int) and k % one_in):
        # Each kernel is a group of its own, and these groups come last: short groups keep all processes busy until the end.
        marks = [pytest.mark.gpu, pytest.mark.together(f"ptx {name}"), pytest.mark.begin(1)]
    elif k != 0 or target != TUNED:
        marks = [pytest.mark.thorough]
    return pytest.param(name, constants, target, id=f"{name}-{k}-sm_{target[0]}{target[1]}", marks=marks)


CASES = [
    case(name, k, constants, target)
    for name, examples in EXAMPLES.items()
    for k, constants in enumerate(examples)
    for target in (TUNED, *(t for t in TARGETS if t != TUNED))
    if KERNELS[name].target in (None, target)
    if (k == 0 and (target >= (8, 0) or name not in WIDE)) or target == TUNED
]
CASES += [
    case(name, "small", constants, (8, 0))
    for name, constants in (("matmul_wide", ("Q4_K", True)), ("matmul_experts_wide", ("Q4_K", 8, True)))
]
CASES += [
    case("attend_tiles", "q8_0", ("q8_0", "q8_0", 128, 128, 4, 64, 4, 256, kept, False), target)
    for kept, target in ((False, (8, 0)), (True, (10, 0)))
]

LEAST_SHARED = 99 << 10
"""The least shared memory of a block, in bytes, of all GPUs from compute capability 8.0 on: that of 8.6, 8.9 and 12.0."""


def test_every_module_can_be_imported() -> None:
    assert NOT_IMPORTED == []


def test_every_kernel_has_examples() -> None:
    missing = sorted(KERNELS.keys() - EXAMPLES.keys())
    assert not missing, f"add constants of {', '.join(missing)} to EXAMPLES in {os.path.basename(__file__)}"
    assert EXAMPLES.keys() == KERNELS.keys(), "EXAMPLES names a kernel that does not exist"
    assert all(EXAMPLES.values())


@lru_cache(maxsize=1)
def front_end(name: str, constants: tuple[Any, ...]) -> Intermediate:
    """The front end takes by far the longest; it runs once for all targets of an example, which are consecutive."""
    return intermediate(KERNELS[name](*constants))


@pytest.mark.parametrize(("name", "constants", "target"), CASES)
def test_kernel(name: str, constants: tuple[Any, ...], target: tuple[int, int]) -> None:
    if name not in KERNELS:
        pytest.skip(f"there is no kernel {name}")
    ptx = front_end(name, constants).ptx(target)
    assert [problem for problem in check(ptx) if not allowed(problem, name, target)] == []
    opcodes = instructions(ptx)
    for start in EXPECTED.get(name, ()):
        if start == "ld.global.v" and "NVFP4" in constants[0]:
            start = "ld.global.u32"  # 16 activations of a row are four words, one for each lane
        assert any(opcode.startswith(start) for opcode in opcodes), f"no {start}"
    check_target(ptx, target)
    report, code = assembled(ptx, target)
    if not report:
        pytest.skip("the assembler accepts the kernel, but this version reports no registers for it")
    assert "serialized" not in report, "products of warpgroups wait for each other"
    spilled = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    assert spilled, report
    frame, stores = map(int, spilled.groups())
    if target > TUNED and name in LOCAL_NEWER:
        frame = 0  # that of the array
    if target < TUNED:
        most = SPILLED_OLDER.get(name, SPILLED_ELSEWHERE)
    else:
        most = SPILLED_TUNED.get((name, constants[:1]), SPILLED) if target == TUNED else SPILLED
    assert max(frame, stores) <= most
    if target == TUNED or name not in CHOSEN:  # on other targets these have other constants (tests/cuda/test_tiles.py)
        name_of = "sm_{}{}".format(*target)
        assert use_of(KERNELS[name](*constants), report, code, name_of).problems(name_of) == []


def allowed(problem: str, name: str, target: tuple[int, int]) -> bool:
    """Whether the compiler for a newer target may do so.

    There NVVM writes fma(x, y, -0) as a product.  It has a rounding modifier, and so has the sum that it feeds, which keeps
    the assembler from fusing them (PTX ISA, 9.7.3).  That the source has no other products in sums is checked for ``TUNED``.
    """
    if target <= TUNED:
        return False
    if problem.partition(": ")[2].startswith("a product feeds a sum: mul.rn.f32"):
        return problem.rpartition("), ")[2].startswith(("add.rn.f32", "sub.rn.f32"))
    return "local memory" in problem and name in LOCAL_NEWER


@pytest.mark.parametrize("name", _FORMATS + _FEW_BITS)
def test_wide_products_fit(name: str) -> None:
    """They fit into the shared memory of any GPU that supports them, with large blocks if possible."""
    for most, small in ((227 << 10, 0), (LEAST_SHARED, 1), (0, 1)):
        kernel, grid, threads = wide_matmul.geometry(name, 129, 65, most)
        assert kernel.constants == (name, True)[: 1 + small]
        assert (grid, threads) == (((3, 17), 128) if small else ((2, 9), 256))
        assert kernel.shared <= (most or LEAST_SHARED)
        kernel, grid, threads = wide_experts.geometry(name, 8, 77, 65, most)
        fits = wide_experts.matmul_experts_wide(name, 8).shared <= most
        assert kernel.constants == (name, 8, True)[: 3 - fits]
        assert (grid, threads) == (((77, 9), 256) if fits else ((77, 17), 128))
        assert kernel.shared <= (most or LEAST_SHARED)


@pytest.mark.parametrize("types", ["f16", "f32", "q8_0", "q4_0"])
@pytest.mark.parametrize("d", range(64, 513, 16))
def test_attention_by_tiles_fits(d: int, types: str) -> None:
    of = CACHE_TYPES[types]
    assert tiled_attention.takes(of, of, d, d) == (not of.quantized or d % BLOCK == 0)
    if of.quantized:
        d = -(-d // BLOCK) * BLOCK
    for gated in (False, True):
        kernel, _, _ = tiled_attention.geometry(1024, 8, 4, d, d, types, types, gated, LEAST_SHARED)
        # The kernel's static array has a word for each pair of a tile.
        assert kernel.shared + 4 * kernel.constants[5] <= LEAST_SHARED


def test_others_bring_no_shared_memory() -> None:
    """They have static arrays, which the assembler limits to 48 KiB."""
    with_it = {name for name, examples in EXAMPLES.items() if any(KERNELS[name](*e).shared for e in examples)}
    others = {"matmul_experts_streamed", "matmul_experts_warpgroups", "matmul_experts_wide"}
    others |= {"matmul_warpgroups", "matmul_wide"}
    others |= {
        "attend_compressed",
        "attend_compressed_chunks",
        "attend_integer_chunks",
        "attend_integers",
        "attend_latents",
    }
    assert with_it == {"attend_tiles", "delta_rule", *others}


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_blocks_that_should_fit_on_a_multiprocessor_do(name: str) -> None:
    """Their shared memory does, on an H200, whose multiprocessors have 228 KiB."""
    for constants in EXAMPLES.get(name, ()):
        specialization = KERNELS[name](*constants)
        if specialization.shared:
            each = specialization.shared + SHARED_OF_DRIVER
            assert max(1, specialization.blocks) * each <= 228 << 10, constants
            assert shared_percent(specialization.shared, specialization.blocks, 227 << 10) * 2.28 * 1024 >= each


def check_target(ptx: str, target: tuple[int, int]) -> None:
    """The instructions are those of the target, not cached ones of another target."""
    text = " ".join(instructions(ptx))
    assert ".target sm_{}{}".format(*target) in ptx
    assert ("griddepcontrol.wait" in text) == (target >= (9, 0)), "wait_for_inputs"
    assert ("griddepcontrol.launch_dependents" in text) == (target >= (9, 0)), "let_next_begin"
    assert "mma.sync.aligned.m16" not in text or target >= (8, 0)
    assert "mma.sync.aligned.m8" not in text or target < (8, 0)


@pytest.mark.parametrize("name", few(["Q4_K", "Q6_K", "Q2_K", "IQ2_XXS"]))
def test_a_record_is_unpacked_before_the_wait(name: str) -> None:
    """This holds if a warp has no other record; in a chain it does not hold, which shows that this test can fail."""
    for single in (8, 0):
        ptx = compile_ptx(KERNELS["matmul_quantized"]((name,), 1, True, False, single), TUNED)
        body = list(statements(ptx))
        wait = next(k for k, s in enumerate(body) if s.opcode == "griddepcontrol.wait")
        products = [s.operands for s in body if s.name == "mma"]
        weights = {register for text in products for register in re.findall(r"%\w+", text.split("}")[1])}
        assert len(products) in (8, 16) and len(weights) == 32
        made_after = {s.result for s in body[wait:]} & weights
        assert (not made_after) == (single > 0)


# --- the targets -----------------------------------------------------------------------------------------------


def build_product() -> Any:
    # Defined inside the factory, because Numba keeps the code compiled for the first target.
    @cuda.jit(device=True)
    def product(a):
        return mma32(a, a, a, a, a, a)[0] + mma16(a, a, a)[1]

    @cuda.jit
    def kernel(p, q):
        let_next_begin()
        wait_for_inputs()
        q[cuda.threadIdx.x] = product(p[cuda.threadIdx.x])

    return kernel


@pytest.mark.parametrize("target", [(9, 0), (7, 5), (8, 0), (10, 0)])
def test_instructions_follow_the_target(target: tuple[int, int]) -> None:
    ptx = compile_ptx(Kernel("product", (U32P, U32P), build_product)(), target)
    check_target(ptx, target)
    shapes = {opcode.split(".")[3]: n for opcode, n in instructions(ptx).items() if opcode.startswith("mma")}
    # Turing's product has half the rows and half the positions: one of 32 positions takes four of them, one of 16 takes two.
    assert shapes == ({"m16n8k32": 1, "m16n8k16": 1} if target >= (8, 0) else {"m8n8k16": 6})


# --- the checker -----------------------------------------------------------------------------------------------


def compiled(function: Callable[..., None]) -> str:
    kernel = Kernel("checked", (F32P, F32P, i32), lambda: cuda.jit(function), threads=64)
    return compile_ptx(kernel(), (8, 0))


def unfused(x, y, n):
    y[0] = x[0] * x[1] + x[2]


def subtracted(x, y, n):
    y[0] = x[2] - x[0] * x[1]


def carried(x, y, n):
    product = x[0]
    total = x[1]
    for k in range(n):
        total = total + product
        product = x[k] * x[k + 1]
    y[0] = total


def halved(x, y, n):
    y[0] = x[0] / np.float32(128.0) + x[1]


def fused(x, y, n):
    # A product may be a factor or the summand of an fma, and may be divided and stored.
    product = x[0] * x[1]
    y[0] = fma(product, x[2], x[3])
    y[1] = fma(x[4], x[5], product)
    y[2] = product / x[6]
    y[3] = np.float32(math.sqrt(product))
    y[4] = x[7] + x[8]


@pytest.mark.parametrize("function", [unfused, subtracted, carried])
def test_a_product_in_a_sum_is_found(function: Callable[..., None]) -> None:
    """Kernels are compiled without contraction, so a separate product and sum in the source are found in the PTX."""
    ptx = compiled(function)
    assert any("a product feeds a sum" in problem for problem in check(ptx))
    assert instructions(ptx)["fma.rn.f32"] == 0


def test_threads_compile_at_the_same_time() -> None:
    """Functions of Numba are replaced while a kernel is compiled, and each thread still gets its own kernel."""
    kernels = [KERNELS[name](*EXAMPLES[name][0]) for name in ("softcap", "digest", "copy_rows")]
    with ThreadPoolExecutor() as threads:
        texts = list(threads.map(compile_ptx, kernels, [TARGETS[0]] * len(kernels)))
    assert [each.kernel.name in entry_name(ptx) for each, ptx in zip(kernels, texts, strict=True)] == [True] * 3


def test_explicit_products_and_sums_pass() -> None:
    ptx = compiled(fused)
    assert check(ptx) == []
    opcodes = instructions(ptx)
    assert (opcodes["fma.rn.f32"], opcodes["div.rn.f32"], opcodes["sqrt.rn.f32"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("registers", "problems"),
    [
        # A register holds a sum and later, on the same path, a product; only in a loop does the product reach the sum.
        ("add.f32 %f1, %f1, %f2; mul.f32 %f1, %f1, %f2; st.global.f32 [%rd1], %f1;", 0),
        ("$again: add.f32 %f1, %f1, %f2; mul.f32 %f1, %f1, %f2; @%p1 bra $again;", 1),
        ("mul.f32 %f1, %f2, %f3; mov.f32 %f1, %f4; add.f32 %f5, %f1, %f1;", 0),
        ("mul.f32 %f1, %f2, %f3; @%p1 mov.f32 %f1, %f4; add.f32 %f5, %f1, %f1;", 1),
        ("mul.f32 %f1, %f2, %f3; bra $end; $other: add.f32 %f5, %f1, %f1; $end: mov.f32 %f1, %f4;", 0),
        ("mul.f32 %f1, %f2, %f3; @%p1 bra $other; mov.f32 %f1, %f4; ret; $other: add.f32 %f5, %f1, %f1;", 1),
    ],
)
def test_a_register_is_followed_along_the_branches(registers: str, problems: int) -> None:
    found = check(f".visible .entry f()\n{{\n{registers}\nret;\n}}")
    assert sum("a product feeds a sum" in problem for problem in found) == problems == len(found)


def test_powers_of_two_pass() -> None:
    ptx = compiled(halved)
    assert check(ptx) == []
    assert sum(s.scales for s in statements(ptx)) == 1


def exponential(x, y, n):
    y[0] = math.exp(x[0])


def inverse_root(x, y, n):
    y[0] = cuda.libdevice.rsqrtf(x[0])


def double(x, y, n):
    y[0] = x[0] * 0.1


def indexed(x, y, n):
    memory = cuda.local.array(16, numba.float32)
    for k in range(16):
        memory[k] = x[k]
    y[0] = memory[n]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (exponential, "an approximation: ex2.approx"),
        (inverse_root, "an approximation: rsqrt.approx"),
        (double, "float64: "),
        (indexed, "local memory: .local"),
    ],
)
def test_what_is_not_allowed_is_found(function: Callable[..., None], problem: str) -> None:
    problems = check(compiled(function))
    assert any(problem in found for found in problems), problems


TEXT = """
.version 8.4
.target sm_80 // mul.f32 in a comment
.address_size 64
.global .align 4 .b8 table[4] = {1, 2, 3, 4};

.visible .entry first(
\t.param .u64 first_param_0
)
.maxntid 64, 1, 1
{
\t.reg .f32 \t%f<9>;
\tmul.f32 \t%f1, %f2, %f3;
$L__BB0_1:
\t@!%p1 neg.f32 \t%f4, %f1; /* ex2
\tin two lines */ ld.global.nc.L1::no_allocate.v4.u32 {%r1,%r2,%r3,%r4}, [%rd1];
$L__BB0_2: bra $L__BB0_1;
\t{ // callseq 0, 0
\tcall.uni (retval0),
\tvprintf,
\t(
\tparam0
\t);
\t}
\tsub.rn.f32 \t%f5, %f6, %f4;
\tdiv.full.f32 %f7, %f5, %f5;
\tadd.ftz.f32 %f7, %f5, %f5;
\tsqrt.rz.f32 %f7, %f5;
\tdiv.s32 %r1, %r2, %r3;
}
.func (.param .b32 result) second()
{
\tadd.f32 \t%f5, %f1, %f1;
\tret;
}
"""


def test_reading() -> None:
    found = [s for s in statements(TEXT) if not s.opcode.startswith(".")]
    assert [(s.line, s.opcode, s.function) for s in found] == [
        (13, "mul.f32", "first"),
        (15, "neg.f32", "first"),
        (16, "ld.global.nc.L1::no_allocate.v4.u32", "first"),
        (17, "bra", "first"),
        (19, "call.uni", "first"),
        (25, "sub.rn.f32", "first"),
        (26, "div.full.f32", "first"),
        (27, "add.ftz.f32", "first"),
        (28, "sqrt.rz.f32", "first"),
        (29, "div.s32", "first"),
        (33, "add.f32", "second"),
        (34, "ret", "second"),
    ]
    assert instructions(TEXT)["ld.global.nc.L1::no_allocate.v4.u32"] == 1
    assert check(TEXT) == [
        "line 26: an approximation: div.full.f32 %f7, %f5, %f5",
        "line 27: subnormals are flushed to zero: add.ftz.f32 %f7, %f5, %f5",
        "line 28: not rounded to nearest: sqrt.rz.f32 %f7, %f5",
        "line 25: a product feeds a sum: mul.f32 %f1, %f2, %f3 (line 13), sub.rn.f32 %f5, %f6, %f4",
    ]
