"""Drafts accepted by ratio or by p-min, through the whole loop: the result has the distribution it should have."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.decode import host_steps as steps_module
from engine.decode.host_steps import HostSteps
from engine.decode.request import Request
from engine.decode.running import Running, follow
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.draft_model import DraftModel
from engine.speculative.params import SpeculationParams
from engine.speculative.speculation import Speculation
from tests.tiers import amount

N_VOCAB = 4
PROMPT = [1, 2]
TOKENS = 3
SEEDS = amount(20_000, 4_000)
LEAST_P = 1e-4
"""The probability that a correct loop fails, once: the seeds are fixed."""

Table = np.ndarray
"""Logits after two tokens: float32 [N_VOCAB, N_VOCAB, N_VOCAB]."""


class Chain:
    """A model whose logits depend on the last two tokens, with a cache that holds tokens."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.cache = self.sequence = self
        self.tokens: list[int] = []
        self.slot, self.salt = 0, ""
        self.n_ctx, self.max_rows, self.rewind = 64, 16, 64
        self.ops = SimpleNamespace(decode_rows=16, padded_rows=lambda rows, mixed: rows)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def settle(self) -> None:
        """Nobody shares its tokens."""

    def commit(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def step(self, parts: Sequence[tuple["Chain", Sequence[int]]]) -> list[np.ndarray]:
        ((sequence, tokens),) = parts
        assert sequence is self
        history = [*self.tokens, *tokens]
        return [np.stack([self.table[history[i - 1], history[i]] for i in range(len(self.tokens), len(history))])]


def draft_model(table: Table) -> DraftModel:
    """A draft model with the logits of a table."""
    vocabulary = SimpleNamespace(tokens=list("abcd"))
    llm: Any = SimpleNamespace(
        path="chain",
        n_bytes_read=1,
        config=SimpleNamespace(n_vocab=N_VOCAB),
        tokenizer=SimpleNamespace(vocabulary=vocabulary),
        can_sample=lambda sampler: False,
        extend=lambda history, salt: table[history[-2], history[-1]],
    )
    return DraftModel(llm, llm)


def random_table(seed: int, spread: float = 1.5) -> Table:
    return (np.random.default_rng(seed).standard_normal((N_VOCAB,) * 3) * spread).astype(np.float32)


TARGET = random_table(1)
DRAFTS = {
    "good": TARGET + random_table(2, 0.3),
    "bad": random_table(3),
    "adversarial": -2 * TARGET,  # the less likely to the target the more likely to the draft
    "certain": random_table(4, 40.0),  # almost always the same token, and never the others
}


# The first draw decides whether there is a second draft.
DRAFTS["unsure"] = -TARGET * np.float32(5)
DRAFTS["unsure"][PROMPT[0], PROMPT[1]] /= 5
DRAFTS["unsure"][PROMPT[1], [0, 3]] = 0


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    wide = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return wide / wide.sum()


def exact(params: SamplerParams) -> dict[tuple[int, ...], float]:
    """The probability of each beginning of an answer, in float64, over the candidates of plain sampling."""
    sampler = Sampler(params, N_VOCAB)
    after: dict[tuple[int, ...], dict[int, float]] = {}

    def following(answer: tuple[int, ...]) -> dict[int, float]:
        if answer not in after:
            history = [*PROMPT, *answer]
            ids, logits = sampler.candidates(TARGET[history[-2], history[-1]], history)
            after[answer] = dict(zip(ids.tolist(), softmax(logits, params.temperature).tolist(), strict=True))
        return after[answer]

    return {
        answer: math.prod(following(answer[:i]).get(token, 0.0) for i, token in enumerate(answer))
        for answer in product(range(N_VOCAB), repeat=TOKENS)
    }


def answers(
    params: SamplerParams, speculation: SpeculationParams, draft: Table, seeds: Sequence[int]
) -> tuple[Counter[tuple[int, ...]], int]:
    """The count of each answer, and the number of drafts kept."""
    sampler = Sampler(params, N_VOCAB)
    source = draft_model(draft)
    model: Any = Chain(TARGET)
    found: Counter[tuple[int, ...]] = Counter()
    kept = 0
    for seed in seeds:
        sampler.seed = seed
        model.tokens = list(PROMPT[:-1])
        drafts = Speculation(speculation, sampler, source, 10.0)
        stream = follow(Running(Request(PROMPT, sampler, TOKENS, drafts), model, HostSteps(model)))
        found[tuple(token for token, _ in stream)] += 1
        kept += drafts.statistics.accepted
    return found, kept


def p_value(found: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square, with cells of fewer than 5 merged (Wilson and Hilferty 1931 for the tail)."""
    total = found.total()
    assert not set(found) - {answer for answer, p in expected.items() if p > 0}
    cells = [(found[answer], p * total) for answer, p in expected.items() if p > 0]
    small = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5]
    if small:
        cells.append((sum(n for n, _ in small), sum(p for _, p in small)))
    statistic = sum((n - p) ** 2 / p for n, p in cells)
    k = len(cells) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
RATIO = SpeculationParams(accept="ratio")


@pytest.mark.more
@pytest.mark.parametrize(
    ("draft", "options", "params"),
    [
        ("good", {"repeat_penalty": 1.4, "presence_penalty": 0.3, "logit_bias": {2: 0.7}}, RATIO),
        ("bad", {"top_k": 3, "min_p": 0.02, "temperature": 0.7}, RATIO),
        ("adversarial", {}, RATIO),
        ("certain", {"temperature": 1.3}, RATIO),
        # A drawn token must not be dropped because of what it is.
        ("adversarial", {}, SpeculationParams(accept="ratio", draft_p_min=0.45)),
        ("unsure", {}, SpeculationParams(accept="ratio", draft_p_min=0.35, draft_min=2)),
    ],
)
def test_the_distribution_is_that_of_the_target(draft: str, options: dict[str, Any], params: SpeculationParams) -> None:
    sampling = SamplerParams(**PLAIN | options)
    seeds = SEEDS if draft != "unsure" else 2 * SEEDS  # to drop what was drawn would make a small difference
    found, kept = answers(sampling, params, DRAFTS[draft], range(seeds))
    assert p_value(found, exact(sampling)) > LEAST_P
    assert 0.05 * seeds < kept < 1.9 * seeds  # drafts were kept, and rejected


def always(target: Any, draft: Any, token: int, seed: int, position: int) -> tuple[int, bool]:
    """Keeps what the target can draw at all."""
    return (token, True) if token in target[0] else (int(target[0][0]), False)


def without_correction(target: Any, draft: Any, token: int, seed: int, position: int) -> tuple[int, bool]:
    """A wrong rule: where a draft is rejected, it draws from the target's distribution instead of from max(p - q, 0)."""
    chosen, kept = BY_RATIO(target, draft, token, seed, position)
    ids, p = target
    random = np.random.default_rng((seed, position))
    return (chosen, True) if kept else (int(random.choice(ids, p=p / p.sum(dtype=np.float64))), False)


def without_chance(target: Any, draft: Any, token: int, seed: int, position: int) -> tuple[int, bool]:
    """A wrong rule: rejects every draft that the draft model overrates."""
    p, q = (dict(zip(*(array.tolist() for array in each), strict=True)).get(token, 0.0) for each in (target, draft))
    if p >= q:
        return token, True
    rest = dict(zip(*(array.tolist() for array in target), strict=True))
    for other, share in zip(*(array.tolist() for array in draft), strict=True):
        rest[other] = max(rest.get(other, 0.0) - share, 0.0)
    total = sum(rest.values())
    chosen = np.random.default_rng((seed, position)).choice(list(rest), p=[share / total for share in rest.values()])
    return int(chosen), False


BY_RATIO = steps_module.by_ratio


@pytest.mark.parametrize("rule", [always, without_correction, without_chance])
def test_wrong_rules_are_found(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "by_ratio", rule)
    sampling = SamplerParams(**PLAIN)
    found, _ = answers(sampling, RATIO, DRAFTS["bad"], range(3000))
    assert p_value(found, exact(sampling)) < LEAST_P


def test_plain_sampling_passes_the_same_test() -> None:
    sampling = SamplerParams(**PLAIN)
    found, kept = answers(sampling, SpeculationParams(draft_max=1), DRAFTS["bad"], range(5_000))
    assert kept == 0  # the first steps of an answer are plain where time decides about drafts
    assert p_value(found, exact(sampling)) > LEAST_P


@pytest.mark.parametrize("bound", [0.0, 0.3, 1.0])
def test_p_min_keeps_what_has_that_probability(bound: float) -> None:
    """Against a plain loop in which the first choice, drawn by the draft model, is kept with its probability."""
    sampling = SamplerParams(**PLAIN | {"top_k": 3})
    params = SpeculationParams(accept="p-min", accept_p_min=bound, draft_max=1)
    sampler = Sampler(sampling, N_VOCAB)
    kept = refused = 0
    for seed in range(500):
        sampler.seed = seed
        model: Any = Chain(TARGET)
        model.tokens = list(PROMPT[:-1])
        speculation = Speculation(params, sampler, draft_model(DRAFTS["bad"]), 10.0)
        found = [
            token for token, _ in follow(Running(Request(PROMPT, sampler, 2, speculation), model, HostSteps(model)))
        ]
        draft = sampler.sample(DRAFTS["bad"][PROMPT[-2], PROMPT[-1]], 2, PROMPT)
        ids, logits = sampler.candidates(TARGET[PROMPT[-2], PROMPT[-1]], PROMPT)
        p = dict(zip(ids.tolist(), softmax(logits, 1.0).tolist(), strict=True)).get(draft, 0.0)
        plain = sampler.sample(TARGET[PROMPT[-2], PROMPT[-1]], 2, PROMPT)
        keeps = p >= bound or draft == plain
        assert found[0] == (draft if keeps else plain)
        assert found[1] == sampler.sample(TARGET[PROMPT[-1], found[0]], 3, [*PROMPT, found[0]])
        assert speculation.statistics.accepted == keeps
        kept, refused = kept + keeps, refused + (not keeps)
    assert kept > 50 and (refused > 50 or bound == 0)


@pytest.mark.parametrize("accept", ["ratio", "p-min"])
def test_a_seed_is_a_text(accept: str) -> None:
    """Where drafts affect the text, their number must not depend on the clock."""
    sampling, params = SamplerParams(**PLAIN), SpeculationParams(accept=accept, draft_max=3)
    one, other = (answers(sampling, params, DRAFTS["good"], range(300)) for _ in range(2))
    assert one == other
    assert len(one[0]) > 20
