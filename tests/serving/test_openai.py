"""OpenAI's interfaces, as its own package sees them."""

import time
from typing import Any

import numpy as np
import pytest

from engine import LLM
from engine.sampling.sampler import logprobs
from tests.serving.conftest import WAIT_SECONDS

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.together("serving")

HELLO: Any = [{"role": "user", "content": "def add(a, b):"}]

CODE = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def client(server: str) -> Any:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as opened:
        yield opened


# --- chat ----------------------------------------------------------------------------------------------------------


def test_a_chat_is_answered(client: Any, llm: LLM) -> None:
    answer = client.chat.completions.create(model="", messages=HELLO, max_tokens=8, temperature=0)
    expected = llm.chat(HELLO, max_tokens=8, temperature=0, chat_template="chatml")
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_ids)
    assert answer.usage.completion_tokens == expected.timings.predicted_n
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same(client: Any) -> None:
    asked: Any = {"model": "", "messages": HELLO, "max_tokens": 12, "seed": 5}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_several_answers_have_seeds_in_a_row(client: Any) -> None:
    asked: Any = {"model": "", "messages": HELLO, "max_tokens": 12}
    several = client.chat.completions.create(**asked, n=3, seed=5)
    each = [client.chat.completions.create(**asked, seed=5 + i).choices[0].message.content for i in range(3)]
    assert [choice.message.content for choice in several.choices] == each
    assert len(set(each)) > 1


def test_a_chat_reports_log_probabilities(client: Any) -> None:
    answer = client.chat.completions.create(
        model="", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert content
    for token in content:
        assert len(token.top_logprobs) == 3
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, token.top_logprobs[0].logprob)
        assert token.logprob == max(other.logprob for other in token.top_logprobs) <= 0


# --- completions ---------------------------------------------------------------------------------------------------


def complete(client: Any, prompt: Any = CODE, **options: Any) -> Any:
    return client.completions.create(model="", prompt=prompt, **options)


def test_a_text_is_continued(client: Any, llm: LLM) -> None:
    answer = complete(client, temperature=0)
    expected = llm.complete(llm.tokenizer.encode(CODE), max_tokens=16, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == expected.timings.predicted_n


def test_ids_are_the_same_as_their_text(client: Any, llm: LLM) -> None:
    ids = llm.tokenizer.encode(CODE)
    assert complete(client, ids, seed=1).choices[0].text == complete(client, CODE, seed=1).choices[0].text


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_every_prompt_is_answered_as_if_it_were_alone(client: Any, llm: LLM, kind: str) -> None:
    texts = [CODE, "import numpy as np\n", "class "]
    prompts = texts if kind == "text" else [llm.tokenizer.encode(text) for text in texts]
    answer = complete(client, prompts, n=2, best_of=2, seed=3, max_tokens=6)
    assert [choice.index for choice in answer.choices] == list(range(6))
    alone = [complete(client, prompt, seed=3 + i, max_tokens=6) for prompt in prompts for i in range(2)]
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in alone]
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone[::2])
    assert answer.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)


def test_a_stop_text_ends_an_answer(client: Any) -> None:
    answer = complete(client, "def add(a, b):\n    return", temperature=0, stop=["+"]).choices[0]
    assert (answer.text, answer.finish_reason) == (" a ", "stop")


