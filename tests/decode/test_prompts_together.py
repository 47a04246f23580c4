"""Which slices of prompts share a pass, and what happens to a pass when requests leave it.

Equal answers do not show this, so the passes are counted.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import engine
from engine.decode.prefill import PrefillPass, Reading
from engine.decode.request import Request
from engine.limits import MOST_TOGETHER
from engine.models.compressed_config import CompressedConfig
from engine.models.mixer_config import MixerConfig, NoMixer
from engine.models.pair_config import PairConfig
from engine.sampling.sampler import Sampler, SamplerParams
from engine.synthetic.model import make_model
from tests.decode.test_running_batch import Pieces

SLOTS = 4


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.LLM]:
    path = make_model(tmp_path_factory.mktemp("model") / "m.gguf", "tiny-qwen3", "Q8_0")
    with engine.load(path, device="cpu", n_ctx=512, n_threads=1, parallel=SLOTS) as model:
        yield model


@pytest.fixture
def passes(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of tokens of the slices of each pass that is begun from now on."""
    llm.reset()
    found: list[list[int]] = []
    begin = PrefillPass.__init__

    def noted(self: PrefillPass, model: object, slices: list[object], *given: object, **options: object) -> None:
        begin(self, model, slices, *given, **options)  # type: ignore[arg-type]
        found.append([len(each.tokens) for each in self.slices])

    monkeypatch.setattr(PrefillPass, "__init__", noted)
    return found


def prompt(llm: engine.LLM, seed: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, llm.config.n_vocab, length).tolist()
    return ids


def submitted(llm: engine.LLM, ids: list[int], count: int = 3) -> Request:
    request = Request(ids, Sampler(SamplerParams(temperature=0.0, seed=1), llm.config.n_vocab), count)
    llm.core.submit(request)
    return request


def finish(llm: engine.LLM, *requests: Request) -> list[list[int]]:
    """The tokens of requests, when all have been computed."""
    while llm.core.step():
        pass
    llm.check_pages()
    assert llm.core.n_active == 0 and all(request.error is None for request in requests)
    return [[token for token, _ in request.items] for request in requests]


@pytest.fixture
def pieces(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pieces]:
    """Passes over prompts have pieces."""
    monkeypatch.setattr("engine.decode.prefill_queue.PATIENCE", 0.0)
    found = Pieces(llm.model.ops)
    found.split(True)
    yield found
    found.split(False)


def answers_alone(llm: engine.LLM, prompts: list[list[int]], count: int = 3) -> list[list[int]]:
    found = []
    for ids in prompts:
        llm.reset()
        found += finish(llm, submitted(llm, ids, count))
    llm.reset()
    return found


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([20, 20, 20, 20], [[20, 20, 20, 20]]),
        ([60, 60, 60, 60], [[60, 60, 8], [52, 60]]),
        ([200, 1, 30], [[128], [72, 1, 30]]),
        ([100, 28, 5], [[100, 28], [5]]),
        ([1, 2, 3], [[1, 2, 3]]),
    ],
)
def test_a_pass_takes_the_earliest_prompts(
    llm: engine.LLM, passes: list[list[int]], lengths: list[int], expected: list[list[int]]
) -> None:
    assert llm.model.prompt_rows == 128
    prompts = [prompt(llm, n + 10 * i, n) for i, n in enumerate(lengths)]
    alone = answers_alone(llm, prompts, 1)
    passes.clear()
    found = finish(llm, *[submitted(llm, ids, 1) for ids in prompts])
    assert passes == expected and found == alone


def test_prompts_are_read_together_beside_an_answer(llm: engine.LLM, passes: list[list[int]]) -> None:
    """In passes of few rows, of numbers that are powers of two, since a CPU does not divide them."""
    prompts = [prompt(llm, i, 5) for i in range(3)]
    alone = answers_alone(llm, prompts)
    running = submitted(llm, prompt(llm, 9, 10), 200)
    while len(running.items) < 5:
        llm.core.step()
    passes.clear()
    others = [submitted(llm, ids) for ids in prompts]
    while not all(other.done for other in others):
        llm.core.step()
    assert passes == [[5, 3], [2, 2], [2], [1]] and len(running.items) < 200
    assert finish(llm, running, *others)[1:] == alone


