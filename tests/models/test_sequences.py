"""Models that read several sequences in one pass."""

from pathlib import Path

import numpy as np
import pytest

import engine
from engine.decode.evaluate import evaluate
from engine.synthetic.model import make_model


@pytest.mark.parametrize("name", ["tiny-qwen35", "tiny-qwen35moe", "tiny-lfm2moe", "tiny-granitehybrid"])
def test_rows_of_several_sequences(name: str, tmp_path: Path) -> None:
    """Passes over rows of three sequences are the passes of each alone: every logit, and all that is remembered of each."""
    path = make_model(tmp_path / "tiny.gguf", name, "Q8_0", seed=3)
    together, alone = (engine.load(path, n_ctx=256, n_threads=n, parallel=k).model for n, k in ((2, 3), (1, 1)))
    texts = np.random.default_rng(4).integers(0, together.config.n_vocab, (3, 80)).tolist()
    # For each pass, the tokens that it reads of each sequence; the sequences leave and enter chunks and pages at all times.
    passes = [(30, 1, 0), (1, 14, 17), (5, 1, 1), (0, 3, 40), (16, 16, 16), (12, 33, 1)]
    logits: list[list[np.ndarray]] = [[], [], []]
    for counts in passes:
        sequences = [s for s, count in zip(together.sequences, counts, strict=True) if count]
        tokens = [texts[s.slot][s.length : s.length + counts[s.slot]] for s in sequences]
        found = together.step(list(zip(sequences, tokens, strict=True)))
        for sequence, own, rows in zip(sequences, tokens, found, strict=True):
            sequence.commit(own)
            logits[sequence.slot].append(rows)
    for slot, sequence in enumerate(together.sequences):
        n = sequence.length
        alone.sequence.truncate(0)
        expected = evaluate(alone, np.array(texts[slot][:n], np.int32), np.arange(n, dtype=np.int32), n, alone.sequence)
        assert np.isfinite(expected).all() and n >= 64
        assert np.concatenate(logits[slot]).tobytes() == expected.tobytes()
        saved, its = together.save(sequence).arrays, alone.save(alone.sequence).arrays
        assert [array.tobytes() for array in saved] == [array.tobytes() for array in its]
