"""Decode passes of more answers than have drafts, by whole models on a simulated GPU: the bits of the CPU."""

from pathlib import Path

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.cuda import indexer
from engine.synthetic.model import make_model
from tests.cuda.simulated.device import use_simulated
from tests.cuda.simulated.test_parity import SHAPES

ANSWERS = 17
"""Answers of a pass, which is padded to 32 rows."""

BEGUN = {0: 13, 1: 1}
"""Tokens that some sequences hold before: the first one completes a segment of recurrent layers, and begins another."""

DRAFTED = dict.fromkeys(range(ANSWERS), 1) | {0: 3, 1: 8, 2: 5, 16: 2}
"""Rows of the sequences of a pass with drafts."""

REFUSED = {1: 4, 2: 4}
"""Of these rows, how many are not kept."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("architecture", "cache_type"),
    [
        ("qwen3", "i8"),
        ("qwen35moe", "f16"),
        ("gemma3", "q8_0"),
        ("deepseek2", "f16"),
        ("deepseek4", "f16"),
        ("lfm2", "f32"),
        ("granitehybrid", "f16"),
    ],
    ids=["attention", "delta nets", "windows", "latents", "experts", "convolutions", "scans"],
)
def test_passes_of_many_answers(
    architecture: str, cache_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_simulated(monkeypatch)
    monkeypatch.setattr(indexer, "THREADS", 32)
    path = make_model(tmp_path / "a.gguf", SHAPES[architecture], "Q8_0")
    cpu, gpu = (
        engine.load(path, device=device, n_ctx=32, n_threads=1, cache_type=cache_type, parallel=ANSWERS)
        for device in ("cpu", "cuda")
    )
    rng = np.random.default_rng(1)
    known = [rng.integers(0, cpu.config.n_vocab, 20).tolist() for _ in range(ANSWERS)]
    each = dict.fromkeys(range(ANSWERS), 1)
    passes = [BEGUN, DRAFTED, each]
    for counts in passes:
        found = []
        for llm in (cpu, gpu):
            sequences = [llm.model.sequences[slot] for slot in counts]
            parts = [
                (sequence, known[sequence.slot][sequence.length :][:count])
                for sequence, count in zip(sequences, counts.values(), strict=True)
            ]
            found.append(llm.model.step(parts))
            for sequence, tokens in parts:
                refused = REFUSED.get(sequence.slot, 0) if counts is DRAFTED else 0
                sequence.commit(tokens[: len(tokens) - refused])
                sequence.settle()
        for ours, theirs in zip(*found, strict=True):
            assert np.isfinite(ours).all()
            assert ours.tobytes() == theirs.tobytes()
    for llm in (cpu, gpu):
        llm.reset()
        llm.check_pages()
