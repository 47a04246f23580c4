"""Drafts on a simulated GPU: whole answers, generated there with graphs of both models, against plain answers on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED
from engine.decode.generation import request_of
from engine.decode.request import Request
from engine.decode.running import Running, follow

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.cache.kv import AttentionCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.cuda import backend
from engine.decode.device_steps import DeviceSteps
from engine.decode.evaluate import evaluate
from engine.decode.host_steps import HostSteps
from engine.decode.step_rows import StepRows
from engine.models.base import Model
from engine.models.delta_net_config import DeltaNetConfig
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative import passes
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from engine.synthetic.shape import Shape
from engine.verify.caches import remembered
from tests.cuda.simulated.device import use_simulated
from tests.cuda.simulated.test_steps import PROMPTS, SAMPLERS, Device, Party

SHAPE = Shape("qwen3", 1, 32, 1, 1, 32, 32, 289, 64, 1e4, 1e-6)
PROMPT = [3, 7, 11, 3, 7]


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return tuple(make_model(folder / f"{q}.gguf", SHAPE, q) for q in ("Q8_0", "Q4_0"))  # type: ignore[return-value]


Pair = Callable[..., tuple[engine.LLM, engine.LLM]]


@pytest.fixture
def pair(files: tuple[Path, Path]) -> Pair:
    """(on the CPU, on the simulated GPU with a draft model): "good" is the target again, "bad" another model."""

    def make(draft: str, n_ctx: int = 24) -> tuple[engine.LLM, engine.LLM]:
        target, other = files
        drafts = target if draft == "good" else other
        cpu = engine.load(target, cache_type="f16", device="cpu", n_ctx=n_ctx)
        return cpu, engine.load(target, cache_type="f16", device="cuda", n_ctx=n_ctx, draft_model=drafts)

    return make


NOISE: dict[str, Any] = {"temperature": 0.8, "top_k": 30, "seed": 5, "repeat_penalty": 1.3, "logit_bias": {17: 2.0}}


# The first tier has drafts of a model's own layer.
@pytest.mark.thorough
@pytest.mark.parametrize(("draft", "options"), [("bad", {"temperature": 0.0}), ("good", NOISE)])
def test_answers_are_those_without_drafts(pair: Pair, draft: str, options: dict[str, Any]) -> None:
    cpu, gpu = pair(draft)
    speculation = SpeculationParams(draft_max=2)
    expected = cpu.complete(PROMPT, max_tokens=9, ignore_eos=True, **options)
    found = gpu.complete(PROMPT, max_tokens=9, ignore_eos=True, speculation=speculation, **options)
    assert found.ids == expected.ids
    assert found.speculation is not None and found.speculation.drafted > 0
    if draft == "good":
        assert found.speculation.accepted == found.speculation.drafted
    assert_same_cache(cpu, gpu)


def test_drafts_after_a_prompt_of_one_token(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's first pass reads it and the first token of the answer, and nothing before them."""
    monkeypatch.setattr(passes, "MEASURED", 0)
    cpu, gpu = pair("good")
    options: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
    found = gpu.complete([225], speculation=SpeculationParams(draft_max=1), **options)
    assert found.ids == cpu.complete([225], **options).ids
    assert found.speculation is not None and found.speculation.drafted > 0


@pytest.mark.thorough
@pytest.mark.parametrize("accept", ["ratio", "p-min"])
def test_the_other_ways_to_accept_give_the_text_of_the_cpu(pair: Pair, files: tuple[Path, Path], accept: str) -> None:
    _, gpu = pair("bad")
    cpu = engine.load(files[0], cache_type="f16", device="cpu", n_ctx=24, draft_model=files[1])
    speculation = SpeculationParams(draft_max=2, accept=accept, accept_p_min=0.01)
    expected, found = (
        llm.complete(PROMPT, max_tokens=8, ignore_eos=True, speculation=speculation, **NOISE) for llm in (cpu, gpu)
    )
    assert found.ids == expected.ids
    assert expected.speculation is not None and found.speculation is not None
    assert found.speculation.drafted_at == expected.speculation.drafted_at
    assert found.speculation.accepted_at == expected.speculation.accepted_at


