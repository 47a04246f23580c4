"""Many answers at once: each is the answer that its request gets alone, whatever else happens; nothing is lost."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.decode.prefill import Prefilling
from engine.decode.request import Request
from engine.errors import ContextError, UsageError
from engine.sampling.sampler import Sampler, SamplerParams
from engine.synthetic.model import make_model
from tests.batching import alone, asks, differing, together
from tests.tiers import amount, few

KINDS = {
    "dense": ("tiny-qwen3", ""),
    "hybrid": ("tiny-qwen35", ""),
    "windows": ("tiny-gemma3", ""),
    "mixture": ("tiny-qwen3moe", ""),
    "gemma4": ("tiny-gemma4", "tiny-gemma4-assistant"),
    "convolutions": ("tiny-lfm2", ""),
    "mamba": ("tiny-granitehybrid", ""),
    "gemma3n": ("tiny-gemma3n", ""),
    "deepseek4": ("tiny-deepseek4", "tiny-deepseek4-mtp"),
}
"""Shapes of models and of what drafts for them; the hybrid has a layer that drafts."""

PROMPT = "def add(a, b):\n    "


def load(tmp_path: Path, kind: str, **options: Any) -> engine.LLM:
    """A random model of a kind on the CPU."""
    files = [make_model(tmp_path / f"{shape}.gguf", shape, "Q8_0") for shape in KINDS[kind] if shape]
    draft = files[1] if len(files) > 1 else None
    return engine.load(files[0], device="cpu", n_ctx=512, n_threads=1, draft_model=draft, **options)


@pytest.mark.parametrize("kind", few(KINDS, 2))
def test_everything_at_once(tmp_path: Path, kind: str) -> None:
    """Random arrivals, samplers, drafts, readers who go away, slots that are taken, pages that run short, with reuse and
    without."""
    with load(tmp_path, kind) as one:
        wanted = asks(one, 16, 1, 200)
        expected = [alone(one, ask) for ask in wanted]
    with load(tmp_path, kind, parallel=4) as many:
        pieces = Pieces(many.model.ops)
        for seed, (reuse, hold, split) in enumerate([(True, 0, False), (False, 0, True), (True, 22, True)]):
            pieces.split(split)
            found = together(many, wanted, seed, reuse, hold)
            assert differing(expected, found) == []
        assert pieces.begun >= pieces.ended > 0 and pieces.beside > 0


class Chance:
    """True at random."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __bool__(self) -> bool:
        return bool(self.rng.random() < 0.5)


@pytest.mark.parametrize("kind", few(["hybrid", "dense", "windows", "mixture"]))
def test_two_passes_over_prompts_in_flight(tmp_path: Path, kind: str) -> None:
    """Of long prompts and short ones, at random times, also when pages run short."""
    with load(tmp_path, kind) as one:
        wanted = asks(one, 12, 3, 400)
        expected = [alone(one, ask) for ask in wanted]
    with load(tmp_path, kind, parallel=4, batch_size=64) as many:
        pieces = Pieces(many.model.ops)
        pieces.split(True)
        pieces.late = Chance(1)
        for seed, (reuse, hold) in enumerate([(False, 0), (True, 22)]):
            found = together(many, wanted, seed, reuse, hold)
            assert differing(expected, found) == []
    steps = zip(pieces.log, pieces.log[1:], strict=False)
    assert sum(before[0] == after[0] == "+" for before, after in steps) > 10


def test_a_part_of_a_prompt_is_left_in_the_middle(four: engine.LLM) -> None:
    """A request that gives way, or is closed, while pieces of its prompt are read."""
    four.reset()
    n_vocab, pieces = four.config.n_vocab, Pieces(four.model.ops)
    ids = np.random.default_rng(3).integers(0, n_vocab, (4, 150)).tolist()
    expected = [four.complete(prompt, max_tokens=4, temperature=0, ignore_eos=True).ids for prompt in ids]
    four.reset()

    def request(i: int, count: int) -> Request:
        made = Request(ids[i], Sampler(SamplerParams(temperature=0.0, seed=1), n_vocab), count)
        four.core.submit(made)
        return made

    def reads(request: Request) -> bool:
        return isinstance(request.state, Prefilling) and request.state.reading is not None

    pieces.split(True)
    try:
        running = request(0, 60)
        while not running.items:
            four.core.step()
        away, closed, last = (request(i, 4) for i in (1, 2, 3))
        while not reads(away):
            four.core.step()
        four.core.interrupt()
        assert not away.has_slot and pieces.open == 0
        while not reads(closed):
            four.core.step()
        four.core.close(closed)
        while four.core.step():
            pass
    finally:
        pieces.split(False)
    assert pieces.begun > pieces.ended
    found = [[token for token, _ in made.items] for made in (running, away, closed, last)]
    assert [found[0][:4], *found[1:]] == [*expected[:2], [], expected[3]]
    four.check_pages()


