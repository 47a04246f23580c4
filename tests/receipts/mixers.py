"""Receipts and scores of small models, one for each mixer, which are made and checked on any device."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine import SpeculationParams
from engine.receipts.form import chain_of
from engine.synthetic.model import make_model
from engine.synthetic.shapes import shapes

MIXERS = {
    "attention": "tiny-qwen3",
    "latent": "tiny-deepseek2",
    "compressed": "tiny-deepseek4",
    "delta net": "tiny-qwen35",
    "KDA": "tiny-kimi-linear",
    "Mamba-2": "tiny-granitehybrid",
    "short convolution": "tiny-lfm2",
}
"""Each mixer, and a shape that has it."""

N_CTX = 256
LOOKUP = SpeculationParams(lookup=True)


def write(folder: Path, mixer: str) -> Path:
    """A file of the model with a mixer."""
    return make_model(folder / f"{MIXERS[mixer]}.gguf", shapes()[MIXERS[mixer]], "Q4_K_M")


def opened(path: Path, device: str) -> engine.LLM:
    """The model, for two answers at a time."""
    return engine.load(path, device=device, n_ctx=N_CTX, parallel=2, mtp=False)


def prompts() -> list[list[int]]:
    """Two texts with repetitions, which lookup drafts from; one has more tokens than a page."""
    rng = np.random.default_rng(56)
    return [rng.integers(3, 250, 12).tolist() * times for times in (7, 2)]


def receipts(llm: engine.LLM) -> list[dict[str, Any]]:
    """Receipts of two answers, which are the same alone and in company, with drafts and without."""
    more: dict[str, Any] = {"max_tokens": 20, "seed": 7, "temperature": 0.7, "ignore_eos": True, "receipt": True}
    together = [answer.receipt() for answer in llm.complete(prompts(), speculation=LOOKUP, **more)]
    alone = [llm.complete(prompt, **more).receipt() for prompt in prompts()]
    assert together == alone
    return [json.loads(json.dumps(each)) for each in alone]


def check_receipts(llm: engine.LLM, found: list[dict[str, Any]]) -> None:
    """A model verifies receipts that it or another device has made, and notices a token that was changed."""
    for receipt in found:
        verified = llm.verify(receipt)
        assert verified.same, verified.problem
        changed = receipt | {"tokens": [*receipt["tokens"][:-1], receipt["tokens"][-1] ^ 1]}
        verified = llm.verify(changed | {"chain": chain_of(changed)})
        assert verified.token == len(receipt["tokens"]) - 1


def check_scores(llm: engine.LLM) -> list[list[engine.TokenLogprob]]:
    """Scores are the log-probabilities of answers, bit for bit, with drafts and in company; returns them."""
    more: dict[str, Any] = {"max_tokens": 20, "seed": 7, "temperature": 0.7, "ignore_eos": True, "logprobs": 3}
    answers = llm.complete(prompts(), speculation=LOOKUP, **more)
    scores = llm.score([[*answer.prompt_ids, *answer.ids] for answer in answers], logprobs=3)
    for answer, score in zip(answers, scores, strict=True):
        assert answer.logprobs == score[len(answer.prompt_ids) - 1 :]
    return scores


def compare(folder: Path, mixer: str, devices: tuple[str, str] = ("cpu", "cuda")) -> None:
    """Two devices give the same receipts and scores, and each verifies the receipts of the other."""
    path = write(folder, mixer)
    with opened(path, devices[0]) as one, opened(path, devices[1]) as other:
        own, others = receipts(one), receipts(other)
        check_receipts(one, others)
        check_receipts(other, own)
        assert own == others
        assert check_scores(one) == check_scores(other)