def test_a_request_that_leaves_a_pass_lets_the_others_read_on(llm: engine.LLM, passes: list[list[int]]) -> None:
    """Its pieces are started before others get its slot; what was read of the others is not read again."""
    prompts = [prompt(llm, i, 30) for i in range(3)]
    alone = answers_alone(llm, prompts)
    pieces = Pieces(llm.model.ops)
    pieces.split(True)
    try:
        running = submitted(llm, prompt(llm, 9, 10), 60)
        while len(running.items) < 3:
            llm.core.step()
        passes.clear()
        others = [submitted(llm, ids) for ids in prompts]
        while not pieces.open:
            assert not others[0].items
            llm.core.step()
        assert passes == [[30, 30, 30]] and not others[0].items
        llm.core.close(others[1])
        llm.core.step()
        assert pieces.open == 0
        found = finish(llm, running, others[0], others[2])
    finally:
        pieces.split(False)
    assert found[1:] == [alone[0], alone[2]] and not others[1].items
    assert passes == [[30, 30, 30]] and pieces.begun == pieces.ended
    assert pieces.at_once == [True, False]


def test_a_pass_without_requests_is_cancelled(llm: engine.LLM, passes: list[list[int]]) -> None:
    pieces = Pieces(llm.model.ops)
    pieces.split(True)
    try:
        running = submitted(llm, prompt(llm, 9, 10), 60)
        while len(running.items) < 3:
            llm.core.step()
        begun = pieces.begun
        others = [submitted(llm, prompt(llm, i, 30)) for i in range(2)]
        while not pieces.open:
            llm.core.step()
        for other in reversed(others):
            llm.core.close(other)
        finish(llm, running)
    finally:
        pieces.split(False)
    assert passes[-1] == [30, 30] and pieces.begun == begun + 1 and not any(other.items for other in others)


def test_the_next_pass_is_started_before_the_results_are_awaited(
    llm: engine.LLM, passes: list[list[int]], pieces: Pieces
) -> None:
    """Also beside answers, but never two passes before; a long prompt goes on before its first slice has been read, and the
    progress that is reported is that of passes that have ended."""
    pieces.split(False)
    prompts = [prompt(llm, i, n) for i, n in enumerate((128, 128, 384, 128))]
    alone = answers_alone(llm, prompts)
    pieces.split(True)
    passes.clear()
    reported: list[tuple[int, str]] = []
    asked = [submitted(llm, ids) for ids in prompts]
    asked[2].on_prefill = lambda done, total: reported.append((done, pieces.log[-1] if pieces.log else ""))
    assert finish(llm, *asked) == alone
    assert passes == [[128]] * 6
    assert pieces.log == ["+0", "+1", "-0", "+2", "-1", "+3", "-2", "+4", "-3", "+5", "-4", "-5"]
    assert reported == [(0, "-0"), (128, "-2"), (256, "-3"), (384, "-4")]


def test_prompts_that_arrive_join_a_pass_that_is_not_full(
    llm: engine.LLM, passes: list[list[int]], pieces: Pieces
) -> None:
    """It begins when the pass before has ended, before the results of that one are taken."""
    pieces.split(False)
    prompts = [prompt(llm, i, n) for i, n in enumerate((128, 50, 40))]
    alone = answers_alone(llm, prompts, 1)
    pieces.split(True)
    passes.clear()
    pieces.late = True
    asked = [submitted(llm, ids, 1) for ids in prompts[:2]]
    for _ in range(3):
        llm.core.step()
    assert pieces.log == ["+0"] and passes == [[128]]
    asked.append(submitted(llm, prompts[2], 1))
    llm.core.step()
    assert pieces.log == ["+0"] and passes == [[128]]
    pieces.late = False
    assert finish(llm, *asked) == alone
    assert pieces.log == ["+0", "+1", "-0", "-1"] and passes == [[128], [50, 40]]


@pytest.mark.recovers
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("at", ["__init__", "advance", "finish"])
def test_an_error_in_the_second_of_two_passes(
    llm: engine.LLM, passes: list[list[int]], pieces: Pieces, monkeypatch: pytest.MonkeyPatch, at: str, several: bool
) -> None:
    """Nothing is lost of the first one: if the second one is of one prompt, only that has an error."""
    pieces.split(False)
    prompts = [prompt(llm, i, n) for i, n in enumerate((128, *((64, 64) if several else (128,))))]
    alone = answers_alone(llm, prompts)
    pieces.split(True)
    passes.clear()
    whole, calls, seen = getattr(PrefillPass, at), 0, ""

    def broken(*given: Any, **options: Any) -> Any:
        nonlocal calls, seen
        calls += 1
        if calls == 2:
            seen = " ".join(pieces.log)
            raise RuntimeError("broken")
        return whole(*given, **options)

    monkeypatch.setattr(PrefillPass, at, broken)
    asked = [submitted(llm, ids) for ids in prompts]
    while llm.core.step():
        pass
    assert seen.startswith("+0" if at != "finish" else "+0 +1 -0")
    llm.check_pages()
    assert [request.error is None for request in asked] == [True, several, *([True] if several else [])]
    found = [[token for token, _ in request.items] for request in asked if request.error is None]
    assert found == [ids for ids, request in zip(alone, asked, strict=True) if request.error is None]
    if not several:
        assert passes.count([128]) == 1 + (at != "__init__")


