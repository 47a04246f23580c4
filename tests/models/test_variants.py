"""The same model stored otherwise: tensors in one, factors beside matrices.  No bit of the logits may change."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import engine
from engine.errors import ModelError
from tests.families import Tensors, rewritten
from tests.oracle.models import CASES, write_gguf
from tests.oracle.shared import N_VOCAB


def logits(path: Path) -> bytes:
    llm = engine.load(path, device="cpu", n_ctx=128, n_threads=1, cache_type="f32")
    return llm.logits(list(range(1, 80))).tobytes()


def joined(names: tuple[str, ...], into: str, axis: int) -> Callable[[Tensors], Tensors]:
    """Tensors of each layer, and their biases, as one; those of a layer that lacks one of them stay."""

    def change(tensors: Tensors) -> Tensors:
        changed = dict(tensors)
        for il in range(64):
            for kind, last in (("weight", axis), ("bias", -1)):
                parts = [f"blk.{il}.{name}.{kind}" for name in names]
                if all(part in changed for part in parts):
                    arrays = [changed.pop(part) for part in parts]
                    changed[f"blk.{il}.{into}.{kind}"] = np.concatenate(arrays, axis=last)
        return changed

    return change


def scaled(only: str) -> Callable[[Tensors], Tensors]:
    """Matrices divided by a power of two, which is then their scale; each expert has its own."""

    def change(tensors: Tensors) -> Tensors:
        changed = {}
        for i, (name, data) in enumerate(tensors.items()):
            changed[name] = data
            if only in name and name.endswith(".weight") and data.ndim > 1:
                n = data.shape[0] if data.ndim == 3 else 1
                factors = (2.0 ** np.arange(i % 3 + 1, i % 3 + 1 + n)).astype(np.float32)
                changed[name] = data / factors.reshape(-1, *[1] * (data.ndim - 1))
                changed[name.replace(".weight", ".scale")] = factors
        return changed

    return change


QKV = joined(("attn_q", "attn_k", "attn_v"), "attn_qkv", 0)
GATE_UP = joined(("ffn_gate", "ffn_up"), "ffn_gate_up", 0)
GATE_UP_EXPS = joined(("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps", 1)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama", QKV),
        ("qwen2", QKV),
        ("gemma4", QKV),
        ("seed_oss", GATE_UP),
        ("qwen3moe", GATE_UP_EXPS),
        ("qwen2", scaled("attn_")),
        ("llama", scaled("ffn_")),
        ("qwen3moe", scaled("_exps")),
        ("gpt-oss", scaled("_exps")),
        ("gpt-oss", scaled("attn_")),
        ("gemma4", scaled("attn_")),
        ("gemma4-e", scaled("ffn_")),
        ("qwen35", scaled("attn_")),
    ],
    ids=[
        "qkv",
        "qkv with biases",
        "qkv of some layers",
        "gate and up",
        "experts",
        "attention",
        "network",
        "of experts",
        "with biases",
        "sinks",
        "gemma4",
        "per layer",
        "recurrent",
    ],
)
def test_no_bit_changes(case: str, change: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    plain = write_gguf(CASES[case], tmp_path / "plain.gguf")
    other = rewritten(plain, tmp_path / "other.gguf", change)
    assert other.read_bytes() != plain.read_bytes()
    assert logits(other) == logits(plain)


@pytest.mark.parametrize("name", ["output.scale", "token_embd.scale", "blk.0.ffn_gate_inp.scale"])
def test_scales_that_no_operation_applies_are_refused(name: str, tmp_path: Path) -> None:
    plain = write_gguf(CASES["qwen3moe"], tmp_path / "plain.gguf")
    other = rewritten(plain, tmp_path / "m.gguf", lambda tensors: {**tensors, name: np.ones(1, np.float32)})
    with pytest.raises(ModelError, match=name):
        engine.load(other, device="cpu", n_ctx=32)


def _chosen(table: bool) -> Callable[[Tensors], Tensors]:
    """A mixture whose tokens all use experts 2, 0 and 1: by a table, or by a bias of the selection."""

    def change(tensors: Tensors) -> Tensors:
        changed = dict(tensors)
        for name in tensors:
            if name.endswith("exp_probs_b.bias"):
                if table:
                    ids = np.tile(np.array([2, 0, 1], np.int32), (N_VOCAB, 1))
                    changed[name.replace("exp_probs_b.bias", "ffn_gate_tid2eid.weight")] = ids
                else:
                    changed[name] = np.zeros(tensors[name].size, np.float32)
                    changed[name][[2, 0, 1]] = 200, 100, 50
        return changed

    return change


def test_a_table_of_experts(tmp_path: Path) -> None:
    plain = write_gguf(CASES["glm4moe"], tmp_path / "plain.gguf")
    found = [logits(rewritten(plain, tmp_path / f"{table}.gguf", _chosen(table))) for table in (False, True)]
    assert found[0] == found[1] != logits(plain)


@pytest.mark.parametrize(
    ("value", "n", "told"),
    [
        (99, 3, "must hold numbers from 0 to"),
        (-1, 3, "must hold numbers from 0 to"),
        (0, 2, r"I32 \[289, 2\] where"),
        (0, 3, "twice in one row"),
    ],
)
def test_a_table_that_is_refused(value: int, n: int, told: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return {**tensors, "blk.1.ffn_gate_tid2eid.weight": np.full((N_VOCAB, n), value, np.int32)}

    path = rewritten(write_gguf(CASES["glm4moe"], tmp_path / "plain.gguf"), tmp_path / "m.gguf", change)
    with pytest.raises(ModelError, match=told):
        engine.load(path, device="cpu", n_ctx=32)
