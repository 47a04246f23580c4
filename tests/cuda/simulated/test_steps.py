"""Steps of several answers on a simulated GPU, of models so small that many passes can be run: their logits depend on the
latest token alone, and what they remember of a position is these logits."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.arrays import Batch
from engine.cache.kv import AttentionCacheSpec, KVCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.cache.types import F16
from engine.cuda import backend, sample
from engine.cuda.runtime.compiler import Specialization
from engine.decode.device_steps import DeviceSteps
from engine.decode.host_steps import HostSteps
from engine.decode.request import Request
from engine.decode.running import InFlightRequest, Running, follow, launch
from engine.gguf.quants import FORMATS
from engine.ops.weight import Weight
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.draft_model import DraftModel
from engine.speculative.mtp import MTPDraft
from engine.speculative.params import SpeculationParams
from engine.speculative.proposal import Proposal
from tests.cuda.simulated.device import SimulatedDevice
from tests.cuda.simulated.test_sample import maxima_of
from tests.tiers import few

N_CTX = 24
N_VOCAB = 40
SLOTS = 3
F32 = next(entry for entry in FORMATS.values() if entry.name == "F32")
TABLE = (np.random.default_rng(1).standard_normal((N_VOCAB, N_VOCAB)) * 2).astype(np.float32)
"""The logits after each token."""

NOISE: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "seed": 5, "repeat_penalty": 1.3, "logit_bias": {17: 2.0}}
SAMPLERS = [{"temperature": 0.0}, NOISE, {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "seed": 8}]
"""A greedy one, one with changes of logits, and one without."""
PROMPTS = [3, 7, 11], [20, 7], [5, 12]
NAMES = "abc"


class Table:
    """A model whose passes look logits up and store them by slot and position."""

    drafter: "Table | None" = None
    relay = None

    def __init__(self, ops: Any, n_ctx: int = N_CTX) -> None:
        self.ops = ops
        self.config = SimpleNamespace(n_vocab=N_VOCAB)
        shapes = [AttentionCacheSpec(1, 4, 4)]
        self.cache = KVCache(shapes, n_ctx, 16, F16, ops.zeros, ops.store, n_sequences=SLOTS)
        self.sequences = [TokenSequence(self.cache, slot) for slot in range(SLOTS)]
        self.sequence = self.sequences[0]
        self.memory = ops.zeros((SLOTS, n_ctx, N_VOCAB), np.float32)
        self._logits = ops.weight(Weight("table", F32, N_VOCAB, TABLE.view(np.uint8)))
        #: The number of rows of each pass that was recorded, and whether it was mixed.
        self.recorded: list[tuple[int, bool]] = []

    def compute(self, batch: Any, n_logits: int) -> Any:
        self.recorded.append((batch.rows, batch.mixed))
        logits = self.ops.plain(self.ops.embed(self._logits, batch.tokens))
        self.ops.keep_rows(self.memory, logits, batch)
        return logits[batch.rows - n_logits : batch.rows] if n_logits else None

    @property
    def passes(self) -> tuple[Any]:
        return (self.compute,)

    def reserve(self, length: int) -> None:
        assert length <= self.cache.n_ctx

    def hold(self, slot: int, tokens: Sequence[int], salt: str = "") -> None:
        """Make a sequence hold exactly ``tokens`` with a salt, without a pass."""
        sequence, n_ctx = self.sequences[slot], self.cache.n_ctx
        sequence.truncate(0)
        sequence.belong(salt)
        sequence.reserve(len(tokens))
        sequence.commit(tokens)
        self.ops.store(self.memory.reshape(SLOTS * n_ctx, N_VOCAB), slot * n_ctx, TABLE[list(tokens)])

    def read(self, slot: int, token: int) -> None:
        """Read a token by a pass of the host."""
        sequence, n = self.sequences[slot], self.sequences[slot].length
        sequence.claim(n, 1)
        ids, positions, slots = (np.array([number], np.int32) for number in (token, n, slot))
        self.ops.run(self.compute, Batch(ids, positions, slots), 0)
        sequence.commit([token])

    def remembers(self, sequence: TokenSequence) -> bool:
        """Whether its memory is that of a sequence's tokens."""
        return np.array_equal(self.ops.download(self.memory)[sequence.slot, : sequence.length], TABLE[sequence.tokens])


class OnHost:
    """The same model on the host, without a memory."""

    def __init__(self) -> None:
        self.cache = KVCache([], N_CTX, 16, F16, np.zeros)
        self.sequence = TokenSequence(self.cache)
        self.ops = SimpleNamespace(padded_rows=lambda rows, mixed: rows)

    def step(self, parts: Sequence[tuple[TokenSequence, Sequence[int]]]) -> list[np.ndarray]:
        for sequence, tokens in parts:
            sequence.claim(sequence.length, len(tokens))
        return [TABLE[list(tokens)] for _, tokens in parts]