def test_a_control_token_in_a_text_is_text(client: Any, llm: LLM) -> None:
    control = llm.tokenizer.vocabulary.tokens[min(llm.tokenizer.eog_ids)]
    answer = complete(client, control, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert answer.text == control
    assert control not in answer.logprobs.tokens
    assert "".join(answer.logprobs.tokens[-len(llm.tokenizer.encode(control, add_special=False)) :]) == control


def test_half_a_character_in_a_prompt_is_replaced(server: str) -> None:
    # Python's JSON reads it, but UTF-8 cannot express it.
    body = rb'{"prompt": "a\ud83d", "echo": true, "max_tokens": 0}'
    answer = httpx.post(
        f"{server}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=WAIT_SECONDS
    )
    assert answer.json()["choices"][0]["text"] == "a\ufffd"


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_of_completions_says_the_same(client: Any, echo: bool) -> None:
    asked: Any = {"prompt": [CODE, "x = "], "n": 2, "seed": 7, "max_tokens": 9, "logprobs": 2, "echo": echo}
    whole = complete(client, **asked)
    chunks = list(complete(client, **asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 10
    for choice in whole.choices:
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        assert [part.finish_reason for part in own if part.finish_reason] == [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert sum((getattr(part.logprobs, name) for part in own), []) == getattr(choice.logprobs, name)


# --- scores --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [CODE, "x = 'héllo → 😀'  # naïve\n"])
def test_an_echo_has_the_scores_of_the_model(client: Any, llm: LLM, text: str) -> None:
    ids = llm.tokenizer.encode(text)
    answer = complete(client, [ids], echo=True, logprobs=3, max_tokens=0, temperature=0).choices[0]
    found = answer.logprobs
    assert answer.text == text
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    rows = [logprobs(row, [id], 3) for row, id in zip(llm.logits(ids), ids[1:], strict=False)]
    assert found.token_logprobs[1:] == [float(row.values[0]) for row in rows]
    for row, value, top in zip(rows, found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert set(top.values()) == {value, *map(float, row.top_values)}
    ends = [*found.text_offset[1:], len(text)]
    for token, first, end in zip(found.tokens, found.text_offset, ends, strict=True):
        assert token.startswith("bytes:") or text[first:end] in (token, "")


def test_greedy_tokens_are_told_by_equal_numbers(client: Any, llm: LLM) -> None:
    # As lm-eval asks, and reads the answer: the last entry is the token that it did not want.
    prompt = llm.tokenizer.encode("def add(a, b):\n    return")
    greedy = llm.complete(prompt, max_tokens=4, temperature=0).ids
    other = [greedy[0], greedy[0], greedy[0]]
    answer = complete(client, [prompt + greedy, prompt + other], echo=True, logprobs=1, max_tokens=1, temperature=0)
    flags = []
    for choice, continuation in zip(answer.choices, (greedy, other), strict=True):
        values = choice.logprobs.token_logprobs[len(prompt) : -1]
        tops = choice.logprobs.top_logprobs[len(prompt) : -1]
        assert len(values) == len(continuation)
        flags.append([value == max(top.values()) for value, top in zip(values, tops, strict=True)])
    assert flags[0] == [True] * len(greedy)
    expected = [int(np.argmax(row)) for row in llm.logits(prompt + other)[len(prompt) - 1 : -1]]
    assert flags[1] == [a == b for a, b in zip(expected, other, strict=True)]
    assert False in flags[1]


def test_the_token_that_ends_an_answer_has_a_score(client: Any, llm: LLM) -> None:
    end = min(llm.tokenizer.eog_ids)
    answer = complete(client, logit_bias={str(end): 100}, echo=True, logprobs=1, max_tokens=1, temperature=0)
    ids = llm.tokenizer.encode(CODE)
    found = answer.choices[0].logprobs
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (CODE, "stop")
    assert len(found.tokens) == len(ids) + 1
    assert found.token_logprobs[-1] == float(logprobs(llm.logits(ids)[-1], [end]).values[0])
    assert found.text_offset[-1] == len(CODE)


# --- models and errors ---------------------------------------------------------------------------------------------


def test_models_are_listed(client: Any, llm: LLM) -> None:
    (model,) = client.models.list().data
    assert model.max_model_len == llm.n_ctx
    assert model.meta["n_params"] == llm.n_params
    assert client.models.retrieve(model.id) == model
    assert complete(client, max_tokens=1).model == model.id


def test_the_only_model_answers_to_every_name(client: Any) -> None:
    """As with llama-server; the answer says which model it was."""
    asked: Any = {"messages": HELLO, "max_tokens": 4, "temperature": 0}
    usual, other = (client.chat.completions.create(model=name, **asked) for name in ("", "gpt-4o"))
    assert (other.model, other.choices[0].message.content) == (usual.model, usual.choices[0].message.content)
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("none/such")
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, 10**30]}, "prompt[1]"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 1000}, "prompt"),
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"temperature": 3}, "temperature"),
        ({"stop": [1]}, "stop[0]"),
    ],
)
def test_an_error_names_the_field(client: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="", extra_body={"prompt": "a"} | fields, prompt="a")
    assert refused.value.param == param
    assert refused.value.body["message"].startswith(param)


def test_a_chat_error_names_the_field(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="", messages=[{"role": "robot", "content": "a"}])
    assert refused.value.param == "messages[0].role"


@pytest.mark.parametrize(("length", "max_tokens"), [(512, None), (512, 1), (513, 0), (600, 16)])
def test_a_prompt_that_is_too_long_is_refused(client: Any, length: int, max_tokens: int | None) -> None:
    with pytest.raises(openai.BadRequestError, match="context") as refused:
        complete(client, [[5] * 3, [5] * length], **({} if max_tokens is None else {"max_tokens": max_tokens}))
    assert refused.value.code == "context_length_exceeded"
    assert isinstance(refused.value.body, dict)
    assert (refused.value.body["n_prompt_tokens"], refused.value.body["n_ctx"]) == (length, 512)


def test_a_prompt_that_fills_the_context_is_scored(client: Any) -> None:
    answer = complete(client, [[5] * 512], echo=True, logprobs=1, max_tokens=0).choices[0]
    assert len(answer.logprobs.tokens) == 512
    assert answer.finish_reason == "length"


def test_embeddings_are_refused(client: Any) -> None:
    with pytest.raises(openai.InternalServerError, match="is not made for embeddings") as refused:
        client.embeddings.create(model="", input="a")
    assert refused.value.status_code == 501


def test_an_answer_does_not_wait_for_an_acknowledgement(server: str) -> None:
    seconds = []
    with httpx.Client() as kept:
        for _ in range(10):
            begun = time.perf_counter()
            kept.get(f"{server}/v1/models")
            seconds.append(time.perf_counter() - begun)
    # The first answer of a connection never waits, and others may be late for another reason.
    assert sorted(seconds)[1] < 0.035
