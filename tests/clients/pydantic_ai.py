"""pydantic-ai: tools with a native output and with an output that is a call, over each interface of its models.

Run with pydantic-ai-slim 2.68.0, openai 3.57.0 and anthropic 2.14.0.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.clients.case import PROMPT, TOKENS, TURNS, Case
from tests.clients.trial import Trial

PACKAGES = ("pydantic-ai-slim", "openai", "anthropic")


def trials() -> Iterator[Trial]:
    """Each model class with each kind of output."""
    for kind in ("chat completions", "Responses", "Anthropic"):
        for output in ("NativeOutput", "ToolOutput"):
            # A call of the output ends the conversation, so that no other call is certain.
            yield Trial(
                f"{kind}, a tool and `{output}`",
                partial(_run, kind=kind, output=output, stream=False),
                called=output == "NativeOutput",
            )
        yield Trial(
            f"{kind}, a tool and `NativeOutput`, streamed", partial(_run, kind=kind, output="NativeOutput", stream=True)
        )


def _run(case: Case, kind: str, output: str, stream: bool) -> None:
    asyncio.run(_agent(case, kind, output, stream))


def _model(case: Case, kind: str) -> Any:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if kind == "Anthropic":
        # Which model it is decides what the package sends.
        return AnthropicModel(
            "claude-sonnet-4-5",
            provider=AnthropicProvider(base_url=case.url, api_key="none"),
        )
    make = OpenAIResponsesModel if kind == "Responses" else OpenAIChatModel
    return make(case.model, provider=OpenAIProvider(base_url=f"{case.url}/v1", api_key="none"))


async def _agent(case: Case, kind: str, output: str, stream: bool) -> None:
    import pydantic_ai

    from tests.clients.forms import City, Days, Report

    def weather(city: City, days: Days) -> str:
        """The weather of a city in the next days."""
        return case.weather(city=city, days=days)

    form = getattr(pydantic_ai, output)(Report)
    agent = pydantic_ai.Agent(_model(case, kind), tools=[weather], output_type=form, retries=0)
    settings: Any = {"max_tokens": TOKENS, "parallel_tool_calls": False, "temperature": 0.0}
    limits = pydantic_ai.UsageLimits(request_limit=TURNS)
    if stream:
        async with agent.run_stream(PROMPT, model_settings=settings, usage_limits=limits) as result:
            report = await result.get_output()
    else:
        report = (await agent.run(PROMPT, model_settings=settings, usage_limits=limits)).output
    case.answered(report.model_dump())
