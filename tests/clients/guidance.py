"""guidance: ``json`` and ``gen(tools=...)`` with a model behind OpenAI's interface.

Run with guidance 0.3.1 and openai 3.57.0.
"""

from collections.abc import Iterator
from typing import Any

from tests.clients.case import PROMPT, REPORT, Case
from tests.clients.trial import Trial

PACKAGES = ("guidance", "openai")


def trials() -> Iterator[Trial]:
    """A schema, functions, and one after the other: the package does not send both in one request."""
    yield Trial("`json(schema=...)`", _json, called=False)
    yield Trial("`gen(tools=...)`, then `json(schema=...)`", _both)


def _model(case: Case) -> Any:
    from guidance.models import OpenAI

    return OpenAI(case.model, echo=False, api_key="none", base_url=f"{case.url}/v1", max_retries=0)


def _json(case: Case) -> None:
    from guidance import assistant, json, user

    model = _model(case)
    with user():
        model += PROMPT
    with assistant():
        model += json(name="report", schema=REPORT)
    case.answered(model["report"])


def _both(case: Case) -> None:
    from guidance import assistant, gen, json, user

    from tests.clients.forms import City, Days

    def weather(city: City, days: Days) -> str:
        """The weather of a city in the next days."""
        return case.weather(city=city, days=days)

    model = _model(case)
    with user():
        model += PROMPT
    with assistant():
        model += gen(tools=[weather], tool_choice="required")
    with user():
        model += "Report that."
    with assistant():
        model += json(name="report", schema=REPORT)
    case.answered(model["report"])
