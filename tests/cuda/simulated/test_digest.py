"""The digests of rows of logits in the simulator: those of the CPU, whatever the number of threads, for the rows of every
entry of a step."""

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import engine
from engine.cuda.digest import BLOCKS, SUMS, WORDS, blocks_of, digest, join_digests
from engine.cuda.runtime.simulator import run
from engine.decode.device_sampler import DIGEST_PARTS, DeviceSampler
from engine.decode.replayed_rows import ReplayedRows
from engine.errors import NotFinite
from engine.grammar.grammar import Grammar
from engine.limits import DECODE_ANSWERS, DECODE_ROWS
from engine.receipts.form import chain_of
from engine.sampling.row_digest import PackedDigest, row_digest, unpacked
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from tests.cuda.simulated.device import use_simulated
from tests.cuda.simulated.test_speculation import NOISE, PROMPT, SHAPE

SLOTS = 3


def digests(
    logits: np.ndarray,
    n_vocab: int,
    threads: int,
    starts: np.ndarray,
    sequences: np.ndarray,
    step: np.ndarray,
    found: np.ndarray,
) -> None:
    """Compute the digests of rows of logits."""
    rows, stride = logits.shape
    sums = np.full((rows, BLOCKS, SUMS), 7, np.uint64)
    blocks = blocks_of(n_vocab, threads)
    run(digest(threads), (blocks, rows), threads, [logits, stride, n_vocab, starts, sums], seed=1)
    where = [starts, sequences, step, blocks, sums, DIGEST_PARTS, found]
    run(join_digests(), rows, 32, [logits, stride, *where], seed=1)
    used = starts[max(DECODE_ROWS, rows)]
    assert (sums[used:] == 7).all()  # nothing is computed for padding


@pytest.mark.parametrize(("n_vocab", "threads"), [(2, 32), (40, 32), (300, 64), (4500, 32)])
def test_digest(n_vocab: int, threads: int) -> None:
    rng = np.random.default_rng(n_vocab)
    logits = rng.standard_normal((5, n_vocab + 3)).astype(np.float32)
    logits[0, :2], logits[1, 1], logits[2, :2] = (0.0, -0.0), -np.inf, 9.0
    logits[:, n_vocab:] = np.inf  # what is not a logit
    # Slot 2 has three rows, slot 0 one, and the fifth row is padding.
    starts = np.full(DECODE_ROWS + 1, 4, np.int32)
    starts[:2] = 0, 3
    sequences = np.zeros(DECODE_ROWS, np.int32)
    sequences[:3] = 2
    step = np.array([9, 0, 5], np.int32)
    found = np.full((SLOTS, DIGEST_PARTS, DECODE_ROWS, WORDS), -1, np.int32)
    digests(logits, n_vocab, threads, starts, sequences, step, found)
    expected = [row_digest(row[:n_vocab]) for row in logits]
    memory = SimpleNamespace(digest_memory=(found, 0), taken=[10, 1, 6])
    of = cast(Any, DeviceSampler.digests)
    assert [*map(unpacked, of(memory, 2, 3))] == expected[:3]
    assert [*map(unpacked, of(memory, 0, 1))] == expected[3:4]
    written = found.any(axis=3) & (found != -1).any(axis=3)
    assert written.sum() == 4


def test_many_answers() -> None:
    """A pass of more answers than have drafts, padded to 32 rows."""
    rng, n, rows = np.random.default_rng(1), 20, 32
    logits = rng.standard_normal((rows, 40)).astype(np.float32)
    starts = np.minimum(np.arange(DECODE_ANSWERS + 1), n).astype(np.int32)
    sequences = np.zeros(DECODE_ANSWERS, np.int32)
    sequences[:n] = rng.permutation(n)
    step = rng.integers(0, 9, n).astype(np.int32)
    found = np.full((n, DIGEST_PARTS, DECODE_ROWS, WORDS), -1, np.int32)
    digests(logits, 40, 32, starts, sequences, step, found)
    memory = SimpleNamespace(digest_memory=(found, 0), taken=[n + 1 for n in step.tolist()])
    of = cast(Any, DeviceSampler.digests)
    for row, slot in enumerate(sequences[:n].tolist()):
        assert [*map(unpacked, of(memory, slot, 1))] == [row_digest(logits[row])]
    assert (found != -1).any(axis=3).sum() == n