def alone(i: int, sampler: Sampler) -> list[int]:
    """A prompt and its answer up to the end of the context, computed alone, of which the host chooses the tokens."""
    model: Any = OnHost()
    model.sequence.commit(PROMPTS[i][:-1])
    request = Request(PROMPTS[i], sampler, N_CTX - len(PROMPTS[i]))
    return [*PROMPTS[i], *(token for token, _ in follow(Running(request, model.sequence, HostSteps(model))))]


class Party:
    """Answers a, b and c of a model on a simulated GPU, in slots 2, 0 and 1, which continue as they do alone.  Drafts of the
    host are words, "+" for each right one and "-" for a wrong one; a number is that of drafts made on the device."""

    def __init__(self, model: Any, draft: Any, alone: Sequence[list[int]]) -> None:
        """alone: each prompt and its whole answer, computed alone on the CPU, where the host chooses tokens."""
        self.model: Any = model
        self.draft: Any = draft
        self.steps: Any = DeviceSteps(model.ops, model)
        self.alone = dict(zip(NAMES, alone, strict=True))
        self.n_vocab = model.config.n_vocab
        self.runs: dict[str, Running] = {}
        self.flights: list[list[str]] = []
        #: The number of tokens of each step of an answer.
        self.sizes: dict[str, list[int]] = {name: [] for name in NAMES}

    def sampler(self, i: int) -> Sampler:
        """That of an answer."""
        return Sampler(SamplerParams(**SAMPLERS[i]), self.n_vocab)

    def hold(self, sequence: TokenSequence, tokens: list[int]) -> None:
        """Make a sequence hold exactly ``tokens``."""
        raise NotImplementedError

    def check(self, sequence: TokenSequence) -> None:
        """Compare what is remembered of a sequence with what it should be."""
        raise NotImplementedError

    def sequence(self, name: str) -> TokenSequence:
        """That of an answer."""
        sequence: TokenSequence = self.model.sequences[(2, 0, 1)[NAMES.index(name)]]
        return sequence

    def join(self, name: str, n: int = 0) -> None:
        """Let an answer take part, with n tokens that are already known."""
        i, alone = NAMES.index(name), self.alone[name]
        known = alone[: len(PROMPTS[i]) + n]
        self.hold(self.sequence(name), known[:-1])
        request = Request(known, self.sampler(i), len(alone) - len(known))
        self.runs[name] = Running(request, self.sequence(name), self.steps)
        self.steps.begin(self.runs[name])

    def script(self, name: str, wrong: int) -> None:
        """The device drafts the tokens of an answer that joins next, but for that at position ``wrong``."""
        script = np.full(self.model.cache.n_ctx, -1, np.int32)
        script[: len(self.alone[name])] = self.alone[name]
        script[wrong] = (script[wrong] + 1) % self.n_vocab
        self.draft.script = script

    def start(self, **words: str | int) -> None:
        """Start a pass of some answers with these drafts."""
        batch = []
        for name, word in words.items():
            run, proposal = self.runs[name], Proposal()
            if isinstance(word, str):
                following = self.alone[name][len(run.known) :]
                pairs = zip(following, word, strict=False)
                proposal.tokens = [(token + (sign == "-")) % self.n_vocab for token, sign in pairs]
            elif word:
                proposal = Proposal(device_draft=self.draft, count=word)
            batch.append(InFlightRequest(run, proposal))
        launch(self.steps, batch)
        self.flights.append(list(words))

    def take(self) -> None:
        """Take the results of a pass; each answer continues as it does alone."""
        for name, step in zip(self.flights.pop(0), self.steps.take(), strict=True):
            assert step.error is None
            run = self.runs[name]
            run.took(step, 0.0)
            self.sizes[name].append(len(step.tokens))
            assert run.known == self.alone[name][: len(run.known)]

    def step(self, **words: str | int) -> None:
        """A pass whose result is awaited."""
        self.start(**words)
        self.take()

    def leave(self, *names: str) -> None:
        """End answers; what is remembered of all answers is right."""
        for name in names:
            self.steps.end(self.runs[name])
        for run in self.runs.values():
            assert run.sequence.tokens == run.known[:-1]
            self.check(run.sequence)
        for name in names:
            del self.runs[name]

    def abandon(self, name: str) -> None:
        """End an answer with steps in flight, whose tokens nobody wants."""
        self.steps.end(self.runs.pop(name))
        left = ([other for other in names if other != name] for names in self.flights)
        self.flights = [names for names in left if names]


