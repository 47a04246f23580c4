"""Log-probabilities of texts: those of an answer with the same tokens, bit for bit."""

from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import ContextError, UsageError
from engine.sampling.sampler import logprobs


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load(n_ctx=256, device="cpu", parallel=3)


def test_scores_are_the_log_probabilities_of_an_answer(llm: engine.LLM) -> None:
    answer = llm.complete("def add(a, b):\n", max_tokens=20, seed=4, logprobs=3, ignore_eos=True)
    scores = llm.score([*answer.prompt_ids, *answer.ids], logprobs=3)
    assert scores[len(answer.prompt_ids) - 1 :] == answer.logprobs
    assert len(scores) == len(answer.prompt_ids) + len(answer.ids) - 1


def test_they_do_not_depend_on_company_or_on_what_was_read_before(llm: engine.LLM) -> None:
    texts = ["import numpy as np\n" * 9, "x", "def add(a, b):\n    return a + b\n", "import numpy as np\n" * 8]
    together = llm.score(texts, logprobs=1)
    for text, scores in zip(texts, together, strict=True):
        ids = llm.tokenize(text)
        rows = llm.logits(ids)
        assert [entry.id for entry in scores] == ids[1:]
        expected = [float(logprobs(row, [id]).values[0]) for row, id in zip(rows, ids[1:], strict=False)]
        assert [entry.logprob for entry in scores] == expected
        assert llm.score(text, logprobs=1) == scores
    # They are logarithms of probabilities.
    total = np.exp(np.float64(logprobs(llm.logits([5])[0], range(llm.config.n_vocab)).values)).sum()
    assert abs(total - 1) < 1e-5


def test_bad_arguments_are_refused(llm: engine.LLM) -> None:
    cases: dict[str, Any] = {"no tokens": [""], "text 1": ["a", ""], "must be 0 to": [[10**6]], "logprobs": ["a"]}
    for message, texts in cases.items():
        with pytest.raises(UsageError, match=message):
            llm.score(texts, logprobs=-1 if message == "logprobs" else 0)
    with pytest.raises(ContextError):
        llm.score([1] * 300)
