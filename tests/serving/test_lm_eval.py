"""lm-eval's ``local-completions`` against a server, if lm-eval is installed: its scores are those of the model, exactly."""

from typing import Any

import numpy as np
import pytest

from engine import LLM
from engine.sampling.sampler import logprobs

pytest.importorskip("lm_eval", reason="lm-eval is not installed")
pytestmark = pytest.mark.together("serving")

PAIRS = [
    ("def add(a, b):\n    return", " a + b\n"),
    ("def add(a, b):\n    return", " b - a\n"),
    ("import numpy as", " np"),
    ("# naïve → 😀", " x = 1"),
    ("for i in range(", "10):\n        print(i)\n"),
]
"""Beginnings and how they may go on."""


@pytest.fixture(scope="module", params=[1, 3])
def model(request: pytest.FixtureRequest, server: str) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    url, asked = f"{server}/v1/completions", {"max_length": 512, "batch_size": request.param}
    return LocalCompletionsAPI(base_url=url, model="", tokenizer_backend="remote", tokenized_requests=True, **asked)


def test_scores_and_greedy_flags_are_those_of_the_model(model: Any, llm: LLM) -> None:
    from lm_eval.api.instance import Instance

    kind: Any = "loglikelihood"
    asked = [Instance(request_type=kind, doc={}, arguments=pair, idx=i) for i, pair in enumerate(PAIRS)]
    found = model.loglikelihood(asked, disable_tqdm=True)
    flags = []
    for (context, continuation), (score, greedy) in zip(PAIRS, found, strict=True):
        # As lm-eval divides a text: the tokens of the whole, less those of its beginning.
        first = len(llm.tokenizer.encode(context, add_special=False))
        ids = llm.tokenizer.encode(context + continuation, add_special=False)
        rows = llm.logits(ids)[first - 1 : -1]
        values = [float(logprobs(row, [id]).values[0]) for row, id in zip(rows, ids[first:], strict=True)]
        assert score == sum(values)
        flags.append(greedy)
        assert greedy == ([int(np.argmax(row)) for row in rows] == ids[first:])
    assert set(flags) == {True, False}


def test_texts_are_generated(model: Any, llm: LLM) -> None:
    from lm_eval.api.instance import Instance

    kind: Any = "generate_until"
    options = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}
    pair: Any = (PAIRS[0][0], options)
    (text,) = model.generate_until([Instance(request_type=kind, doc={}, arguments=pair, idx=0)], disable_tqdm=True)
    ids = llm.tokenizer.encode(PAIRS[0][0], add_special=False)
    assert text == llm.complete(ids, max_tokens=8, temperature=0, stop="\n").text
