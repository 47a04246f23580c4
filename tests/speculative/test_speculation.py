"""The loop that verifies drafts against a loop that decodes plainly: the same tokens and caches at every step."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.kv import CHUNK, KVCache
from engine.decode.evaluate import evaluate
from engine.decode.host_steps import HostSteps
from engine.decode.request import Request
from engine.decode.running import InFlightRequest, Running, Step, follow
from engine.errors import UsageError
from engine.limits import DECODE_ROWS, MOST_DRAFTS
from engine.models.base import Model
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.allotment import Wish
from engine.speculative.params import SpeculationParams
from engine.speculative.passes import PassTimes
from engine.speculative.proposal import Proposal
from engine.speculative.speculation import NOTHING, Speculation
from engine.synthetic.model import make_model
from engine.synthetic.shape import Shape
from tests.tiers import few

# As small as formats allow, so that a pass takes a fraction of a millisecond; two layers, so that what a layer stores depends
# on what the preceding one has read from the cache.
SHAPES = {
    "qwen3": Shape("qwen3", 2, 32, 1, 1, 32, 32, 289, 512, 1e4, 1e-6),
    "gemma3": Shape("gemma3", 6, 64, 2, 1, 32, 64, 289, 512, 1e4, 1e-6, window=20),
}
N_CTX = {"qwen3": 160, "gemma3": 330}
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.3},
    {"temperature": 1.5, "top_k": 0, "min_p": 0.0, "top_p": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {17: 2.0}},
]
N_SCRIPTS = 10_000
PARTS = 20


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / f"{name}.gguf", shape, "Q8_0") for name, shape in SHAPES.items()}


def load(file: Path, n_ctx: int, draft: Path | None = None, batch_size: int = 0) -> engine.LLM:
    sizes: dict[str, Any] = {"n_ctx": n_ctx, "n_threads": 1, "batch_size": batch_size}
    # What each position stores is read, which is simple with this type.
    return engine.load(file, device="cpu", cache_type="f16", draft_model=draft, **sizes)


def contents(cache: KVCache, length: int) -> list[np.ndarray]:
    """Keys and values of each layer at all positions below ``length`` that a later one reads, one after another."""
    found = []
    for layer in cache.layers:
        positions = np.arange(max(0, length - layer.window + 1) if layer.window else 0, length)
        pages, lanes = layer.table[0, positions // CHUNK], positions % CHUNK
        found += [layer.keys[:, pages, :, lanes], layer.values[:, pages, lanes]]
    return found


def assert_same(one: list[np.ndarray], other: list[np.ndarray]) -> None:
    assert [a.tobytes() for a in one] == [a.tobytes() for a in other]


@dataclass
class Reference:
    """A plain answer that fills the context, plus one token, and what each token stored in the cache."""

    prompt: int
    sampler: Sampler
    tokens: list[int]
    logits: list[np.ndarray]
    caches: list[list[np.ndarray]]


def reference(model: Any, prompt: list[int], options: dict[str, Any]) -> Reference:
    """By ``Model.forward``, a row at a time, and ``Sampler.sample``."""
    sampler = Sampler(SamplerParams(**options), model.config.n_vocab)
    model.sequence.truncate(0)
    tokens = list(prompt)
    found = Reference(len(prompt), sampler, tokens, [], [contents(model.cache, 0)])
    for position in range(model.cache.n_ctx):
        (row,) = evaluate(
            model,
            np.array(tokens[position : position + 1], np.int32),
            np.array([position], np.int32),
            1,
            model.sequence,
        )
        found.logits.append(row)
        found.caches.append(contents(model.cache, position + 1))
        if position + 1 == len(tokens):
            tokens.append(sampler.sample(row, len(tokens), tokens))
    return found


class Script:
    """Replaces ``Speculation``: any number of drafts, each right or wrong, at random."""

    in_blocks = rides = False
    nominal = None

    def __init__(self, known: Reference, random: np.random.Generator, sequential: bool = False) -> None:
        self.params = SpeculationParams(sequential=sequential)
        self._known = known
        self._random = random
        self._right = random.choice([0.0, 0.5, 0.8, 0.95, 1.0])
        self.adapts = True
        self.drafts: list[int] = []
        self.kept = 0

    def choose(self, known: Sequence[int], room: int, times: PassTimes) -> Proposal:
        tokens, n = self._known.tokens, len(known)
        assert list(known) == tokens[:n]
        count = int(self._random.integers(0, max(0, min(room, MOST_DRAFTS)) + 1))
        if room > 0 and self._random.random() < 0.2:
            return Proposal(count=max(count, 1), source="model")
        return self._proposal(n, count, "lookup") if count else NOTHING

    def wish(self, proposal: Proposal) -> Wish:
        return Wish(most=len(proposal))

    def allotted(self, proposal: Proposal, n: int, known: bool, others: bool) -> Proposal:
        assert n == len(proposal) and not known
        return proposal

    def on_device(self, steps: Any) -> bool:
        return False

    def made(self, known: Sequence[int], proposal: Proposal, steps: Any, sequence: Any) -> Proposal:
        """A draft model may propose fewer tokens than requested, or none."""
        return self._proposal(len(known), int(self._random.integers(0, proposal.count + 1)), "model")

    def _proposal(self, n: int, count: int, source: str) -> Proposal:
        drafts = self._known.tokens[n : n + count]
        wrong = self._random.random(len(drafts)) >= self._right
        found = [(t + int(self._random.integers(1, 289))) % 289 if w else t for t, w in zip(drafts, wrong, strict=True)]
        return Proposal(found, source=source)

    def rewind(self, steps: Any) -> int:
        return int(steps.rewind)

    def drafts_blindly(self, steps: Any) -> bool:
        return False

    def ahead(self, most: int) -> int:
        return most

    def ended(self, known: Sequence[int]) -> None:
        pass

    def passed(self, seconds: float) -> None:
        assert not self.drafts

    def verified(self, source: str, drafted: int, accepted: int, seconds: float) -> None:
        assert drafted == len(self.drafts)
        assert self.kept == accepted


class Watched(HostSteps):
    """Steps that are compared with the reference one by one."""

    def __init__(self, model: Any, known: Reference, script: Script, n: int) -> None:
        super().__init__(model)
        self._reference, self._script, self.n = known, script, n

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        super().start(batch)
        ((_, proposal),) = batch
        drafts, expected = proposal.tokens, self._reference.tokens[self.n :]
        self._script.drafts = drafts
        self._script.kept = next((i for i, draft in enumerate(drafts) if draft != expected[i]), len(drafts))

    def take(self) -> list[Step]:
        (step,) = super().take()
        # All that could be kept, and one more.
        assert step.tokens == self._reference.tokens[self.n : self.n + self._script.kept + 1]
        self.n += len(step.tokens)
        model: Any = self._model
        assert model.sequence.length == self.n - 1
        assert_same(contents(model.cache, self.n - 1), self._reference.caches[self.n - 1])
        return [step]


@pytest.fixture(scope="module")
def qwen3(files: dict[str, Path]) -> tuple[engine.LLM, list[Reference]]:
    llm = load(files["qwen3"], N_CTX["qwen3"])
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 289, n).tolist() for n in (1, 9, 60)]
    return llm, [reference(llm.model, prompt, options) for prompt in prompts for options in OPTIONS]


def fill(model: Model, known: Reference, length: int) -> None:
    """Bring a model's cache to the reference's state at ``length``, with garbage at all later positions."""
    sequence, cache = model.sequence, model.cache
    sequence.truncate(0)
    for pool in cache.pools.values():
        pool.clear()
    for first in range(0, length, cache.max_rows):
        tokens = known.tokens[first : min(first + cache.max_rows, length)]
        sequence.claim(first, len(tokens))
        sequence.commit(tokens)
    cache.publish()
    for i, layer in enumerate(model.cache.layers):
        layer.keys.view(np.uint8)[:] = layer.values.view(np.uint8)[:] = 0x31
        positions = np.arange(length)
        pages, lanes = layer.table[0, positions // CHUNK], positions % CHUNK
        layer.keys[:, pages, :, lanes] = known.caches[length][2 * i]
        layer.values[:, pages, lanes] = known.caches[length][2 * i + 1]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("part", few(range(PARTS)))
def test_scripts_of_right_and_wrong_drafts(qwen3: tuple[engine.LLM, list[Reference]], part: int) -> None:
    llm, references = qwen3
    kept = refused = 0
    for seed in range(part, N_SCRIPTS, PARTS):
        random = np.random.default_rng(seed)
        known = references[seed // PARTS % len(references)]
        n = int(random.integers(known.prompt, len(known.tokens)))
        count = int(random.integers(1, min(24, len(known.tokens) - n) + 1))
        stop = int(random.integers(0, count + 1)) if random.random() < 0.5 else count
        fill(llm.model, known, n - 1)
        script = Script(known, random, sequential=seed // PARTS % 32 == 0)
        request = Request(known.tokens[:n], known.sampler, count, script)  # type: ignore[arg-type]
        stream = follow(Running(request, llm.sequence, Watched(llm.model, known, script, n)))
        found = []
        for at, (token, logits) in zip(range(n, n + stop), stream, strict=False):
            assert token == known.tokens[at]
            assert logits.tobytes() == known.logits[at - 1].tobytes()
            found.append(token)
            kept, refused = kept + script.kept, refused + len(script.drafts) - script.kept
        stream.close()
        assert len(found) == stop
        if stop == count:
            assert next(stream, None) is None
            assert llm.sequence.length == n + count - 1
    assert kept > 4000 / PARTS and refused > 4000 / PARTS


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("architecture", "scripts"), few([("qwen3", 80), ("gemma3", 40), ("qwen3", 800), ("gemma3", 150)], 2)
)
def test_the_cache_ends_where_the_reader_does(
    files: dict[str, Path], architecture: str, scripts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through LLM.decode, one answer after another on the same cache, in which gemma3 uses pages again and again."""
    llm = load(files[architecture], N_CTX[architecture], batch_size=DECODE_ROWS)
    random = np.random.default_rng(1)
    prompt = random.integers(0, 289, 5).tolist()
    references = [reference(llm.model, prompt, options) for options in OPTIONS]
    llm.reset()
    for seed in range(scripts):
        random = np.random.default_rng(seed)
        known = references[seed // 8 % len(references)]
        n = int(random.integers(known.prompt, len(known.tokens)))
        count = int(random.integers(1, min(40, len(known.tokens) - n) + 1))
        stop = int(random.integers(1, count + 1))
        script: Any = Script(known, random)
        watched = Watched(llm.model, known, script, n)
        monkeypatch.setattr(llm.core.scheduler.batch, "host", watched)
        stream = llm.decode(known.tokens[:n], known.sampler, count, script, bool(seed % 2))
        for at in range(n, n + stop):
            token, logits = next(stream)
            assert token == known.tokens[at]
            assert logits.tobytes() == known.logits[at - 1].tobytes()
        stream.close()
        assert llm.n_cached == llm.sequence.length == n + stop - 1
        assert_same(contents(llm.cache, n + stop - 1), known.caches[n + stop - 1])


# --- where answers end -----------------------------------------------------------------------------------------

PROMPT = [3, 7, 11, 250, 3, 7]
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_k": 0, "min_p": 0.0, "top_p": 1.0}
K = 4


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts from the first step on, and no pauses."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)


class Both:
    """Sends each prompt to a model that drafts for itself, always the right tokens, and to one without drafts."""

    def __init__(self, file: Path, n_ctx: int) -> None:
        self.llm, self.plain = load(file, n_ctx, file), load(file, n_ctx)
        self.places: set[int] = set()

    def ask(self, prompt: list[int], **options: Any) -> engine.Generation:
        self.plain.reset()
        expected = self.plain.complete(prompt, **options)
        found = self.llm.complete(prompt, speculation=SpeculationParams(draft_max=K, draft_min=K), **options)
        assert (found.ids, found.text, found.finish_reason) == (expected.ids, expected.text, expected.finish_reason)
        n_predicted = found.timings.predicted_n
        assert n_predicted == expected.timings.predicted_n
        n = len(prompt) + max(0, n_predicted - 1)  # the last token was not read
        assert (self.llm.n_cached, self.llm.sequence.length) == (n, n)
        assert_same(contents(self.llm.cache, n), contents(self.plain.cache, n))
        # The first token is the prompt's; after that, passes of K drafts give K + 1.
        self.places.add((n_predicted - 2) % (K + 1))
        statistics = found.speculation
        assert statistics is not None
        assert (statistics.drafted > 0) == (n_predicted > 1 and not self._short(prompt, options))
        self._next(prompt, found)
        return found

    def _short(self, prompt: list[int], options: dict[str, Any]) -> bool:
        """Whether there is no room for K drafts from the beginning: the first token and the last need none."""
        room = self.llm.n_ctx - len(prompt)
        return min(room, options.get("max_tokens", room)) < K + 2

    def _next(self, prompt: list[int], found: engine.Generation) -> None:
        """What follows is independent of what came before."""
        following = (prompt + found.ids)[: len(prompt) + len(found.ids) // 2 + 1] + [5]
        following = following[: self.llm.n_ctx - 8]
        self.plain.reset()
        options: dict[str, Any] = {"max_tokens": 7, "temperature": 1.0, "seed": 9, "ignore_eos": True}
        assert self.llm.complete(following, **options).ids == self.plain.complete(following, **options).ids


@pytest.mark.usefixtures("eager")
def test_stop_tokens_inside_a_batch(files: dict[str, Path]) -> None:
    both = Both(files["qwen3"], 64)
    bias = dict.fromkeys(both.llm.tokenizer.eog_ids, 3.0)
    for seed in range(24):
        before = set(both.places)
        if both.ask(PROMPT, seed=seed, max_tokens=40, logit_bias=bias, **SAMPLED).finish_reason != "stop":
            both.places = before
    assert both.places == set(range(K + 1))


@pytest.mark.usefixtures("eager")
def test_stop_texts_inside_a_batch(files: dict[str, Path]) -> None:
    both = Both(files["qwen3"], 64)
    bias = dict.fromkeys(range(33, 60), 6.0)  # letters, so that a token is a character
    options: dict[str, Any] = {"seed": 4, "max_tokens": 30, "ignore_eos": True, "logit_bias": bias} | SAMPLED
    text = both.plain.complete(PROMPT, **options).text
    for i in range(1, 14):
        found = both.ask(PROMPT, stop=[text[i : i + 3]], **options)
        assert found.finish_reason == "stop"
        assert found.text == text[: text.index(text[i : i + 3])]
    assert both.places == set(range(K + 1))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3} | SAMPLED])
