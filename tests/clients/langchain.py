"""LangChain: ``bind_tools`` with a schema for the answer, and ``with_structured_output``, over each interface.

Run with langchain-openai 1.7.4 and langchain-anthropic 1.7.10.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.clients.case import PARAMETERS, PROMPT, REPORT, TOKENS, TURNS, Case
from tests.clients.trial import Trial

PACKAGES = ("langchain-openai", "langchain-anthropic")

FUNCTION = {"name": "weather", "description": "The weather of a city in the next days.", "parameters": PARAMETERS}


def trials() -> Iterator[Trial]:
    """Each interface, whole and streamed."""
    for kind in ("chat completions", "Responses", "Anthropic"):
        for stream in (False, True):
            form = "`output_config`" if kind == "Anthropic" else "`response_format`"
            name = f"{kind}, `bind_tools` and {form}" + ", streamed" * stream
            yield Trial(name, partial(_run, kind=kind, stream=stream))
    yield Trial("chat completions, `with_structured_output(tools=...)`", _structured, called=False)
    yield Trial('Anthropic, `with_structured_output(method="json_schema")`', _messages, called=False)


def _openai(case: Case, kind: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=case.model,
        base_url=f"{case.url}/v1",
        api_key="none",
        max_retries=0,
        max_tokens=TOKENS,
        use_responses_api=kind == "Responses",
        temperature=0,
    )


def _anthropic(case: Case) -> Any:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(
        model="claude-sonnet-4-5", base_url=case.url, api_key="none", max_retries=0, max_tokens=TOKENS, temperature=0
    )


def _bound(case: Case, kind: str, choice: str) -> Any:
    """The model with the function and the form of the answer; choice: "auto" or "any"."""
    tool: Any = {"type": "function", "function": FUNCTION}
    if kind == "Anthropic":
        form: Any = {"format": {"type": "json_schema", "schema": REPORT}}
        return _anthropic(case).bind_tools([tool], tool_choice=choice, parallel_tool_calls=False, output_config=form)
    form = REPORT | {"title": "report"}
    tool["function"] = FUNCTION | {"strict": True}
    more: Any = {"tool_choice": choice, "parallel_tool_calls": False, "strict": True}
    return _openai(case, kind).bind_tools([tool], response_format=form, **more)


def _run(case: Case, kind: str, stream: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    messages: list[Any] = [HumanMessage(PROMPT)]
    for turn in range(TURNS):
        model = _bound(case, kind, "auto" if turn else "any")
        if stream:
            answer = None
            for chunk in model.stream(messages):
                answer = chunk if answer is None else answer + chunk
            assert answer is not None, "the stream has no chunk"
        else:
            answer = model.invoke(messages)
        messages.append(answer)
        assert not answer.invalid_tool_calls, answer.invalid_tool_calls
        if not answer.tool_calls:
            case.answered(answer.text)
            return
        messages += [ToolMessage(case.weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]


def _structured(case: Case) -> None:
    from tests.clients.forms import Report, Weather

    for seed in range(TURNS):
        settings: Any = {"parallel_tool_calls": False, "seed": seed, "temperature": 1.0}
        model = _openai(case, "chat completions").with_structured_output(
            Report, method="json_schema", tools=[Weather], strict=True, include_raw=True, **settings
        )
        answer = model.invoke(PROMPT)
        if answer["parsing_error"] is not None:
            raise answer["parsing_error"]
        for call in answer["raw"].tool_calls:
            case.weather(**call["args"])
        if answer["parsed"] is not None:
            case.answered(answer["parsed"].model_dump())


def _messages(case: Case) -> None:
    from tests.clients.forms import Place

    # The package leaves out the bounds of texts and numbers, which Anthropic's service does not support.
    place = _anthropic(case).with_structured_output(Place, method="json_schema").invoke(PROMPT)
    case.answers.append(place.model_dump())