@pytest.mark.thorough
def test_lookup(pair: Pair) -> None:
    cpu, gpu = pair("good")
    gpu.draft = None
    # A vocabulary with all but one token banned repeats itself, so that lookup finds something.
    bias = {token: float("-inf") for token in range(289) if token not in (3, 7)}
    options: dict[str, Any] = {"temperature": 0.7, "seed": 1, "logit_bias": bias, "max_tokens": 10, "ignore_eos": True}
    expected = cpu.complete(PROMPT, **options)
    found = gpu.complete(PROMPT, speculation=SpeculationParams(lookup=True, draft_max=3), **options)
    assert found.ids == expected.ids
    assert found.speculation is not None and found.speculation.drafted_by["lookup"] > 0
    assert_same_cache(cpu, gpu)


@pytest.mark.thorough
def test_to_the_end_of_the_context(pair: Pair) -> None:
    cpu, gpu = pair("good", n_ctx=12)
    expected = cpu.complete(PROMPT, temperature=0, ignore_eos=True)
    found = gpu.complete(PROMPT, temperature=0, ignore_eos=True, speculation=SpeculationParams(draft_max=3))
    assert (found.ids, found.finish_reason) == (expected.ids, expected.finish_reason) == (expected.ids, "length")
    assert len(found.prompt_ids) + len(found.ids) == 12
    again = gpu.complete(PROMPT, temperature=0, ignore_eos=True, speculation=SpeculationParams(enabled=False))
    assert again.ids == expected.ids


def test_a_prompt_of_one_token_beside_an_answer(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are read before the next step of the answer, which is the same pass, overwrites them."""
    monkeypatch.setattr(backend, "Device", Device)
    cpu, gpu = (
        engine.load(files[0], cache_type="f16", device=device, n_ctx=24, parallel=2) for device in ("cpu", "cuda")
    )
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    expected = [cpu.complete(prompt, max_tokens=n, **options).ids for prompt, n in ((PROMPT, 12), ([225], 2))]
    one = gpu.generate(PROMPT, max_tokens=12, **options)
    next(one)
    other = gpu.complete([225], max_tokens=2, **options)
    "".join(one)
    assert [one.ids, other.ids] == expected


# --- a layer of the model itself ---------------------------------------------------------------------------------

HYBRID = Shape(
    *("qwen35", 1, 32, 1, 1, 32, 32, 289, 64, 1e4, 1e-6),
    n_rot=16,
    n_mtp=1,
    delta_net=DeltaNetConfig(1, 1, 32, 2),
    interval=2,
)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hybrid") / "hybrid.gguf", HYBRID, "Q8_0")


def test_drafts_of_its_own_layer(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made in the graph of a step, right and wrong ones, and through the host; states and h are those without drafts."""
    monkeypatch.setattr(passes, "MEASURED", 0)
    cpu, gpu = (
        engine.load(hybrid, cache_type="f16", device=device, n_ctx=24, draft_max=2) for device in ("cpu", "cuda")
    )
    options: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "temperature": 0}
    expected = cpu.complete(PROMPT, speculation=SpeculationParams(enabled=False), **options).ids
    assert gpu.draft is not None
    gpu.draft.script = np.full(24, -1, np.int32)
    # One is wrong, and the right token replaces it.
    gpu.draft.script[len(PROMPT) : len(PROMPT) + 5] = [(t + (i == 2)) % 289 for i, t in enumerate(expected)]
    found = gpu.complete(PROMPT, speculation=SpeculationParams(draft_max=2), **options)
    assert found.ids == expected and found.speculation is not None
    assert 0 < found.speculation.accepted < found.speculation.drafted
    gpu.draft.script = None
    through = SpeculationParams(draft_max=1, draft_p_min=0.01)
    found = gpu.complete(PROMPT, speculation=through, **options | {"max_tokens": 3})
    assert found.ids == expected[:3] and found.speculation is not None and found.speculation.drafted > 0
    assert gpu.sequence.length == len(PROMPT) + 2
    cpu.read([*PROMPT, *expected[:2]])
    assert_same_states(cpu, gpu)


@pytest.mark.thorough
def test_an_answer_that_is_closed_leaves_another_alone(hybrid: Path) -> None:
    """Steps of both were in flight, and both write the same states."""
    cpu, gpu = (engine.load(hybrid, cache_type="f16", device=device, n_ctx=24, mtp=False) for device in ("cpu", "cuda"))
    prompts = PROMPT, [*PROMPT, 9]
    given: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}
    expected = cpu.complete(prompts[1], **given).ids
    one, other = (gpu.generate(prompt, **given) for prompt in prompts)
    for answer in (one, other):
        for _ in range(2):
            next(answer)
    one.close()
    list(other)
    assert other.ids == expected