@pytest.mark.parametrize("at", ["__init__", "end"])
def test_an_interrupt_between_a_pass_and_its_requests(
    llm: engine.LLM, pieces: Pieces, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Requests that know of a pass which the queue does not, or no longer, know are read all the same."""
    pieces.split(False)
    prompts = [prompt(llm, i, 128) for i in range(3)]
    alone = answers_alone(llm, prompts)
    pieces.split(True)
    whole = getattr(Reading, at)

    def interrupted(reading: Reading, *given: Any) -> Any:
        monkeypatch.setattr(Reading, at, whole)
        if at == "__init__":
            whole(reading, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Reading, at, interrupted)
    asked = [submitted(llm, ids) for ids in prompts]
    with pytest.raises(KeyboardInterrupt):
        finish(llm)
    for _ in range(100):  # with the fault, there would always be something to do
        llm.core.step()
    assert [[token for token, _ in request.items] for request in asked] == alone
    llm.check_pages()


def test_requests_leave_two_passes(llm: engine.LLM, passes: list[list[int]], pieces: Pieces) -> None:
    """Of a prompt whose first slices are in flight, nothing more is read; the others go on."""
    pieces.split(False)
    prompts = [prompt(llm, i, n) for i, n in enumerate((300, 84, 128))]
    alone = answers_alone(llm, prompts)
    pieces.split(True)
    passes.clear()
    asked = [submitted(llm, ids) for ids in prompts]
    llm.core.step()
    llm.core.step()
    assert passes == [[128], [128]] and pieces.log == ["+0", "+1", "-0"]
    llm.core.close(asked[0])
    assert finish(llm, *asked[1:]) == alone[1:]
    assert passes[2:] == [[84, 44], [84]] and not asked[0].items
    asked = [submitted(llm, ids) for ids in prompts]
    llm.core.step()
    llm.core.step()
    with llm.lock:
        llm.core.interrupt()
    assert not any(request.has_slot for request in asked)
    assert finish(llm, *asked) == alone


def test_a_scored_prompt_has_passes_of_its_own(llm: engine.LLM, passes: list[list[int]]) -> None:
    rows: list[np.ndarray] = []
    greedy = Sampler(SamplerParams(temperature=0.0, seed=0), llm.config.n_vocab)
    scored = Request(prompt(llm, 1, 20), greedy, 1, on_logits=lambda first, found: rows.append(found.copy()))
    before, after = submitted(llm, prompt(llm, 2, 10), 1), submitted(llm, prompt(llm, 3, 11), 1)
    llm.core.submit(scored)
    finish(llm, before, after, scored)
    assert passes == [[10, 11], [20]]
    assert np.concatenate(rows).tobytes() == llm.logits(prompt(llm, 1, 20)).tobytes()


def test_mixers_that_cannot_read_together_have_passes_of_one_prompt(
    llm: engine.LLM, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a pass has no more prompts than its list of them."""
    monkeypatch.setattr("engine.decode.prefill_queue.MOST_TOGETHER", 2)
    prompts = [prompt(llm, i, 10 + i) for i in range(3)]
    alone = answers_alone(llm, prompts, 1)
    passes.clear()
    assert finish(llm, *[submitted(llm, ids, 1) for ids in prompts]) == alone and passes == [[10, 11], [12]]
    mixer = type(llm.config.layers[0].mixer)
    monkeypatch.setattr(mixer, "reads_together", False)
    llm.model.__dict__.pop("reads_together")
    llm.reset()
    passes.clear()
    try:
        assert finish(llm, *[submitted(llm, ids, 1) for ids in prompts]) == alone and passes == [[10], [11], [12]]
    finally:
        llm.model.__dict__.pop("reads_together")
    assert MOST_TOGETHER >= SLOTS


def test_which_mixers_read_together() -> None:
    """All but compressed attention, whose attention of many rows reads the latents of one sequence."""

    def kinds(base: type[Any]) -> Iterator[type[Any]]:
        for kind in base.__subclasses__():
            yield kind
            yield from kinds(kind)

    every = kinds(MixerConfig)  # type: ignore[type-abstract]
    alone = {kind.__name__ for kind in every if kind.reads_together is not MixerConfig.reads_together}
    assert alone == {"CompressedConfig", "PairConfig"}
    can, cannot = NoMixer(), object.__new__(CompressedConfig)
    assert can.reads_together and not cannot.reads_together
    assert PairConfig(can, can).reads_together
    assert not PairConfig(can, cannot).reads_together and not PairConfig(cannot, can).reads_together