def test_max_tokens_inside_a_batch(files: dict[str, Path], options: dict[str, Any]) -> None:
    both = Both(files["qwen3"], 64)
    for n in (0, 1, 2, *range(K - 1, 3 * K + 4)):
        found = both.ask(PROMPT, max_tokens=n, ignore_eos=True, **options)
        assert (len(found.ids), found.finish_reason) == (n, "length")
    assert both.places == set(range(K + 1))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3} | SAMPLED])
def test_the_end_of_the_context_inside_a_batch(files: dict[str, Path], options: dict[str, Any]) -> None:
    both = Both(files["qwen3"], 64)
    for room in range(1, 3 * K + 4):
        prompt = np.random.default_rng(room).integers(0, 289, 64 - room).tolist()
        found = both.ask(prompt, ignore_eos=True, **options)
        assert (len(found.ids), found.finish_reason) == (room, "length")
    assert both.places == set(range(K + 1))


# --- how much is drafted, and what is reported -----------------------------------------------------------------


@pytest.fixture
def drafting(files: dict[str, Path]) -> engine.LLM:
    return load(files["qwen3"], 160, files["qwen3"])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("draft_max", None, "draft_max must be a whole number, not None"),
        ("draft_max", "3", "draft_max must be a whole number, not '3'"),
        ("draft_max", 2.5, "draft_max must be a whole number, not 2.5"),
        ("draft_max", True, "draft_max must be a whole number, not True"),
        ("draft_max", 16, "draft_max must be 1 to 15, or 0 for the default, not 16"),
        ("draft_min", None, "draft_min must be a whole number, not None"),
        ("draft_min", 16, "draft_min must be between 0 and draft_max, not 16"),
        ("draft_p_min", None, "draft_p_min must be a number, not None"),
        ("draft_p_min", "x", "draft_p_min must be a number, not 'x'"),
        ("draft_p_min", float("nan"), "draft_p_min must be a finite number, not nan"),
        ("accept_p_min", 10**400, "accept_p_min must be a number, not a whole number of 1329 bits"),
        ("accept_p_min", 1.5, "accept_p_min must be between 0 and 1, not 1.5"),
        ("accept", [], "drafts are accepted by exact, ratio or p-min, not an empty list"),
        ("accept", "always", "drafts are accepted by exact, ratio or p-min, not 'always'"),
    ],
    ids=range(14),
)
def test_params_are_checked(name: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=rf"^{re.escape(said)}\.$"):
        SpeculationParams(**{name: value})