class Tables(Party):
    """Answers of a table."""

    def __init__(self, ops: Any, draft: Any = None) -> None:
        model = Table(ops)
        self.n_vocab = N_VOCAB
        super().__init__(model, draft(model) if draft else None, [alone(i, self.sampler(i)) for i in range(SLOTS)])

    def hold(self, sequence: TokenSequence, tokens: list[int]) -> None:
        self.model.hold(sequence.slot, tokens)

    def check(self, sequence: TokenSequence) -> None:
        assert self.model.remembers(sequence)
        drafts = self.draft.sequence(sequence.slot) if self.draft else None
        if drafts is not None:
            assert drafts.tokens == sequence.tokens[: drafts.length]
            assert self.draft.llm.model.remembers(drafts)

    def read(self, name: str) -> None:
        """Read a token of the prompt of an answer, which does not yet take part."""
        self.model.read(self.sequence(name).slot, PROMPTS[NAMES.index(name)][0])


class Device(SimulatedDevice):
    """NumPy computes the first part of the choice of tokens, which has the most threads."""

    def launch(
        self,
        specialization: Specialization,
        grid: int | tuple[int, ...],
        block: int,
        arguments: Sequence[Any],
        percent: int = 0,
    ) -> None:
        if specialization.kernel is not sample.maxima or self.capturing:
            super().launch(specialization, grid, block, arguments, percent)
            return
        logits, stride, n_vocab, _, best = arguments
        assert isinstance(grid, tuple)
        for row in range(grid[1]):
            x = self.at(logits + 4 * stride * row, 4 * n_vocab).view(np.float32)
            found = maxima_of(x, sample.GROUPS)
            self.write(best + found.nbytes * row, found)


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(backend, "Device", Device)
    monkeypatch.setattr(sample, "GROUPS", 32)
    return backend.Backend(max_rows=16)


def laid_out(ops: Any) -> list[str]:
    """A list of the launches of ``lay_out`` from now on."""
    found: list[str] = []
    ops.device.on_launch = lambda name: found.append(name) if name == "lay_out" else None
    return found


def test_answers_ride_together(ops: Any) -> None:
    """They join and leave between passes, with drafts of the host, with rows of padding, with passes in flight, and with
    prompts that are read in between."""
    party = Tables(ops)
    party.join("a")
    party.step(a="+")
    party.read("b")
    party.step(a="")
    party.join("b")
    party.step(a="", b="+-")
    party.join("c")
    layouts = laid_out(ops)
    for _ in range(2):
        party.start(a="", b="", c="")
    assert len(layouts) == 2  # the row of padding moves
    party.take()
    party.take()
    party.leave("b")
    party.start(a="", c="")
    party.start(a="", c="")
    assert len(layouts) == 3
    party.take()
    party.take()
    party.step(a="-+", c="++")
    party.leave("c", "a")
    assert party.sizes == {"a": [2, 1, 1, 1, 1, 1, 1, 1], "b": [2, 1, 1], "c": [1, 1, 1, 1, 3]}
    assert {rows for rows, mixed in party.model.recorded if mixed} == {2, 4, 8}


def test_an_answer_ends_with_passes_in_flight(ops: Any) -> None:
    """Nobody wants its tokens; those of the others arrive, and its slot is free for another."""
    party = Tables(ops)
    for name in "abc":
        party.join(name)
    for _ in range(3):
        party.start(a="", b="", c="")
    party.start(a="")
    party.abandon("a")
    for _ in range(3):
        party.take()
    party.join("a", n=1)
    party.step(c="", a="+")
    party.leave("a", "b", "c")
    assert party.sizes == {"a": [2], "b": [1] * 3, "c": [1] * 4}


