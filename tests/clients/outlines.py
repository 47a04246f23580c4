"""outlines: types as ``response_format`` and in vLLM's words.  It sends no functions, so one trial adds them.

Run with outlines 1.3.3 and openai 3.57.0.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from tests.clients.case import PARAMETERS, PROMPT, TOKENS, Case
from tests.clients.trial import Trial

PACKAGES = ("outlines", "openai")


def trials() -> Iterator[Trial]:
    """Each model class for a server, with each kind of type that it takes."""
    for kind in ("from_openai", "from_vllm"):
        for stream in (False, True):
            name = f"`{kind}`, a pydantic model" + ", streamed" * stream
            yield Trial(name, partial(_report, kind=kind, stream=stream), called=False)
    yield Trial("`from_vllm`, `Literal`, `Regex` and `CFG`", _others, called=False)
    yield Trial("`from_vllm`, a pydantic model, and `tools`", _tools, called=False)


def _model(case: Case, kind: str) -> Any:
    import outlines
    from openai import OpenAI

    client = OpenAI(base_url=f"{case.url}/v1", api_key="none", max_retries=0)
    return getattr(outlines, kind)(client, case.model)


def _report(case: Case, kind: str, stream: bool) -> None:
    from tests.clients.forms import Report

    model = _model(case, kind)
    if stream:
        case.answered("".join(model.stream(PROMPT, Report, max_tokens=TOKENS)))
    else:
        case.answered(model(PROMPT, Report, max_tokens=TOKENS))


def _others(case: Case) -> None:
    from outlines.types import CFG, Regex

    model = _model(case, "from_vllm")
    assert model(PROMPT, Literal["warm", "cold"], max_tokens=TOKENS) in ("warm", "cold")
    assert model(PROMPT, Regex("[0-9]{1,2} degrees"), max_tokens=TOKENS).endswith(" degrees")
    answer = model(PROMPT, CFG('start: "warm" | "(" start ")"'), max_tokens=TOKENS)
    assert answer.strip("()") == "warm", answer


def _tools(case: Case) -> None:
    from tests.clients.forms import Report

    tool = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
    # Without a call, the answer is the form: outlines reads the text alone.
    case.answered(_model(case, "from_vllm")(PROMPT, Report, max_tokens=TOKENS, tools=[tool], tool_choice="none"))