class Pieces:
    """Lets the CPU compute a pass of a prompt with the last of three pieces, as a GPU may: steps run between them, and what
    is claimed stays claimed meanwhile.  A pass without steps between its pieces is started at once."""

    def __init__(self, ops: Any) -> None:
        #: Passes begun and ended, and passes that ran between two pieces.
        self.begun = self.ended = self.beside = 0
        #: Whether each pass in pieces was to be started at once.
        self.at_once: list[bool] = []
        self._ops, self._split, self._run = ops, ops.split, ops.run
        #: The pieces that are left of the pass that has begun; 0 if it has ended or was cancelled.
        self.open = 0
        #: Whether passes run still, all of whose pieces were started.
        self.late: bool | Chance = False
        #: The passes whose last piece was started, and those whose results were awaited, in the order of both: "+" or "-" and
        #: the number of the pass.
        self.log: list[str] = []
        ops.run = self._counted

    def split(self, on: bool) -> None:
        """Let passes have three pieces from now on, or one."""
        self._ops.splits = on
        self._ops.split = self._in_three if on else self._split

    def _counted(self, *given: Any) -> Any:
        self.beside += bool(self.open)
        return self._run(*given)

    def _in_three(self, forward: Any, batch: Any, n_logits: int, most: int, at_once: bool) -> Any:
        one, pieces = self._split(forward, batch, n_logits, most), self

        class Three:
            pieces, left, number = 3, 3, len(self.at_once)

            def advance(self, count: int) -> int:
                if not self.left:
                    return 0
                if self.left == 3:
                    pieces.begun += 1
                pieces.open = self.left = max(0, self.left - count)
                if not self.left:
                    one.advance(1)
                    pieces.ended += 1
                    pieces.log.append(f"+{self.number}")
                return self.left

            def is_running(self) -> bool:
                return bool(pieces.late)

            def logits(self, wait: bool) -> Any:
                pieces.log.append(f"-{self.number}")
                return one.logits(wait)

            def cancel(self) -> None:
                pieces.open = 0

        three = Three()
        self.at_once.append(at_once)
        if at_once:
            three.advance(three.pieces)
        return three


@pytest.fixture(scope="module")
def four() -> engine.LLM:
    return engine.load(device="cpu", n_ctx=512, n_threads=1, parallel=4)


def pages_in_use(llm: engine.LLM) -> int:
    """Pages that requests and idle slots have."""
    return sum(pool.n_pages - pool.n_free for pool in llm.cache.pools.values())


def test_a_common_beginning_is_read_once(four: engine.LLM) -> None:
    """The second request shares all whole pages of it, also while the first one runs; together they have fewer pages."""
    four.reset()
    ids = np.random.default_rng(0).integers(0, four.config.n_vocab, 200).tolist()
    first = four.generate(ids, max_tokens=30, temperature=0, ignore_eos=True)
    next(first)
    own = pages_in_use(four)
    second = four.generate([*ids, 7], max_tokens=30, temperature=0, ignore_eos=True)
    next(second)
    assert second.timings.cache_n == 192 and second.timings.prompt_n == 9
    assert own == 4 and pages_in_use(four) == own + 1
    for answer in (first, second):
        for _ in answer:
            pass
    third = four.complete([*ids[:130], 5], max_tokens=2, temperature=0)
    assert third.timings.cache_n == 128
    four.check_pages()
    with engine.load(device="cpu", n_ctx=512, n_threads=1) as fresh:
        assert fresh.complete([*ids, 7], max_tokens=30, temperature=0, ignore_eos=True).ids == second.ids


def test_a_hybrid_takes_states_up_at_page_borders(tmp_path: Path) -> None:
    """After the end of a message another conversation continues from the page border before it.  A text that leaves another
    one elsewhere is read from the nearest state, here the beginning, and a second one that does so reads at most a page."""
    llm = load(tmp_path, "hybrid", parallel=3)
    rng, eog = np.random.default_rng(1), next(iter(llm.tokenizer.eog_ids), None)
    if eog is None:
        pytest.skip("the vocabulary of random models has no end of a message")
    system = [*rng.integers(5, 200, 150).tolist(), eog]
    kept = []
    for seed in range(3):
        ids = [*system, *rng.integers(5, 200, 100 + seed).tolist()]
        kept.append(llm.complete(ids, max_tokens=3, seed=seed).timings.cache_n)
    assert kept == [0, 128, 128]
    text, kept = rng.integers(5, 200, 300).tolist(), []
    for seed in range(3):
        ids = [*text, *rng.integers(5, 200, 40 + seed).tolist()]
        kept.append(llm.complete(ids, max_tokens=3, seed=seed).timings.cache_n)
    assert kept == [0, 0, 256]
    llm.check_pages()