def test_how_much_may_be_in_flight() -> None:
    """Drafts made on the device are read before it is known that they stay, so the draft model must be able to rewind."""
    cache = SimpleNamespace(rewind=20)
    draft: Any = SimpleNamespace(
        name="model", cost=1.0, most=15, reads=2, reads_all=True, cache=cache, sampler=lambda own: own
    )
    steps: Any = SimpleNamespace(rewind=50, drafts_here=lambda draft: True)
    speculation = Speculation(SpeculationParams(), Sampler(SamplerParams(seed=1), 10), draft, 1.0)
    assert speculation.rewind(steps) == 19
    draft.cache = None
    assert speculation.rewind(steps) == 50
    draft.cache, steps.drafts_here = cache, lambda draft: False
    assert speculation.rewind(steps) == 50


def test_the_first_plain_step_is_not_timed() -> None:
    """It also waits for what is made once."""
    speculation = Speculation(LOOKUP, Sampler(SamplerParams(seed=1), 10), None, 1.0)
    for seconds in (5.0, 1.0, 2.0):
        speculation.passed(seconds)
    assert (speculation.statistics.plain_n, speculation.statistics.plain_s) == (2, 3.0)


LOOKUP = SpeculationParams(lookup=True)
REPEATS: dict[str, Any] = {"temperature": 0.5, "seed": 1, "max_tokens": 60, "ignore_eos": True}
REPEATS["logit_bias"] = {token: float("-inf") for token in range(289) if token not in (3, 7, 11)}


