"""Decode batches of many answers, and with drafts in many rows: only attributes of the backend say how many they have."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cpu.backend import Backend
from engine.decode.orders import Order
from engine.decode.request import Request
from engine.decode.running import Running
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.passes import PassTimes
from engine.speculative.proposal import Proposal
from engine.speculative.speculation import NOTHING, Speculation
from engine.synthetic.model import make_model
from tests.tiers import few

KINDS = {
    "hybrid": ("tiny-qwen35", ""),
    "windows": ("tiny-gemma3", ""),
    "assistant": ("tiny-gemma4", "tiny-gemma4-assistant"),
    "mixture": ("tiny-qwen3moe", ""),
    "latents": ("tiny-deepseek2", ""),
    "convolutions": ("tiny-lfm2", ""),
    "frames": ("tiny-llama4", ""),
    "mamba": ("tiny-granitehybrid", ""),
    "compressed": ("tiny-deepseek4", "tiny-deepseek4-mtp"),
}
"""Shapes of models and of what drafts for them; the hybrid and the latents have a layer that drafts."""

ANSWERS, PADDED = 37, 40
"""Answers of a batch: more than may have drafts; and the rows of their pass."""

ROWS = 32
"""The most rows of a batch with drafts that is tried; on a CPU it is usually 16."""

COUNT = 12
"""Tokens of each answer."""

DRAFTED = 8
"""Answers with drafts: each has up to ROWS / DRAFTED rows in a batch."""


def load(path: Path, kind: str) -> engine.LLM:
    """A random model, and what drafts for it, if there is anything."""
    files = [make_model(path / f"{shape}.gguf", shape, "Q8_0") for shape in KINDS[kind] if shape]
    draft = files[1] if len(files) > 1 else None
    return engine.load(
        files[0], device="cpu", n_ctx=256, n_threads=2, batch_size=8, parallel=ANSWERS, draft_model=draft
    )


class Script(Speculation):
    """Proposes as many drafts as there is room for: by turns those of the model's drafter, if it has one, and tokens of the
    expected answer of which those from a varying place on are wrong."""

    def __init__(self, llm: engine.LLM, sampler: Sampler, expected: Sequence[int]) -> None:
        super().__init__(engine.SpeculationParams(lookup=True, draft_max=15), sampler, llm.draft, 1.0)
        self._expected, self._n_vocab, self._steps = list(expected), llm.config.n_vocab, 0
        self.drafter = llm.draft

    def choose(self, known: Sequence[int], room: int, times: PassTimes) -> Proposal:
        self._steps += 1
        if room < 1:
            return NOTHING
        if self.drafter is not None and self._steps % 2:
            return Proposal(source=self.drafter.name, count=room)
        drafts = self._expected[len(known) : len(known) + room]
        right = self._steps // 2 % 4
        drafts[right:] = [(token + 1) % self._n_vocab for token in drafts[right:]]
        return Proposal(drafts, source="lookup") if drafts else NOTHING


Answer = tuple[list[int], list[bytes]]
"""The tokens of an answer, and the logits that each was chosen from."""


def answers(
    llm: engine.LLM, prompts: Sequence[list[int]], expected: Sequence[Answer] | None = None
) -> tuple[list[Answer], list[int]]:
    """The answers to some prompts, which begin to decode at the same time, and the rows of each batch from then on.
    expected: the answers, if they are drafted."""
    llm.reset()
    requests = []
    for i, ids in enumerate(prompts):
        sampler = Sampler(SamplerParams(temperature=0.8 * (i % 2), seed=i), llm.config.n_vocab)
        script = Script(llm, sampler, ids + expected[i][0]) if expected is not None else None
        request = Request(ids, sampler, COUNT, script)
        requests.append(request)
        llm.core.submit(request)
        while not isinstance(request.state, Running):
            llm.core.step()
        llm.core.order(Order.PAUSE, request)
    for request in requests:
        llm.core.order(Order.PROCEED, request)
    ops: Any = llm.model.ops
    rows, run = list[int](), ops.run

    def noted(forward: Any, batch: Any, *rest: Any) -> Any:
        if forward == llm.model.compute:
            rows.append(batch.rows)
        return run(forward, batch, *rest)

    ops.run = noted
    try:
        while llm.core.step():
            pass
    finally:
        del ops.run
    llm.check_pages()
    items = [list(zip(*request.items, strict=True)) for request in requests]
    return [([*tokens], [row.tobytes() for row in logits]) for tokens, logits in items], rows


@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_many_answers_of_a_batch(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """37 answers in each batch have the tokens and the logits of batches of a single one, where windows pass pages, states
    and blocks of positions are complete, and pages are used again."""
    with load(tmp_path, kind) as llm:
        random, n_vocab = np.random.default_rng(1), llm.config.n_vocab
        prompts = [random.integers(0, n_vocab - 3, int(n)).tolist() for n in random.integers(2, 90, ANSWERS)]
        monkeypatch.setattr(Backend, "decode_answers", 1)
        expected, rows = answers(llm, prompts)
        assert [len(tokens) for tokens, _ in expected] == [COUNT] * ANSWERS
        assert rows == [1] * (ANSWERS * (COUNT - 2))  # the first two tokens come before all run
        monkeypatch.undo()
        found, rows = answers(llm, prompts)
        assert found == expected
        assert rows == [PADDED] * (COUNT - 2)


@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_batches_of_32_rows_with_drafts(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers with drafts, of which some are refused, where windows pass pages, states are rolled back, and blocks of
    positions are complete."""
    with load(tmp_path, kind) as llm:
        random, n_vocab = np.random.default_rng(1), llm.config.n_vocab
        prompts = [random.integers(0, n_vocab - 3, int(n)).tolist() for n in random.integers(2, 90, DRAFTED)]
        expected, rows = answers(llm, prompts)
        assert rows == [DRAFTED] * (COUNT - 2)
    monkeypatch.setattr(Backend, "drafted_rows", ROWS)
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    with load(tmp_path, kind) as llm:
        drafted, rows = answers(llm, prompts, expected)
        assert drafted == expected
        # More rows than answers without drafts, and than a usual batch; and fewer batches than tokens.
        assert max(rows) == ROWS and len(rows) < COUNT - 2
        assert sum(rows) > DRAFTED * (COUNT - 2)  # drafts were refused