def test_more_answers_than_have_drafts(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each continues as it does alone, with two passes in flight, with rows of padding, and when one of them has left."""
    count = 18
    monkeypatch.setitem(globals(), "SLOTS", count)
    model: Any = Table(ops)
    steps, texts, runs = DeviceSteps(ops, model), [], []
    for slot in range(count):
        i = slot % len(PROMPTS)
        sampler = Sampler(SamplerParams(**SAMPLERS[i]), N_VOCAB)
        texts.append(alone(i, sampler))
        known = texts[-1][: len(PROMPTS[i]) + slot // 3]
        model.hold(slot, known[:-1])
        runs.append(Running(Request(known, sampler, N_CTX - len(known)), model.sequences[slot], steps))
        steps.begin(runs[-1])
    for part in (runs, runs, runs[1:]):
        launch(steps, [InFlightRequest(run, Proposal()) for run in part])
    for part in (runs, runs, runs[1:]):
        for run, step in zip(part, steps.take(), strict=True):
            assert step.error is None
            run.took(step, 0.0)
    for i, (run, text) in enumerate(zip(runs, texts, strict=True)):
        n_known = len(PROMPTS[i % len(PROMPTS)]) + i // 3 + (3 if i else 2)
        assert run.known == text[:n_known] and run.sequence.tokens == run.known[:-1]
        assert model.remembers(run.sequence)
    assert {rows for rows, mixed in model.recorded if mixed} == {32}


@pytest.mark.parametrize("draft", few(["own_layer", "draft_model", None]))
def test_drafts_of_more_rows_than_one_answer_has(ops: Any, draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine answers with 0 to 2 drafts each, right ones and wrong ones, of the host or of the device, continue as they do
    alone."""
    count = 9
    monkeypatch.setitem(globals(), "SLOTS", count)
    model: Any = Table(ops)
    source: Any = globals()[draft](model) if draft else None
    steps, texts, runs = DeviceSteps(ops, model), [], []
    for slot in range(count):
        i = slot % len(PROMPTS)
        sampler = Sampler(SamplerParams(**SAMPLERS[i]), N_VOCAB)
        texts.append(alone(i, sampler))
        known = texts[-1][: len(PROMPTS[i]) + slot // 3]
        model.hold(slot, known[:-1])
        runs.append(Running(Request(known, sampler, N_CTX - len(known)), model.sequences[slot], steps))
        if source is not None:
            source.script = np.array(texts[-1], np.int32)
            source.script[len(known) + 1] = (source.script[len(known) + 1] + (slot % 2)) % N_VOCAB
        steps.begin(runs[-1])
        if source is not None and slot == 0:
            # The first answer with drafts decides what makes them, for those that begin later.
            launch(steps, [InFlightRequest(runs[0], Proposal(device_draft=source, count=1))])
            runs[0].took(steps.take()[0], 0.0)
    known = [len(run.known) for run in runs]
    batch, expected = [], []
    for slot, (run, text) in enumerate(zip(runs, texts, strict=True)):
        n = (2, 0, 1, 2)[slot % 4]
        expected.append(1 + (n if slot % 2 == 0 or source is None else min(n, 1)))
        drafts = text[len(run.known) :][:n]
        if source is None and n == 2 and slot % 3 == 0:
            drafts[1], expected[-1] = (drafts[1] + 1) % N_VOCAB, 2
        proposal = Proposal(drafts) if source is None else Proposal(device_draft=source if n else None, count=n)
        batch.append(InFlightRequest(run, proposal))
    launch(steps, batch)
    for slot, (run, step) in enumerate(zip(runs, steps.take(), strict=True)):
        assert step.error is None
        run.took(step, 0.0)
        assert slot == 0 or len(step.tokens) == expected[slot]
    launch(steps, [InFlightRequest(run, Proposal()) for run in runs])
    for run, step in zip(runs, steps.take(), strict=True):
        run.took(step, 0.0)
    for begun, run, text in zip(known, runs, texts, strict=True):
        assert run.known == text[: len(run.known)] and len(run.known) >= begun + 2
        assert run.sequence.tokens == run.known[:-1]
        assert model.remembers(run.sequence)
    assert {rows for rows, mixed in model.recorded if mixed} == {32, 16}


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(12))
def test_any_passes(ops: Any, seed: int) -> None:
    party, rng = Tables(ops), np.random.default_rng(seed)
    for name in NAMES:
        party.join(name, int(rng.integers(3)))
    for _ in range(5):
        names = rng.permutation([*NAMES])[: rng.integers(1, 4)]
        party.step(**{name: "".join(rng.choice(["+", "-"], rng.integers(3), p=[0.7, 0.3])) for name in names})
    party.leave(*NAMES)


def test_to_the_end_of_the_context(ops: Any) -> None:
    """Of one answer, while another goes on."""
    party = Tables(ops)
    party.join("a")
    party.join("b", N_CTX - len(PROMPTS[1]) - 5)
    party.step(a="+", b="++")
    party.start(a="", b="")
    party.start(a="", b="")
    party.take()
    party.take()
    assert len(party.runs["b"].known) == N_CTX
    party.leave("b")
    party.step(a="")
    party.leave("a")


# --- drafts made on the device ------------------------------------------------------------------------------------


def own_layer(model: Table) -> MTPDraft:
    """Drafts of the model's own layer, without a cache of its own."""
    model.drafter = Table(model.ops)
    llm: Any = SimpleNamespace(model=model, config=model.config, n_ctx=N_CTX)
    return MTPDraft(llm)


def draft_model(model: Table) -> DraftModel:
    """Drafts of a model with a memory of its own, whose first pass in a step reads two tokens."""
    own = Table(model.ops, model.cache.n_ctx)
    tokenizer = SimpleNamespace(vocabulary=SimpleNamespace(tokens=[str(i) for i in range(N_VOCAB)]))
    given = {"config": model.config, "n_ctx": own.cache.n_ctx, "tokenizer": tokenizer, "path": Path("table")}
    llm: Any = SimpleNamespace(model=own, cache=own.cache, hold=own.hold, reserve=own.reserve, **given)
    return DraftModel(llm, llm)


@pytest.mark.parametrize("draft", [own_layer, draft_model])
def test_drafts_of_the_device_for_two_answers(ops: Any, draft: Any) -> None:
    """Right ones and wrong ones, of another number for each, for one of them only, with two passes in flight, and after one
    answer alone."""
    party = Tables(ops, draft)
    party.script("a", wrong=8)
    party.join("a")
    party.step(a=1)
    party.script("b", wrong=4)
    party.join("b")
    party.start(a=2, b=1)
    party.start(a=1, b=1)
    party.take()
    party.take()
    assert party.sizes == {"a": [2, 3, 1], "b": [2, 1], "c": []}
    party.step(a=1, b=0)
    party.step(a=0, b=2)
    party.leave("a", "b")
    assert party.sizes == {"a": [2, 3, 1, 2, 1], "b": [2, 1, 1, 3], "c": []}


@pytest.mark.parametrize("draft", few([draft_model, own_layer]))
def test_its_own_drafts_for_three_answers(ops: Any, draft: Any) -> None:
    """Without a script: drawn by the sampler of each answer with the tokens that it has, so all are right."""
    party = Tables(ops, draft)
    for name in NAMES:
        party.join(name)
    party.step(a=1, b=2, c=1)
    party.leave(*NAMES)
    assert party.sizes == {"a": [2], "b": [3], "c": [2]}


def test_drafts_at_the_end_of_the_context(ops: Any) -> None:
    """For an answer whose last token is due, as many are made as for another, but nothing outside the context changes."""
    party = Tables(ops, draft_model)
    party.join("a")
    party.join("b", N_CTX - len(PROMPTS[1]) - 1)
    party.step(a=3, b=0)
    party.leave("a", "b")


def test_pages_for_all_drafts(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass makes as many drafts for each answer, so it needs pages for all of them, in both caches."""
    model: Any = Table(ops, 128)
    draft: Any = draft_model(model)
    steps: Any = DeviceSteps(ops, model)
    monkeypatch.setattr(steps._graphs, "of", lambda *given: (SimpleNamespace(launch=lambda: None), None))
    batch = []
    for slot, count in ((1, 3), (2, 0)):
        model.hold(slot, [1] * 62)
        run: Any = SimpleNamespace(sequence=model.sequences[slot], sampler=Sampler(SamplerParams(), N_VOCAB))
        run.known, run.params = [1] * 63, SpeculationParams()
        batch.append(InFlightRequest(run, Proposal(device_draft=draft, count=3) if count else Proposal()))
        steps.begin(run)
    steps.start(batch)
    for sequence in (model.sequences[2], draft.sequence(2)):
        assert [[*sequence.pages(paging)] for paging in model.cache.pools] == [[0, 1]]


@pytest.mark.parametrize("draft", few([None, draft_model]))
def test_all_answers_begin_again_after_an_error(ops: Any, draft: Any) -> None:
    """With passes in flight, one of which has been taken in part, and one of which could not be started."""
    party = Tables(ops, draft)
    for name in "ab":
        party.join(name)
    count = 1 if draft else ""
    party.step(a=count, b=count)
    party.start(a=count, b=count)
    party.start(a=count, b=count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(party.steps._rows, "place", None)
        with pytest.raises(TypeError):
            party.start(b="")
        patch.setattr(party.runs["b"].sequence, "commit", None)
        with pytest.raises(TypeError):
            party.steps.take()
    party.steps.drop()
    party.flights.clear()
    n = {name: len(party.runs[name].known) - len(PROMPTS[NAMES.index(name)]) for name in "ab"}
    for name in "ba":
        party.join(name, n[name])
    party.join("c")
    party.step(a=count, b=count, c="" if draft is None else 1)
    party.start(a="", c="")
    party.step(b="")
    party.take()
    party.leave(*NAMES)
