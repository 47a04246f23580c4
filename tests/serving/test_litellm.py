"""litellm as a client, if it is installed: many programs reach a server through it."""

import json
from importlib.util import find_spec
from typing import Any

import pytest

from engine import LLM
from tests.serving.conftest import WAIT_SECONDS

if find_spec("litellm") is None:  # to import it takes seconds
    pytest.skip("litellm is not installed", allow_module_level=True)
pytestmark = pytest.mark.together("serving")

HELLO: Any = [{"role": "user", "content": "def add(a, b):"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module")
def litellm() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise it asks for a list of prices.
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm

        patch.setattr(litellm, "suppress_debug_info", True)
        yield litellm


@pytest.fixture(scope="module")
def ask(litellm: Any, server: str, llm: LLM) -> Any:
    def asked(messages: Any = HELLO, *, name: str, **more: Any) -> Any:
        known = {"model": f"openai/{name}", "api_base": f"{server}/v1", "api_key": "none", "num_retries": 0}
        return litellm.completion(**(known | {"messages": messages, "max_tokens": 8, "temperature": 0} | more))

    return asked


@pytest.fixture(scope="module")
def name(server: str) -> str:
    import httpx

    return str(httpx.get(f"{server}/v1/models", timeout=WAIT_SECONDS).json()["data"][0]["id"])


def test_an_answer_and_its_stream(ask: Any, llm: LLM, name: str) -> None:
    expected = llm.chat(HELLO, max_tokens=8, temperature=0, chat_template="chatml")
    whole = ask(name=name)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage.prompt_tokens == len(expected.prompt_ids)
    chunks = list(ask(name=name, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_tools_and_their_results_are_sent(ask: Any, name: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 1})}}
    thought: dict[str, Any] = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    answer = ask([*HELLO, thought, result], name=name, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True)
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_errors_have_their_types(litellm: Any, ask: Any, name: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="must be a number, 0 to 2"):
        ask(name=name, temperature=3)
    with pytest.raises(litellm.ContextWindowExceededError):
        ask([{"role": "user", "content": "word " * 2000}], name=name)
