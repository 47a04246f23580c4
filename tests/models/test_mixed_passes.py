"""Passes of several sequences at once: each row has the bits that its sequence has alone, in the logits, in all that is
stored, and in the passes and drafts after it."""

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import engine
from engine.cache.compressed import CompressedCache
from engine.cache.kv import AttentionCache
from engine.cache.latent import LatentCache
from engine.cache.mamba import MambaCache
from engine.cache.pair import PairCache
from engine.cache.recurrent import RecurrentCache
from engine.cache.sequence import Sequence
from engine.cache.short_conv import ShortConvCache
from engine.cpu.attention import first_visible
from engine.decode.evaluate import evaluate
from engine.errors import ContextError
from engine.limits import DECODE_ROWS
from engine.synthetic.model import make_model
from tests.families import quantized, rewritten, write_quantized
from tests.oracle.families.deepseek4 import CASES


class Kind(NamedTuple):
    """A model: its shape, the format of its weights, the type of its cache, the shape of its assistant or of the network that
    drafts for it."""

    shape: str
    quant: str
    cache_type: str = "f16"
    assistant: str = ""


KINDS = {
    "dense": Kind("tiny-llama", "Q4_1", "q8_0"),
    "windows": Kind("tiny-gemma3", "Q8_0"),
    "hybrid": Kind("tiny-qwen35", "Q4_K_M"),
    "mixture": Kind("tiny-qwen3moe", "Q4_K_M", "f32"),
    "hybrid mixture": Kind("tiny-qwen35moe", "Q4_0"),
    "gemma4": Kind("tiny-gemma4-e", "Q4_K_M", "f16", "tiny-gemma4-e-assistant"),
    "gemma3n": Kind("tiny-gemma3n", "Q4_K_M"),
    "latents": Kind("tiny-deepseek2", "Q4_K_M"),
    "chosen latents": Kind("tiny-deepseek32", "Q4_K_M"),
    "shared choice": Kind("tiny-glm-dsa", "Q4_K_M"),
    "convolutions": Kind("tiny-lfm2moe", "Q4_K_M"),
    "mamba": Kind("tiny-granitehybrid-moe", "Q4_K_M"),
    "kda": Kind("tiny-kimi-linear", "Q4_K_M"),
    "parallel": Kind("tiny-cohere2", "Q4_K_M"),
    "blocks": Kind("tiny-nemotron_h_moe", "Q4_K_M"),
    "pairs": Kind("tiny-falcon-h1", "Q4_K_M", "q8_0"),
    "frames": Kind("tiny-llama4", "Q4_K_M"),
    "deepseek4": Kind("", "Q8_0"),
    "eagle3": Kind("tiny-qwen35moe", "Q4_0", "f16", "tiny-eagle3"),
    "dflash": Kind("tiny-gemma4", "Q4_0", "f16", "tiny-dflash"),
}
"""With layers that draft: both hybrids, latents, and deepseek4, whose layer has a file of its own."""

BEGUN = (3, 121, 186)
"""Tokens of each sequence before the first pass of several: the pages of a window have been passed, or will be."""

PASSES: list[dict[int, tuple[int, int]]] = [
    {0: (1, 0), 1: (1, 0), 2: (1, 0)},
    {2: (4, 0), 0: (9, 0)},
    {1: (5, 0), 2: (2, 7)},
    {0: (8, 0), 1: (1, 3), 2: (1, 0)},
    {1: (10, 0), 0: (2, 4)},
    {2: (9, 0), 1: (1, 0), 0: (6, 0)},
    {1: (1, 0), 0: (15, 0)},
    {0: (16, 0)},
    {2: (5, 0), 1: (6, 0), 0: (4, 1)},
]
"""Of each sequence, in the order of a pass: rows that stay, and rows after them that are taken back.  Sequence 0 goes past
its first page, 1 past a block of 128 and 2 past its third page; all of them past multiples of 16."""

