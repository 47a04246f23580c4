"""A budget of positions: what stays of a prompt is a function of the text, and so is the answer, however it is computed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.thinning import kept_chunks
from engine.decode.request import Request
from engine.errors import ModelError, UsageError
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from tests.models.test_mixed_passes import files

BUDGET = 256
IDS = np.random.default_rng(3).integers(0, 280, 480).tolist()
LONGER = [*IDS[:300], *np.random.default_rng(4).integers(0, 280, 170).tolist()]
OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True, "logprobs": 1}
KINDS = (
    "dense",
    "windows",
    "hybrid",
    "mixture",
    "hybrid mixture",
    "convolutions",
    "mamba",
    "pairs",
    "gemma4",
    "gemma3n",
    "eagle3",
    "dflash",
)


def values(answer: engine.Generation) -> tuple[list[int], list[float]]:
    """The tokens of an answer and their logarithms of probabilities."""
    return answer.ids, [entry.logprob for entry in answer.logprobs]


def full(llm: engine.LLM) -> int:
    """The pages without a window that sequences hold."""
    pools = llm.model.cache.pools
    return sum(pool.n_pages - pool.n_free for paging, pool in pools.items() if not paging.window)


# --- which chunks stay -------------------------------------------------------------------------------------------------


def test_the_chunks_that_stay() -> None:
    masses = np.array([1, 5, 9, 5, 0, 9, 2, 7, 0, 0], np.int64)
    # Of 600 tokens, the observed ones begin at 536, in chunk 8 of 10.
    assert kept_chunks(masses, 600, 256) == [0, 2, 8, 9]
    assert kept_chunks(masses, 600, 320 + 63) == [0, 2, 5, 8, 9]
    assert kept_chunks(masses, 600, 448) == [0, 1, 2, 5, 7, 8, 9]
    # The earlier one of two equal masses; the observed tokens fill one chunk.
    assert kept_chunks(masses, 640, 448) == [0, 1, 2, 3, 5, 7, 9]
    assert kept_chunks(masses[:5], 257, 256) == [0, 2, 3, 4]


# --- answers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def given(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return files(request.param, tmp_path) | {"n_ctx": 512, "kv_budget": BUDGET}


def alone(llm: engine.LLM, ids: list[int], **options: Any) -> engine.Generation:
    """An answer to a prompt that nothing is known of."""
    llm.reset()
    return llm.complete(ids, **OPTIONS | options)


@pytest.mark.covering(2)
def test_an_answer_is_a_function_of_its_text(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = SpeculationParams(enabled=False)
    with engine.load(**given) as llm:
        first = alone(llm, IDS, speculation=plain)
        assert first.timings.dropped_n == 256
        # Nothing is left of a thinned sequence but the pages of its prompt, which others can share.
        assert full(llm) == 0 and llm.sequence.length == 0
        again = llm.complete(IDS, **OPTIONS, speculation=plain)
        assert values(again) == values(first) and again.timings.dropped_n == 256
        # The last 64 tokens are read again, from the border of a page or from that of a state before them.
        assert again.timings.cache_n in (384, 0) and (again.timings.cache_n or llm.model.cache.rings)
        drafted = alone(llm, IDS, speculation=SpeculationParams(lookup=True))
        assert values(drafted) == values(first)
        other = alone(llm, LONGER)
        assert values(llm.complete(IDS, **OPTIONS)) == values(first)
        llm.check_pages()
    with engine.load(**given | {"batch_size": 37, "n_threads": 1, "parallel": 3}) as llm:
        answers = [llm.generate(ids, **OPTIONS) for ids in (IDS, LONGER, IDS[:200], IDS)]
        for answer in answers[:3]:
            next(answer)
        llm.core.interrupt()
        for turn in range(40):
            if turn == 9:
                llm.core.interrupt()
            for answer in answers:
                next(answer, None)
        assert [values(answer) for answer in answers[::3]] == [values(first)] * 2 and values(answers[1]) == values(
            other
        )
        assert [answer.timings.dropped_n for answer in answers] == [256, 256, 0, 256]
        llm.check_pages()
    with engine.load(**given | {"kv_budget": 0}) as llm:
        whole = alone(llm, IDS)
        assert values(whole) != values(first) and whole.timings.dropped_n == 0
        assert values(alone(llm, IDS[:200])) == values(answers[2])


def test_pages_run_out(tmp_path: Path) -> None:
    """Three answers have room, of six; a thinned one gives pages back to those that wait."""
    path = make_model(tmp_path / "m.gguf", "tiny-llama", "Q4_1", seed=5)
    options: dict[str, Any] = {"n_ctx": 512, "device": "cpu", "kv_budget": BUDGET}
    prompts = [[*IDS[:n], *LONGER[n:]] for n in (64, 130, 200, 250, 310, 400)]
    with engine.load(path, **options) as llm:
        expected = [alone(llm, ids).ids for ids in prompts]
    with engine.load(path, **options, parallel=6) as llm:
        (pool,) = llm.model.cache.pools.values()
        held = [pool.take() for _ in range(pool.n_free - 20)]
        answers = [llm.generate(ids, **OPTIONS) for ids in prompts]
        while not all(answer.done for answer in answers):
            for answer in answers:
                next(answer, None)
        assert [answer.ids for answer in answers] == expected
        for page in held:
            pool.give_back(page)
        llm.check_pages()


def test_the_next_turn_reads_again(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.gguf", "tiny-llama", "Q4_1", seed=5)
    with engine.load(path, n_ctx=704, device="cpu", kv_budget=BUDGET) as llm:
        # The answer fills a page that begins in the prompt, and the next turn is long enough to share it.
        first = alone(llm, IDS, max_tokens=60)
        turn = [*IDS, *first.ids, *LONGER[:90]]
        second = llm.complete(turn, **OPTIONS)
        # 448 tokens are whole pages of the first prompt; those after it depended on what had been dropped.
        assert second.timings.cache_n == 448 and second.ids == alone(llm, turn).ids
        assert second.timings.dropped_n == 384
        llm.complete(IDS, **OPTIONS)
        llm.save_state(tmp_path / "state")
        assert llm.load_state(tmp_path / "state")[: len(IDS)] == IDS and llm.sequence.length > len(IDS)
        closed = llm.generate(IDS, **OPTIONS)
        next(closed)
        closed.close()
        llm.check_pages()
        assert llm.complete(IDS, **OPTIONS).ids == first.ids[:24]


def test_the_logits_of_a_prompt_and_tokens_that_are_read_in_a_step(tmp_path: Path) -> None:
    """``begun``: the last token is read in the step that chooses the first one, so the prompt ends before it."""
    path = make_model(tmp_path / "m.gguf", "tiny-llama", "Q4_1", seed=5)
    with engine.load(path, n_ctx=512, device="cpu", kv_budget=BUDGET) as llm:
        first = alone(llm, IDS, temperature=0)
        llm.reset()
        greedy = Sampler(SamplerParams(temperature=0.0), llm.config.n_vocab)
        request = Request([*IDS, first.ids[0]], greedy, 23, begun=True)
        assert [token for token, _ in llm.tokens(request)] == first.ids[1:] and request.dropped == 256
        # Texts that are read without a request are whole.
        assert llm.logits(IDS).shape == (480, llm.config.n_vocab)
        assert llm.sequence.length == 480 and llm.prefill(IDS)[1] == 479


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="kv_budget must be at least 256 positions, or 0 for all, not 255"):
        engine.load(kv_budget=255)
    with pytest.raises(ModelError, match="kv_budget is for keys and values, and deepseek2 stores latents"):
        engine.load(**files("latents", tmp_path) | {"kv_budget": 256})