@pytest.mark.usefixtures("eager")
def test_lookup_comes_first(drafting: engine.LLM) -> None:
    """The draft model drafts where nothing is found, and only there."""
    found = drafting.complete(PROMPT, speculation=LOOKUP, **REPEATS)
    statistics = found.speculation
    assert statistics is not None
    assert statistics.drafted_by["lookup"] > 0 and statistics.drafted_by["model"] > 0
    assert statistics.accepted_by["model"] == statistics.drafted_by["model"]
    drafting.draft = None
    drafting.histories.clear()
    alone = drafting.complete(PROMPT, speculation=LOOKUP, **REPEATS)
    assert alone.speculation is not None and set(alone.speculation.drafted_by) == {"lookup"}
    assert found.ids == alone.ids == drafting.complete(PROMPT, **REPEATS).ids


def test_without_speculation_nothing_is_drafted(drafting: engine.LLM) -> None:
    expected = drafting.complete(PROMPT, **REPEATS)
    assert expected.speculation is not None and expected.speculation.drafted > 0
    assert drafting.draft is not None
    drafting.draft.llm.reset()
    found = drafting.complete(PROMPT, speculation=SpeculationParams(enabled=False, lookup=True), **REPEATS)
    assert found.ids == expected.ids
    assert found.speculation is None
    assert drafting.draft.llm.n_cached == 0


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "params",
    [{"draft_max": 1}, {"draft_max": 6, "draft_min": 3}, {"draft_min": 5}, {"draft_p_min": 0.2, "draft_min": 2}],
)
def test_no_fewer_and_no_more_drafts_than_asked_for(
    drafting: engine.LLM, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    verified = Speculation.verified

    def noting(self: Speculation, source: str, drafted: int, accepted: int, seconds: float) -> None:
        seen.append(drafted)
        verified(self, source, drafted, accepted, seconds)

    monkeypatch.setattr(Speculation, "verified", noting)
    found = drafting.complete(PROMPT, speculation=SpeculationParams(**params), **REPEATS)
    assert found.ids == drafting.complete(PROMPT, speculation=SpeculationParams(enabled=False), **REPEATS).ids
    # If the draft model stops too early, nothing is verified.
    assert set(seen) <= {0, *range(params.get("draft_min", 1), params.get("draft_max", 5) + 1)}
    assert (0 in seen) == ("draft_p_min" in params) and max(seen) > 0
    statistics = found.speculation
    assert statistics is not None
    assert (statistics.drafted, statistics.verifications) == (sum(seen), np.count_nonzero(seen))
    assert statistics.drafted_at == {i: sum(n > i for n in seen) for i in range(max(seen))}
    assert statistics.accepted == statistics.drafted
    assert statistics.mean_length == pytest.approx(1 + sum(seen) / np.count_nonzero(seen))
    # The first token is the prompt's, and the first plain pass is not counted.
    assert len(found.ids) - 1 - sum(seen) - len(seen) in (statistics.plain_n, statistics.plain_n + 1)


@pytest.mark.usefixtures("eager")
def test_no_more_rows_than_a_pass_can_read(drafting: engine.LLM) -> None:
    expected = drafting.complete(PROMPT, speculation=SpeculationParams(enabled=False), **REPEATS)
    drafting.cache.max_rows = 3
    found = drafting.complete(PROMPT, speculation=SpeculationParams(draft_max=15), **REPEATS)
    assert found.ids == expected.ids
    assert found.speculation is not None and set(found.speculation.drafted_at) == {0, 1}


@pytest.mark.parametrize("least", [0, 2])
def test_a_draft_model_that_is_never_sure_is_left_alone(
    drafting: engine.LLM, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """What it has drafted in vain costs time, too."""
    monkeypatch.setattr("engine.speculative.passes.SEEN", 2)
    assert drafting.draft is not None
    passes = 0
    split = drafting.draft.llm.model.split

    def counting(*given: Any) -> Any:
        nonlocal passes
        passes += 1
        return split(*given)

    monkeypatch.setattr(drafting.draft.llm.model, "split", counting)
    options = REPEATS | {"max_tokens": 140, "temperature": 1.5}
    params = SpeculationParams(draft_p_min=1.0, draft_min=least)
    found = drafting.complete(PROMPT, speculation=params, **options)
    assert found.ids == drafting.complete(PROMPT, speculation=SpeculationParams(enabled=False), **options).ids
    assert found.speculation is not None and found.speculation.drafted == 0
    assert 0 < passes < 30


# --- sliding windows -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.6, "seed": 2}])
def test_a_window_that_wraps_around(files: dict[str, Path], options: dict[str, Any]) -> None:
    n_ctx = 400
    llm, plain = (load(files["gemma3"], n_ctx, batch_size=DECODE_ROWS) for _ in range(2))
    assert {layer.window for layer in llm.cache.layers} == {0, 20}
    assert max(layer.pages for layer in llm.cache.layers if layer.window) * CHUNK < n_ctx / 2
    options = REPEATS | {"max_tokens": -1} | options
    expected = plain.complete(PROMPT, **options)
    found = llm.complete(PROMPT, speculation=SpeculationParams(lookup=True, draft_max=15), **options)
    assert found.ids == expected.ids and len(found.ids) == n_ctx - len(PROMPT)
    assert found.speculation is not None
    assert found.speculation.accepted > 100
    assert not options["temperature"] or found.speculation.accepted < found.speculation.drafted
    assert_same(contents(llm.cache, n_ctx - 1), contents(plain.cache, n_ctx - 1))
    # A prompt that begins like the last answer cannot use what the pages no longer hold.
    for kept in (391, 370, 120):
        again = (PROMPT + found.ids)[:kept] + [5]
        plain.reset()
        ids = [each.complete(again, speculation=LOOKUP, **options | {"max_tokens": 8}).ids for each in (llm, plain)]
        assert ids[0] == ids[1]