LATER = 5


def files(name: str, folder: Path) -> dict[str, Any]:
    """The arguments of ``engine.load`` for a model of a kind."""
    kind, path = KINDS[name], folder / "m.gguf"
    given: dict[str, Any] = {"n_ctx": 256, "device": "cpu", "cache_type": kind.cache_type}
    if not kind.shape:
        layer = CASES[0].write_layer(folder / "layer.f32", "ds4")
        layer = rewritten(layer, folder / "layer.gguf", lambda tensors: quantized(tensors, kind.quant))
        return given | {"path_or_name": write_quantized(CASES[0], path), "draft_model": layer}
    given["path_or_name"] = make_model(path, kind.shape, kind.quant, seed=5)
    if kind.assistant:
        given["draft_model"] = make_model(folder / "a.gguf", kind.assistant, kind.quant, seed=5)
    return given


def in_chunks(memory: np.ndarray, table: np.ndarray, first: int, end: int) -> bytes:
    """Entries first .. end - 1 of memory [pages, 64, ...] of a sequence with this table."""
    chunks = memory[table[: -(-end // 64)]]
    return chunks.reshape(-1, *memory.shape[2:])[first:end].tobytes()


def stored(model: Any, sequence: Sequence) -> list[bytes]:
    """All that later passes of a sequence read: what its layers keep of each position or block that a next token sees, and of
    the latest ones in rings."""
    n, slot = sequence.length, sequence.slot
    found = [array.tobytes() for array in model.save(sequence).arrays]
    both = ((layer.first, layer.second) if isinstance(layer, PairCache) else (layer,) for layer in model.cache.layers)
    for layer in chain.from_iterable(both):
        if isinstance(layer, AttentionCache):
            first, table = int(first_visible(n, layer.window)), layer.table[slot]
            if layer.k_type.quantized:
                # Words of whole pages, in an order of their own.
                found += [memory[:, table[: n // 64]].tobytes() for memory in (layer.keys, layer.values)]
            else:
                found.append(in_chunks(layer.keys.transpose(1, 3, 0, 2), table, first, n))
                found.append(in_chunks(layer.values.transpose(1, 2, 0, 3), table, first, n))
        elif isinstance(layer, LatentCache):
            found.append(in_chunks(layer.rows, layer.table[slot], 0, n))
            if layer.keys is not None:
                found.append(in_chunks(layer.keys.rows.swapaxes(1, 2), layer.table[slot], 0, n))
        elif isinstance(layer, CompressedCache):
            found.append(in_chunks(layer.latents, layer.table[slot], max(0, n - layer.window + 1), n))
            for blocks, swapped in ((layer.compressed, False), (layer.keys, True)):
                if blocks is not None:
                    rows = blocks.rows.swapaxes(1, 2) if swapped else blocks.rows
                    found.append(in_chunks(rows, blocks.table[slot], 0, n // layer.ratio))
        else:
            assert isinstance(layer, (RecurrentCache, ShortConvCache, MambaCache))  # in rings
    return found


def drafts(model: Any, sequence: Sequence, token: int) -> list[bytes]:
    """The logits of a chain of drafts after ``token``, the next one of a sequence; none if nothing drafts."""
    if model.drafter is None:
        return []
    if hasattr(model.drafter, "stand"):
        model.drafter.stand(sequence.length)
    return [model.drafter.forward(token + i, sequence.length + i, sequence).tobytes() for i in range(3)]


def read(model: Any, sequence: Sequence, tokens: np.ndarray) -> np.ndarray:
    """The logits of tokens after those of a sequence, by passes of its rows only."""
    rows = []
    for first in range(0, tokens.size, model.prompt_rows):
        part = tokens[first : first + model.prompt_rows]
        positions = np.arange(sequence.length, sequence.length + part.size, dtype=np.int32)
        rows.append(evaluate(model, part, positions, part.size, sequence))
    return np.concatenate(rows)


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_several_sequences_are_those_of_each_alone(name: str, tmp_path: Path) -> None:
    given = files(name, tmp_path)
    alone, several = engine.load(**given, n_threads=1), engine.load(**given, n_threads=2, parallel=3)
    one: Any = alone.model
    model: Any = several.model
    assert len(model.sequences) == 3 and (model.drafter is None) is (
        name
        in (
            "dense",
            "windows",
            "mixture",
            "gemma3n",
            "convolutions",
            "mamba",
            "kda",
            "parallel",
            "blocks",
            "pairs",
            "frames",
        )
    )
    rng, n_vocab = np.random.default_rng(7), several.config.n_vocab
    kept = [sum(rows.get(i, (0, 0))[0] for rows in PASSES) for i in range(3)]
    texts = [rng.integers(0, n_vocab - 3, BEGUN[i] + kept[i] + LATER).astype(np.int32) for i in range(3)]

    # Together: each begins alone, and the others find everything as they left it.
    found: list[list[np.ndarray]] = [[read(model, model.sequences[i], texts[i][: BEGUN[i]])] for i in range(3)]
    for rows in PASSES:
        assert sum(map(sum, rows.values())) <= DECODE_ROWS
        parts = []
        for i, (right, wrong) in rows.items():
            at = model.sequences[i].length
            tokens = texts[i][at : at + right].tolist()
            parts.append((model.sequences[i], [*tokens, *rng.integers(0, n_vocab, wrong).tolist()]))
        logits_of = model.step(parts)
        for (i, (right, _)), (sequence, tokens), logits in zip(rows.items(), parts, logits_of, strict=True):
            found[i].append(logits[:right].copy())
            sequence.commit(tokens[:right])
    left = [stored(model, sequence) for sequence in model.sequences]
    proposed = [drafts(model, model.sequences[i], int(texts[i][-LATER])) for i in range(3)]
    for i in (1, 2, 0):
        found[i].append(read(model, model.sequences[i], texts[i][-LATER:]))

    for i, text in enumerate(texts):
        alone.reset()
        logits = read(one, one.sequence, text[:-LATER])
        assert stored(one, one.sequence) == left[i]
        assert drafts(one, one.sequence, int(text[-LATER])) == proposed[i]
        logits = np.concatenate([logits, read(one, one.sequence, text[-LATER:])])
        assert np.concatenate(found[i]).tobytes() == logits.tobytes()


def test_shared_pages_are_not_written_to(tmp_path: Path) -> None:
    """A sequence that has taken over what another one has read, and goes on with other tokens from the middle of a page."""
    llm = engine.load(**files("windows", tmp_path), n_threads=1, parallel=2)
    model: Any = llm.model
    first, second = model.sequences
    rng = np.random.default_rng(8)
    text, other = (rng.integers(0, llm.config.n_vocab, n).astype(np.int32) for n in (135, 30))
    read(model, first, text[:130])
    first.settle()
    held = stored(model, first)
    length, keys = second.find(text.tolist())
    assert length == 128
    second.adopt(text[:128].tolist(), keys)
    for sequence in (first, second):
        # The window is still there, but the page of position 100 belongs to both.
        assert sequence.can_truncate(128) and not sequence.can_truncate(100)
        with pytest.raises(ContextError):
            sequence.truncate(100)
    parts = model.step([(second, text[128:135].tolist()), (first, text[130:135].tolist())])
    second.commit(text[128:135].tolist())
    first.commit(text[130:135].tolist())
    assert parts[0][2:].tobytes() == parts[1].tobytes() and stored(model, first) == stored(model, second)
    first.truncate(130)
    second.truncate(128)
    read(model, second, other)
    assert stored(model, first) == held
    # Alone again, the page is its own.
    second.truncate(0)
    assert first.can_truncate(100)
    first.truncate(100)
    again = read(model, first, text[100:130])
    assert stored(model, first) == held and np.isfinite(again).all()