def test_receipts_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of answers whose tokens the GPU chooses, in company: greedily with drafts of lookup, from logits that are changed
    with drafts of a model on the GPU, and with masks; and the CPU verifies them."""
    pytest.importorskip("llguidance", reason="grammars need the extra serve")
    use_simulated(monkeypatch)
    path = make_model(tmp_path / "a.gguf", SHAPE, "Q8_0")
    made: list[int] = []
    digests = DeviceSampler.digests

    def noted(self: DeviceSampler, slot: int, count: int) -> list[PackedDigest]:
        made.append(count)
        return digests(self, slot, count)

    monkeypatch.setattr(DeviceSampler, "digests", noted)
    cpu = engine.load(path, device="cpu", n_ctx=24)
    gpu = engine.load(path, device="cuda", n_ctx=24, parallel=2, draft_model=path)
    prompts, most = [PROMPT, [20, 7]], 5
    for options, drafts in (
        ({"temperature": 0.0, "seed": 1}, SpeculationParams(lookup=True)),
        (NOISE, SpeculationParams(draft_max=2)),
        (NOISE | {"grammar": Grammar.regex("[a-z0-9 ]{5,9}")}, SpeculationParams(enabled=False)),
    ):
        more: dict[str, Any] = {"max_tokens": most, "ignore_eos": True, "receipt": True, **options}
        expected = [answer.receipt() for answer in cpu.complete(prompts, **more)]
        made.clear()
        answers = gpu.complete(prompts, speculation=drafts, **more)
        assert [answer.receipt() for answer in answers] == expected
        assert sum(made) >= 2 * (most - 1)  # the host chooses the first token of each
        assert all(cpu.verify(answer.receipt()).same for answer in answers)
    assert gpu.verify(expected[0]).same


def test_a_replay_reads_rows_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU says of receipts what the CPU says, and copies no logits to the host unless it cannot choose the tokens."""
    use_simulated(monkeypatch)
    path = make_model(tmp_path / "a.gguf", SHAPE, "Q8_0")
    cpu, gpu = (engine.load(path, device=device, n_ctx=24) for device in ("cpu", "cuda"))
    read: list[tuple[int, int]] = []
    replayed = ReplayedRows.__call__

    def noted(self: ReplayedRows, rows: Any, first: int) -> np.ndarray:
        read.append((first, rows.shape[0]))
        return replayed(self, rows, first)

    monkeypatch.setattr(ReplayedRows, "__call__", noted)
    more: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "receipt": True}
    for options, here in (
        ({"temperature": 0.0, "seed": 1}, True),
        (NOISE, True),
        (NOISE | {"dry_multiplier": 0.8}, False),
    ):
        receipt = cpu.complete(PROMPT, **more, **options).receipt()
        read.clear()
        assert gpu.verify(receipt).same
        assert read == ([(len(PROMPT) - 1, 4)] if here else [])
    receipt = cpu.complete(PROMPT, **more, **NOISE).receipt()
    for field, at, value in (
        ("tokens", 2, receipt["tokens"][2] ^ 1),
        ("digests", 1, receipt["digests"][0]),
        ("best", 3, [[receipt["best"][3][0][0], receipt["best"][3][0][1] + 0.5], receipt["best"][3][1]]),
    ):
        changed = copy.deepcopy(receipt)
        changed[field][at] = value
        changed["chain"] = chain_of(changed)
        found = gpu.verify(changed)
        assert found == cpu.verify(changed) and found.token == at


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused(value: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_simulated(monkeypatch)
    gpu = engine.load(make_model(tmp_path / "a.gguf", SHAPE, "Q8_0"), device="cuda", n_ctx=24)
    reader = gpu.row_reader(Sampler(SamplerParams(temperature=0.0, seed=1), SHAPE.n_vocab), [1, 2, 3, 4])
    assert reader is not None
    rows = np.zeros((2, SHAPE.n_vocab), np.float32)
    reader.check(reader(gpu.model.ops.upload(rows), 1), 1)
    rows[1] = value if value < 0 else 0.0
    rows[1, 7] = value
    with pytest.raises(NotFinite, match="after token 2, counted"):
        reader.check(reader(gpu.model.ops.upload(rows), 1), 1)
