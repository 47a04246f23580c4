"""A kind of mixer and a kind of cache that the engine does not have, added from outside: everything that they need is in this
file and in one entry of ``MIXERS``.

The mixer looks one position back: o_t = [rms_norm(a_t, here), rms_norm(a_(t-1), before)] W, with a_(-1) = 0.  Its memory is a
ring of rows a of each sequence.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.arrays import A, Array, Batch, Value
from engine.cache.pages import PagedMemory
from engine.cache.spec import CacheSpec, HeldPages, LayerMemory, Ring, StoredRows, of_sequence
from engine.cache.types import Types
from engine.decode.evaluate import evaluate
from engine.gguf.file import read_gguf
from engine.models import layer, registry
from engine.models.config import ModelConfig
from engine.models.loader import Loader
from engine.models.metadata import Metadata
from engine.models.mixer import Mixer
from engine.models.mixer_config import MixerConfig
from engine.models.needs import cache_specs
from engine.ops.operations import Ops
from engine.synthetic.model import make_model
from tests.families import Packed, edited

N_CTX = 256

# --- the cache ---------------------------------------------------------------------------------------------------


@dataclass
class ShiftCache(LayerMemory[A]):
    """rows float32 [sequences, length, n]: a of position p in row p % length."""

    rows: A

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """A row is read and another one written."""
        return 8.0 * int(self.rows.shape[2])

    def needed(self, slot: int, position: int, pages: HeldPages) -> list[StoredRows[A]]:
        """The row of the position before."""
        return [StoredRows("row before", of_sequence(self.rows, slot), max(0, position - 1), position)]


@dataclass(frozen=True)
class ShiftCacheSpec(CacheSpec):
    """Rows of n elements, so that the latest ``rewind`` tokens can be rolled back."""

    n: int
    rewind: int

    def _length(self, max_rows: int) -> int:
        return max(max_rows, self.rewind) + 1

    def ring_bytes(self, max_rows: int) -> int:
        """The ring of a sequence."""
        return 4 * self.n * self._length(max_rows)

    def rings(self, max_rows: int) -> list[Ring]:
        """The ring, of which a pass reads one row."""
        return [Ring(1, self._length(max_rows))]

    @property
    def snapshot_bytes(self) -> int:
        """A row."""
        return 4 * self.n

    def allocate(self, memory: PagedMemory, types: Types) -> ShiftCache[Any]:
        """Allocate the rings."""
        return ShiftCache(memory.zeros((memory.n_sequences, self._length(memory.max_rows), self.n), np.float32))


# --- the mixer ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShiftConfig(MixerConfig):
    """Rows of n elements."""

    n: int

    def cache_spec(self, rewind: int, decode_rows: int) -> ShiftCacheSpec:
        """A ring of rows."""
        return ShiftCacheSpec(self.n, rewind)

    @property
    def row_elements(self) -> int:
        """Both rows, side by side."""
        return 2 * self.n


@dataclass
class Shift(Mixer):
    """here, before: norms, float32 [n]."""

    here: Array
    before: Array
    eps: float

    def mix(self, ops: Ops, a: Value, memory: ShiftCache[Array], batch: Batch[Array]) -> Value:
        """Both rows, normalized, before the layer ``output``: float32 [rows, 2 n]."""
        rows = ops.plain(a)
        ops.keep_rows(memory.rows, rows, batch)
        return ops.mtp_input(rows, self.here, memory.rows, self.before, batch, self.eps)


def load_shift(loader: Loader, blk: str, config: ShiftConfig) -> Shift:
    output = loader.linear(blk + "shift", config.n, 2 * config.n)
    here, before = (loader.vector(f"{blk}shift_{name}.weight", config.n) for name in ("here", "before"))
    return Shift(output, here, before, loader.config.norm_eps)


KIND: type[MixerConfig] = ShiftConfig

# --- a model with it ---------------------------------------------------------------------------------------------


def write(path: Path, layers: set[int]) -> Path:
    """A small random llama in which these layers have the new mixer."""
    plain = make_model(path.with_suffix(".plain"), "tiny-llama", "F32")
    rng = np.random.default_rng(1)

    def change(tensors: Packed) -> Packed:
        own = tuple(f"blk.{il}.attn_{name}.weight" for il in layers for name in ("q", "k", "v", "output"))
        if len(layers) == 3:
            own = (*own, "rope_freqs.weight")  # nothing is rotated
        kept = {name: value for name, value in tensors.items() if name not in own}
        n, kind = tensors["output_norm.weight"][0].size, tensors["output_norm.weight"][1]
        for il in layers:
            kept[f"blk.{il}.shift.weight"] = rng.standard_normal((n, 2 * n)).astype(np.float32) / np.float32(n), kind
            for name in ("here", "before"):
                kept[f"blk.{il}.shift_{name}.weight"] = rng.uniform(0.5, 1.5, n).astype(np.float32), kind
        return kept

    return edited(plain, path, change=change)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the new mixer its entry, and lets ``llama`` be read with it in some layers."""
    entry = registry.ARCHITECTURES["llama"]

    def use(layers: set[int]) -> None:
        def read(m: Metadata) -> ModelConfig:
            config = entry.read(m)
            own = list(config.layers)
            for il in layers:
                own[il] = replace(own[il], mixer=ShiftConfig(config.n_embd))
            return replace(config, layers=tuple(own))

        monkeypatch.setitem(layer.MIXERS, KIND, load_shift)
        monkeypatch.setitem(registry.ARCHITECTURES, "llama", replace(entry, read=read))

    return use


