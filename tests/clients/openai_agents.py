"""openai-agents: function tools and an output type, over Responses and over chat completions, whole and streamed.

Run with openai-agents 0.24.0 and openai 3.3.0.
"""

import asyncio
from collections.abc import Iterator
from functools import partial

from tests.clients.case import PROMPT, TOKENS, TURNS, Case
from tests.clients.trial import Trial

PACKAGES = ("openai-agents", "openai")


def trials() -> Iterator[Trial]:
    """Each model class of the package, whole and streamed."""
    for kind in ("Responses", "chat completions"):
        for stream in (False, True):
            name = f"{kind}, `function_tool` and `output_type`" + ", streamed" * stream
            yield Trial(name, partial(_run, kind=kind, stream=stream))


def _run(case: Case, kind: str, stream: bool) -> None:
    asyncio.run(_agent(case, kind, stream))


async def _agent(case: Case, kind: str, stream: bool) -> None:
    import agents
    from openai import AsyncOpenAI

    from tests.clients.forms import City, Days, Report

    def weather(city: City, days: Days) -> str:
        """The weather of a city in the next days."""
        return case.weather(city=city, days=days)

    agents.set_tracing_disabled(True)
    make = agents.OpenAIResponsesModel if kind == "Responses" else agents.OpenAIChatCompletionsModel
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=TOKENS)
    async with AsyncOpenAI(base_url=f"{case.url}/v1", api_key="none", max_retries=0) as client:
        agent = agents.Agent(
            name="weather",
            instructions="You answer questions about the weather.",
            model=make(model=case.model, openai_client=client),
            tools=[agents.function_tool(weather, failure_error_function=None)],
            output_type=Report,
            model_settings=settings,
        )
        if stream:
            result = agents.Runner.run_streamed(agent, PROMPT, max_turns=TURNS)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent, PROMPT, max_turns=TURNS)
    case.answered(result.final_output.model_dump())
