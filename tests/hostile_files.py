"""Models whose headers lie: every value that a family reads replaced, and every tensor renamed.

``numbers`` and ``names`` change the header of a small model of each architecture in memory, as a file could have it, and
build the model.  Either that works, or one sentence says what is wrong; anything else is a finding.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.cache.types import F16
from engine.devices import open_device
from engine.errors import EngineError
from engine.gguf.file import GGUF, read_gguf
from engine.gguf.header import MetadataValue
from engine.models.needs import context_bytes, recurrent_bytes
from engine.models.registry import build, read_config
from engine.models.traffic import weight_bytes_per_token
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import Vocabulary

Value = tuple[str, MetadataValue]
"""A declared type and a value of it."""

LONGEST = 1200
"""Characters of the longest sentence that is no finding."""

N_CTX = 64


def _array(kind: str, *values: float) -> Value:
    dtypes = {"i32": "<i4", "u32": "<u4", "f32": "<f4", "f64": "<f8", "bool": "?"}
    with np.errstate(over="ignore"):
        return f"{kind}[]", np.array(values, dtypes[kind])


VALUES: list[Value] = [
    *(("u32", n) for n in (0, 1, 2, 3, 7, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)),
    *(("i32", n) for n in (-1, -(2**31), 5)),
    *(("u64", n) for n in (2**32, 2**63, 2**64 - 1)),
    *(("f32", x) for x in (0.0, -1.0, 1.0, 1e-30, 1e20, 3e38, math.nan, math.inf, -math.inf)),
    *(("f64", x) for x in (1e-300, 1e300, -1e300)),
    *(("bool", x) for x in (True, False)),
    *(("str", x) for x in ("", "x", "yarn", "a" * 100_000, "\x1b[31m\n")),
    *(
        _array("i32"),
        _array("i32", -1),
        _array("i32", 0, 1),
        _array("u32", *[1] * 300),
        _array("i32", *[2**31 - 1] * 3),
    ),
    *(_array("f32", math.nan), _array("f32", *[1e30] * 64), _array("f64", 1e300, -1e300), _array("bool", True, False)),
    *(("str[]", x) for x in ([], ["a"], ["a" * 100_000, "\x1b"])),
]


class _Seen(dict[str, MetadataValue]):
    """Metadata that remember which keys were asked for."""

    def __init__(self, values: dict[str, MetadataValue]) -> None:
        super().__init__(values)
        self.keys_seen: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.keys_seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> MetadataValue:
        self.keys_seen.add(key)
        return super().__getitem__(key)


@cache
def _ops() -> Any:
    return open_device("cpu")


def loaded(gguf: GGUF, tokenizer: bool = True) -> None:
    """Build the model, as ``engine.load`` does.  Raises EngineError."""
    config = read_config(gguf)
    recurrent_bytes(config)
    context_bytes(config, _ops(), F16, N_CTX, 16, 1, 1, N_CTX)
    build(config, gguf, _ops(), N_CTX)
    weight_bytes_per_token(gguf)
    if tokenizer:
        Tokenizer(Vocabulary.from_gguf(gguf))


def problem(gguf: GGUF, tokenizer: bool = True) -> str:
    """What is wrong with how a model is loaded or refused; "" if nothing is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded(gguf, tokenizer)
    except EngineError as error:
        text = str(error)
        if len(text) > LONGEST:
            return f"a message of {len(text)} characters: {text[:80]!r}"
        bad = [c for c in text if not c.isprintable()]
        return f"a message with {bad[0]!r}" if bad else ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def bases(path: Path) -> Iterator[GGUF]:
    """The header of a file, and the same with the keys of YaRN, whose numbers are read only then."""
    gguf = read_gguf(path)
    yield gguf
    name = gguf.metadata["general.architecture"]
    more: dict[str, Value] = {
        f"{name}.rope.scaling.type": ("str", "yarn"),
        f"{name}.rope.scaling.factor": ("f32", 4.0),
        f"{name}.rope.scaling.original_context_length": ("u32", 32),
    }
    yield changed(gguf, more)


def changed(gguf: GGUF, values: dict[str, Value]) -> GGUF:
    """A header with other values."""
    metadata = gguf.metadata | {key: value for key, (_, value) in values.items()}
    kinds = gguf.kinds | {key: kind for key, (kind, _) in values.items()}
    return replace(gguf, metadata=metadata, kinds=kinds)


def keys(gguf: GGUF) -> list[str]:
    """The keys that a file has, and those that its family asks for."""
    seen = _Seen(gguf.metadata)
    try:
        loaded(replace(gguf, metadata=seen))
    except EngineError:
        pass
    return sorted(seen.keys_seen | set(gguf.metadata))


def numbers(path: Path) -> Iterator[tuple[str, GGUF]]:
    """Headers with one value replaced: (what was replaced, header)."""
    first, *others = bases(path)
    for gguf in (first, *others):
        for key in keys(gguf):
            if gguf is not first and ".rope." not in key:
                continue
            for kind, value in VALUES:
                shown = f"{key} = {kind} {str(value)[:20]!r}"
                yield shown, changed(gguf, {key: (kind, value)})


NAMES = (
    "a_exps.b.input_scale",
    "ffn_up_exps.input_scale",
    "x.input_scale",
    "input_scale",
    "blk.input_scale",
    "blk.0.ffn_up_exps.7.input_scale",
    "blk.0.ffn_up_exps.weight.input_scale",
    "blk.99.attn_q.weight",
    "blk.99.attn_q.input_scale",
    "blk.-1.attn_q.weight",
    "blk.-1.attn_q.input_scale",
    "blk.x.attn_q.weight",
    "blk.0",
    "blk.",
    "blk.0.attn_q.weight.weight",
    "blk.1e9.attn_q.weight",
    "blk.99999999999999999999.attn_q.weight",
    "blk.0.nextn.eh_proj.weight",
    "blk.1.nextn.eh_proj.weight",
    "mtp.0.e_proj.weight",
    "mtp.x.weight",
    "v.patch_embd.weight",
    "rope_freqs.weight",
    "\x1b[31m.weight",
    "a" * 64,
    "",
    ".",
)
"""Names that no tensor of a model has."""


def names(path: Path) -> Iterator[tuple[str, GGUF]]:
    """Headers with a tensor more, of several shapes, with one renamed, and with one missing: (what was changed, header)."""
    gguf = read_gguf(path)
    vector = next(t for t in gguf.tensors.values() if len(t.shape) == 1)
    matrix = next(t for t in gguf.tensors.values() if len(t.shape) == 2)
    for name in NAMES:
        for like in (vector, matrix):
            yield f"{name!r} added", replace(gguf, tensors=gguf.tensors | {name: replace(like, name=name)})
    for old, tensor in gguf.tensors.items():
        rest = {name: each for name, each in gguf.tensors.items() if name != old}
        yield f"{old} missing", replace(gguf, tensors=rest)
        for name in (
            f"{old}.input_scale",
            old.removesuffix(".weight") + ".input_scale",
            old.replace("blk.0", "blk.-1"),
        ):
            if name != old:
                yield f"{old} renamed {name}", replace(gguf, tensors=rest | {name: replace(tensor, name=name)})
        for other in (vector, matrix):
            if other.shape != tensor.shape:
                yield (
                    f"{old} with shape {other.shape}",
                    replace(gguf, tensors=gguf.tensors | {old: replace(other, name=old)}),
                )