@pytest.mark.thorough
def test_grammars(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers with grammars and without, alone and together, with drafts of the own layer and without, are those of the CPU;
    the device chooses all tokens but the first."""
    pytest.importorskip("llguidance", reason="grammars need the extra serve")
    monkeypatch.setattr(passes, "MEASURED", 0)
    cpu, gpu = (
        engine.load(hybrid, cache_type="f16", device=device, n_ctx=24, parallel=3, draft_max=2)
        for device in ("cpu", "cuda")
    )
    monkeypatch.setattr(gpu.core.scheduler.batch.host, "start", None)
    asked: list[dict[str, Any]] = [
        {"grammar": engine.Grammar.regex("[a-z]{2,5}"), "temperature": 0},
        {"ignore_eos": True, "temperature": 0.8, "seed": 5},
        {
            "grammar": engine.Grammar.json_schema({"type": "integer"}),
            "temperature": 0.9,
            "seed": 2,
            "repeat_penalty": 1.2,
        },
    ]
    plain = SpeculationParams(enabled=False)
    expected = [cpu.complete(PROMPT, max_tokens=4, speculation=plain, **options).ids for options in asked]
    for speculation in (plain, SpeculationParams()):
        given: dict[str, Any] = {"max_tokens": 4, "speculation": speculation}
        if speculation.enabled:  # without drafts a pass of one answer is that of several
            assert [gpu.complete(PROMPT, **given, **options).ids for options in asked] == expected
        live = answers = [gpu.generate(PROMPT, **given, **options) for options in asked]
        while live:
            live = [answer for answer in live if next(answer, None) is not None]
        assert [answer.ids for answer in answers] == expected


@pytest.mark.recovers
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("place", "name", "call"),
    [
        (DeviceSteps, "_taken", 4),
        (DeviceSteps, "take", 2),
        (DeviceSteps, "choose", 3),
        (StepRows, "place", 2),
        (DeviceSteps, "start", 2),
    ],
)
def test_all_answers_are_read_again_after_an_error(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, place: type, name: str, call: int
) -> None:
    """In the middle of passes, with others in flight, one of which may lack its masks."""
    pytest.importorskip("llguidance", reason="grammars need the extra serve")
    cpu, gpu = (
        engine.load(hybrid, cache_type="f16", device=device, n_ctx=24, parallel=2, mtp=False)
        for device in ("cpu", "cuda")
    )
    asked: list[dict[str, Any]] = [
        {"grammar": engine.Grammar.regex("[a-z]{4,7}"), "temperature": 0},
        {"ignore_eos": True, "temperature": 0.8, "seed": 5},
    ]
    given: dict[str, Any] = {"max_tokens": 4}
    expected = [cpu.complete(PROMPT, **given, **options).ids for options in asked]
    function, calls = getattr(place, name), 0

    def faulty(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        found = function(*arguments)
        if calls == call:
            raise ZeroDivisionError
        return found

    monkeypatch.setattr(place, name, faulty)
    answers = [gpu.generate(PROMPT, **given, **options) for options in asked]
    for answer in answers:
        gpu.core.submit(request_of(answer))
    while gpu.core.step():
        pass
    assert calls > call
    found = [[token for token, _ in request_of(answer).items] for answer in answers]
    ends = gpu.tokenizer.eog_ids
    assert [[token for token in ids if token not in ends] for ids in found] == expected
    gpu.check_pages()


# --- several answers ---------------------------------------------------------------------------------------------


class Whole(Party):
    """Answers of a whole model."""

    def __init__(self, cpu: engine.LLM, gpu: engine.LLM, count: int = 12) -> None:
        self.cpu = cpu.model
        super().__init__(gpu.model, gpu.draft, [self.answer(i, count) for i in range(3)])

    def answer(self, i: int, count: int) -> list[int]:
        """A prompt and its answer on the CPU."""
        self.read(self.cpu, self.cpu.sequence, PROMPTS[i][:-1])
        request = Request(PROMPTS[i], Sampler(SamplerParams(**SAMPLERS[i]), 289), count)
        running = Running(request, self.cpu.sequence, HostSteps(self.cpu))
        return [*PROMPTS[i], *(token for token, _ in follow(running))]

    @staticmethod
    def read(model: Model, sequence: TokenSequence, tokens: list[int]) -> None:
        """Make a sequence hold exactly ``tokens``."""
        sequence.truncate(0)
        evaluate(model, np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32), 0, sequence)

    def hold(self, sequence: TokenSequence, tokens: list[int]) -> None:
        self.read(self.model, sequence, tokens)

    def check(self, sequence: TokenSequence) -> None:
        self.read(self.cpu, self.cpu.sequence, sequence.tokens)
        assert_same_memory(self.cpu, self.model, sequence)


def party_of(path: Path) -> Whole:
    options: dict[str, Any] = {"n_ctx": 24, "draft_max": 3}
    return Whole(
        engine.load(path, cache_type="f16", device="cpu", **options),
        engine.load(path, cache_type="f16", device="cuda", parallel=3, **options),
    )


# ``test_steps.py`` has more passes, of models without layers.
@pytest.mark.thorough
def test_answers_ride_together(hybrid: Path) -> None:
    """They join and leave, with drafts of the host, with rows of padding and passes in flight; each leaves its own keys,
    values and states."""
    party = party_of(hybrid)
    party.join("a")
    party.step(a="+")
    party.join("b")
    party.step(a="", b="+-")
    party.join("c")
    for _ in range(2):
        party.start(a="", b="", c="")
    party.take()
    party.take()
    party.leave("b")
    party.start(a="", c="")
    party.start(a="", c="")
    party.abandon("a")
    party.take()
    party.take()
    party.leave("c")
    assert party.sizes == {"a": [2, 1, 1, 1], "b": [2, 1, 1], "c": [1] * 4}


@pytest.mark.thorough
def test_drafts_of_its_own_layer_for_two_answers(hybrid: Path) -> None:
    """Right and wrong ones, of another number for each, with two passes in flight."""
    party = party_of(hybrid)
    party.script("a", wrong=8)
    party.join("a")
    party.step(a=1)
    party.script("b", wrong=4)
    party.join("b")
    party.start(a=2, b=1)
    party.start(a=1, b=1)
    party.take()
    party.take()
    party.leave("a", "b")
    assert party.sizes == {"a": [2, 3, 1], "b": [2, 1], "c": []}


def assert_same_states(cpu: engine.LLM, gpu: engine.LLM) -> None:
    """What a next pass needs besides keys and values is the same, bit for bit."""
    both = (remembered(llm.model, gpu.sequence.length) for llm in (cpu, gpu))
    for (what, mine), (_, its) in zip(*both, strict=True):
        assert mine.tobytes() == its.tobytes(), what


def assert_same_cache(cpu: engine.LLM, gpu: engine.LLM) -> None:
    """The caches hold the same positions, bit for bit."""
    assert gpu.sequence.length == cpu.sequence.length
    assert_same_keys(cpu.model, gpu.model, gpu.sequence)


def assert_same_memory(cpu: Model, gpu: Model, sequence: TokenSequence) -> None:
    """What the GPU remembers of a sequence is what the CPU remembers of that in its slot 0, bit for bit."""
    assert cpu.sequence.tokens == sequence.tokens
    mine, its = cpu.save(cpu.sequence), gpu.save(sequence)
    assert [array.tobytes() for array in mine.arrays] == [array.tobytes() for array in its.arrays]
    assert_same_keys(cpu, gpu, sequence)


def assert_same_keys(cpu: Model, gpu: Model, sequence: TokenSequence) -> None:
    """The keys and values of a sequence of less than a chunk are those of the CPU's in slot 0, bit for bit."""
    n = sequence.length
    for mine, its in zip(cpu.cache.layers, gpu.cache.layers, strict=True):
        if isinstance(mine, AttentionCache):
            keys, values, table = (gpu.ops.download(array) for array in (its.keys, its.values, its.table))
            here, there = mine.table[0, 0], table[sequence.slot, 0]
            assert np.array_equal(mine.keys[:, here, :, :n], keys[:, there, :, :n])
            assert np.array_equal(mine.values[:, here, :n], values[:, there, :n])