@pytest.mark.more
def test_no_page_is_lost(tmp_path: Path) -> None:
    """10 000 short requests one after another, and 1000 at once."""
    llm = load(tmp_path, "dense", parallel=4)
    n_vocab = llm.config.n_vocab
    rng = np.random.default_rng(0)

    def one_after_another(count: int) -> None:
        for _ in range(count):
            ids = rng.integers(0, n_vocab, int(rng.integers(1, 4))).tolist()
            llm.complete(ids, max_tokens=int(rng.integers(1, 3)), seed=1, ignore_eos=True)

    def at_once(count: int) -> None:
        requests = []
        for _ in range(count):
            ids = rng.integers(0, n_vocab, int(rng.integers(1, 80))).tolist()
            requests.append(Request(ids, Sampler(SamplerParams(temperature=0.0, seed=1), n_vocab), 2))
            llm.core.submit(requests[-1])
        while llm.core.step():
            pass
        assert all(len(request.items) == 2 for request in requests)

    # Until passes of every number of rows have been recorded.
    one_after_another(20)
    at_once(100)
    gc.collect()
    objects = len(gc.get_objects())
    one_after_another(amount(10_000, 300))
    at_once(amount(1000, 100))
    gc.collect()
    assert abs(len(gc.get_objects()) - objects) < 500
    llm.check_pages()
    llm.reset()
    assert all(pool.n_free == pool.n_pages for pool in llm.cache.pools.values())


def test_a_request_that_fails_fails_alone(four: engine.LLM) -> None:
    expected = four.complete(PROMPT, max_tokens=12, temperature=0).ids
    everything = {id: float("-inf") for id in range(four.config.n_vocab)}

    def broken(done: int, total: int) -> None:
        raise ZeroDivisionError

    def processor(ids: Any, logits: Any) -> None:
        if len(ids) > 10:
            raise KeyError(len(ids))

    good = four.generate(PROMPT, max_tokens=12, temperature=0)
    next(good)
    with pytest.raises(ZeroDivisionError):
        four.complete("import os\n", on_prefill=broken)
    with pytest.raises(engine.errors.EngineError):
        four.complete("import os\n", logit_bias=everything)
    with pytest.raises(KeyError):
        four.complete("import os\n", max_tokens=20, logits_processors=[processor], ignore_eos=True)
    with pytest.raises(ContextError, match="600 tokens and the context 512"):
        four.generate([1] * 600)
    for _ in good:
        pass
    assert good.ids == expected
    four.check_pages()


def test_streams_of_an_event_loop(four: engine.LLM) -> None:
    """Several at once, one of which is cancelled: its slot is free for others."""
    prompts = [PROMPT, "import os\n", "for i in range("]
    expected = [four.complete(prompt, max_tokens=16, seed=3).text for prompt in prompts]

    async def text(prompt: str) -> str:
        return "".join([piece async for piece in four.stream(prompt, max_tokens=16, seed=3)])

    async def first_piece() -> None:
        async for _ in four.stream("class A:\n", max_tokens=400, ignore_eos=True):
            return

    async def all_of_them() -> list[str]:
        found: list[Any] = await asyncio.gather(first_piece(), *(text(prompt) for prompt in prompts))
        return list(found[1:])

    assert asyncio.run(all_of_them()) == expected
    four.reset()
    assert pages_in_use(four) == 0


def test_numbers_of_answers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="parallel must be 1 to 1024"):
        engine.load(parallel=0)


def test_a_scored_prompt_is_read_whole(four: engine.LLM) -> None:
    """The logits after each token of a prompt are those of ``logits``, also if the cache holds the prompt already."""
    prompt = four.tokenize(PROMPT * 40)[:200]
    expected = four.logits(prompt)
    four.complete(prompt, max_tokens=2)
    greedy = Sampler(SamplerParams(temperature=0.0, seed=0), four.config.n_vocab)
    got: list[tuple[int, np.ndarray]] = []
    scored = Request(prompt, greedy, 1, on_logits=lambda first, rows: got.append((first, rows.copy())))
    four.core.submit(scored)
    while four.core.step():
        pass
    assert [first for first, _ in got] == [0, 128]
    assert np.array_equal(np.concatenate([rows for _, rows in got]), expected)
    assert [token for token, _ in scored.items] == [int(expected[-1].argmax())]
