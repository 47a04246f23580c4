"""Prompts in passes of any size: the same bits, the same memory, the same answers; sizes that memory allows."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.kv import pass_rows
from engine.cache.types import F16
from engine.cuda.target import Target
from engine.errors import ContextError, DeviceError, UsageError
from engine.gguf.file import read_gguf
from engine.limits import MOST_DRAFTS
from engine.models.needs import angle_bytes, context_bytes, row_bytes
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from tests.conftest import REPOSITORY
from tests.interrupts import interrupted
from tests.tiers import few

SIZES = (1, 16, 17, 100, 0, 512)
"""0 is the device's default."""

QUANTS = {"tiny-llama": "Q4_K_M", "tiny-gemma3": "Q8_0", "tiny-qwen35": "Q4_K_M", "tiny-gemma4-e": "Q4_0"}
QUANTS |= {"tiny-lfm2": "Q4_K_M", "tiny-granitehybrid": "Q4_0", "tiny-gemma3n": "Q4_0"}


@pytest.fixture(scope="module", params=QUANTS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", request.param, QUANTS[request.param], seed=5)


def loaded(path: Path, batch_size: int, **options: Any) -> engine.LLM:
    return engine.load(path, device="cpu", n_threads=1, n_ctx=400, batch_size=batch_size, **options)


def passes(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(position, rows, rows of logits) of each pass from now on."""
    made: list[tuple[int, int, int]] = []
    split = llm.model.split

    def noted(tokens: np.ndarray, positions: np.ndarray, n_logits: int, *given: Any, **options: Any) -> Any:
        made.append((int(positions[0]), tokens.size, n_logits))
        return split(tokens, positions, n_logits, *given, **options)

    monkeypatch.setattr(llm.model, "split", noted)
    return made


def test_the_batch_size_does_not_show(path: Path) -> None:
    """Logits after a prompt, of the tokens after it, and after going back to the end of a message or to another position."""
    found = set()
    for size in SIZES:
        llm = loaded(path, size)
        (end, *_) = llm.tokenizer.eog_ids
        words = np.random.default_rng(0).integers(3, 200, 300).tolist()
        first = [*words[:60], end, *words[60:150], end, *words[150:]]
        logits = [llm.prefill(first)[0]]
        logits += [llm.step(token) for token in words[:20]]
        for prompt in ([*first[:152], *words[:90]], [*first[:61], *words[:30]], [*first[:40], *words[:70]]):
            logits.append(llm.prefill(prompt)[0])
        found.add(np.array(logits).tobytes())
    assert len(found) == 1


def test_passes_are_as_large_as_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = loaded(path, 90, snapshot_bytes=0)
    assert llm.batch_size == 90
    made, bar = passes(llm, monkeypatch), []
    llm.model.ops.warm_up(llm.model)
    llm.reset()
    made.clear()
    tokens = np.random.default_rng(1).integers(3, 200, 250).tolist()
    generation = llm.generate(tokens, max_tokens=1, temperature=0, on_prefill=lambda *seen: bar.append(seen))
    assert generation.ids == [] and list(generation)
    assert made[:3] == [(0, 90, 0), (90, 90, 0), (180, 70, 1)]
    assert bar == [(0, 250), (90, 250), (180, 250), (250, 250)]
    made.clear()
    llm.logits(tokens[:100])
    assert made == [(0, 90, 90), (90, 10, 10)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [1, 16, 50])
def test_ctrl_c_while_a_prompt_is_read(path: Path, size: int) -> None:
    """Interrupted between two passes, or in one: what has been read stays, and the next prompt is read as usual."""
    llm, tokens = loaded(path, size, snapshot_bytes=0), np.random.default_rng(2).integers(3, 200, 250).tolist()
    expected = llm.prefill(tokens)[0].tobytes()

    def between(done: int, total: int) -> None:
        if done >= 100:
            raise KeyboardInterrupt

    llm.reset()
    with pytest.raises(KeyboardInterrupt):
        llm.prefill(tokens, between)
    assert llm.n_cached == llm.sequence.length == -(-100 // size) * size
    assert llm.prefill(tokens)[0].tobytes() == expected

    llm.reset()
    with interrupted(llm.model.ops, 0.6, after=200 // size), pytest.raises(KeyboardInterrupt):
        llm.prefill(tokens)
    assert llm.n_cached == 200 // size * size
    last = [llm.step(token) for token in tokens[llm.n_cached :]][-1]
    assert last.tobytes() == expected


@pytest.mark.parametrize("size", few([1, 16, 5, 64], 2))
def test_drafts_do_not_depend_on_it(size: int) -> None:
    """Steps have up to 16 rows, however few rows a prompt is read in, and never more."""
    llm = engine.load("pycoder", device="cpu", n_ctx=256, batch_size=size)
    prompt = "a = 1\nb = 2\nc = 3\na = 1\nb = 2\nc = 3\n"
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    expected = llm.complete(prompt, **options)
    steps: Any = type("Steps", (), {"_model": llm.model})()
    from engine.decode.host_steps import ModelSteps

    assert ModelSteps.room(steps, 10) == MOST_DRAFTS
    found = llm.complete(prompt, speculation=SpeculationParams(lookup=True, draft_max=15), **options)
    assert found.ids == expected.ids
    assert found.speculation is not None and found.speculation.drafted > 0


@pytest.mark.parametrize("size", [-1, 4097])
def test_sizes_that_make_no_sense(size: int) -> None:
    with pytest.raises(UsageError, match=f"must be 1 to 4096, or 0 for the device's default, not {size}"):
        engine.load(batch_size=size)


def test_memory_decides_how_much_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A requested context has priority over the default pass size; requested pass sizes are not reduced."""
    path, n_ctx = REPOSITORY / "engine/data/pycoder-draft-Q4_K_M.gguf", 2048
    options: dict[str, Any] = {"device": "cpu", "n_threads": 1, "n_ctx": n_ctx}
    llm = engine.load(path, **options)
    assert llm.batch_size == 128
    c = llm.config
    tables = sum(pool.table.nbytes for pool in llm.cache.pools.values())
    fixed = llm.n_bytes + llm.cache_bytes + tables + angle_bytes(c, n_ctx)
    for rows, expected in ((128, 128), (100, 64), (17, 16), (16, 16)):
        monkeypatch.setattr("engine.cpu.backend.available_memory", lambda rows=rows: fixed + rows * row_bytes(c))
        llm = engine.load(path, **options)
        assert (llm.batch_size, llm.n_ctx, llm.model.ops.max_rows) == (expected, n_ctx, 128)
    with pytest.raises(ContextError, match=r"a smaller context \(n_ctx=\.\.\.\) or batch \(batch_size=\.\.\.\)\.$"):
        engine.load(path, **options, batch_size=32)
    assert engine.load(path, **options, batch_size=8).batch_size == 8
    monkeypatch.setattr("engine.cpu.backend.available_memory", lambda: fixed)
    with pytest.raises(ContextError, match=r"choose a smaller context \(n_ctx=\.\.\.\)\.$"):
        engine.load(path, **options)


@pytest.mark.parametrize("enough", [20, 3])
def test_memory_decides_how_many_answers_are_computed_at_once(
    enough: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further ones wait, and a warning says so."""
    path = make_model(tmp_path / "hybrid.gguf", "tiny-qwen35", "Q8_0")
    options: dict[str, Any] = {"device": "cpu", "n_threads": 1, "n_ctx": 64, "batch_size": 16, "parallel": 24}
    prompts = [[i, i + 1] for i in range(24)]
    with engine.load(path, **options) as llm:
        assert (llm.model.n_sequences, llm.warnings) == (24, [])
        expected = [answer.ids for answer in llm.complete(prompts, max_tokens=3, temperature=0)]
        sizes = 64, 16, llm.model.rewind, enough, 64
        free = llm.n_bytes + context_bytes(llm.config, llm.model.ops, F16, *sizes)
    monkeypatch.setattr("engine.cpu.backend.available_memory", lambda: free)
    with engine.load(path, **options) as llm:
        n = llm.model.n_sequences
        assert enough / 2 < n <= enough
        assert [f"enough for {n} answers at a time, not 24" in warning for warning in llm.warnings] == [True]
        assert [answer.ids for answer in llm.complete(prompts, max_tokens=3, temperature=0)] == expected
        llm.check_pages()


def test_rows_of_a_pass() -> None:
    sizes = (1, 100), (16, 100), (64, 100), (1024, 100), (8, 4)
    assert [pass_rows(*given, 16) for given in sizes] == [16, 16, 64, 100, 4]
    assert [pass_rows(*given, 32) for given in sizes] == [32, 32, 64, 100, 4]


def test_weights_that_do_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "large.gguf", "tiny-llama", "Q8_0")
    free = read_gguf(path).n_bytes // 2
    monkeypatch.setattr("engine.cpu.backend.available_memory", lambda: free)
    with pytest.raises(DeviceError) as raised:
        engine.load(path, device="cpu")
    sentence = str(raised.value)
    assert re.match(r"the weights of large.gguf need [0-9.]+ GB of memory and 0.00 GB are free, which is", sentence)
    bits = float(sentence.split("enough for ")[1].split()[0])
    n_params = sum(int(np.prod(tensor.shape)) for tensor in read_gguf(path).tensors.values())
    assert abs(bits * n_params / 8 - free) < 0.06 * n_params / 8


@pytest.mark.parametrize(("target", "most"), [("sm_80", 96), ("sm_90", 17), ("sm_100", 96)])
def test_from_how_many_answers_a_gpu_continues_them_in_one_pass(target: str, most: int) -> None:
    """Where most of the weights are multiplied by blocks that may be narrow."""
    model = engine.load("pycoder", n_ctx=256, parallel=2, device=Target(target)).model
    assert model.many_answers == most
    assert model.ops.many_answers({"Q8_0": 3, "Q6_K": 2}) == 96