def reference(path: Path, eps: float, tokens: np.ndarray) -> np.ndarray:
    """The logits of the model whose layers all have the new mixer, in float64 with NumPy: [tokens, n_vocab]."""
    file = read_gguf(path)
    w = {name: np.asarray(t.data.view("<f4"), np.float64).reshape(t.shape) for name, t in file.tensors.items()}

    def norm(x: np.ndarray, weight: str) -> np.ndarray:
        return np.asarray(x / np.sqrt((x * x).mean(1, keepdims=True) + eps) * w[weight + ".weight"])

    x = w["token_embd.weight"][tokens]
    for il in range(3):
        a = norm(x, f"blk.{il}.attn_norm")
        here, before = norm(a, f"blk.{il}.shift_here"), norm(a, f"blk.{il}.shift_before")
        before = np.vstack([np.zeros_like(before[:1]), before[:-1]])
        x = x + np.hstack([here, before]) @ w[f"blk.{il}.shift.weight"].T
        b = norm(x, f"blk.{il}.ffn_norm")
        gate, up = (b @ w[f"blk.{il}.ffn_{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{il}.ffn_down.weight"].T
    return np.asarray(norm(x, "output_norm") @ w.get("output.weight", w["token_embd.weight"]).T)


def test_logits_are_those_of_the_formula(known: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {0, 1, 2})
    known({0, 1, 2})
    tokens = np.random.default_rng(2).integers(3, 200, 40)
    llm = engine.load(path, device="cpu", n_ctx=N_CTX, n_threads=1)
    found, expected = llm.logits(tokens.tolist()), reference(path, llm.config.norm_eps, tokens)
    assert np.abs(found - expected).max() < 1e-5 * expected.std()


def test_a_model_can_mix_it_with_attention(known: Any, tmp_path: Path) -> None:
    """Passes of any sizes, tokens that are rolled back, snapshots, two sequences, and texts that begin alike."""
    path = write(tmp_path / "m.gguf", {1})
    known({1})
    tokens = np.random.default_rng(3).integers(3, 200, 150).tolist()
    llm = engine.load(path, device="cpu", n_ctx=N_CTX, n_threads=1, parallel=2)
    kinds = [type(one).__name__ for one in llm.cache.layers]
    assert kinds == ["AttentionCache", "ShiftCache", "AttentionCache"]
    assert llm.cache.n_bytes == sum(
        spec.n_bytes(N_CTX, llm.cache.max_rows, llm.cache.layers[0].types, 2, 2 * N_CTX)
        for spec in cache_specs(llm.config, llm.model.rewind)
    )
    whole = llm.logits(tokens)
    llm.reset()
    model, sequence, other = llm.model, *llm.model.sequences

    def read(first: int, end: int, into: Any) -> bytes:
        given = np.array(tokens[first:end], np.int32)
        return evaluate(model, given, np.arange(first, end, dtype=np.int32), 1, into).tobytes()

    for first, end in ((0, 1), (1, 18), (18, 100)):
        assert read(first, end, sequence) == whole[end - 1].tobytes()
    read(0, 9, other)
    assert read(100, 110, sequence) == whole[109].tobytes() and read(9, 10, other) == whole[9].tobytes()
    sequence.truncate(104)
    assert read(104, 106, sequence) == whole[105].tobytes()
    kept = model.save(sequence)
    assert [array.shape for array in kept.arrays] == [(1, llm.config.n_embd)]
    read(106, 150, sequence)
    model.restore(kept, sequence)
    assert read(106, 107, sequence) == whole[106].tobytes()


def test_answers_continue_what_others_have_read(known: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {0, 2})
    known({0, 2})
    prompt = np.random.default_rng(4).integers(3, 200, 140).tolist()

    def answers(**options: Any) -> tuple[list[list[int]], list[int]]:
        llm = engine.load(path, device="cpu", n_ctx=N_CTX, n_threads=1, **options)
        done = [
            llm.complete(given, max_tokens=12, ignore_eos=True, temperature=0.0)
            for given in (prompt, prompt[:129] + [9])
        ]
        return [one.ids for one in done], [one.timings.cache_n for one in done]

    alone, _ = answers(snapshot_bytes=0)
    found, read = answers(batch_size=16)
    assert found == alone and read == [0, 128]


def test_what_the_table_does_not_know_is_not_loaded(
    known: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf", {1})
    known({1})
    monkeypatch.delitem(layer.MIXERS, KIND)
    with pytest.raises(KeyError, match="ShiftConfig"):
        engine.load(path, device="cpu", n_ctx=N_CTX)
