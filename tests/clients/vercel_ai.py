"""Vercel's AI SDK: tools with ``Output.object``, and ``generateObject``, with each of its providers for a server.

Run with ai 6.0.326, @ai-sdk/openai-compatible 2.0.92 and @ai-sdk/openai 3.0.141.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.clients.case import PARAMETERS, PROMPT, REPORT, TOKENS, TURNS, Case, ran
from tests.clients.trial import Trial

NODE_PACKAGES = ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai")

KINDS = {
    "openai-compatible": "`@ai-sdk/openai-compatible`",
    "openai-chat": "`@ai-sdk/openai`, chat completions",
    "openai": "`@ai-sdk/openai`, Responses",
}


def trials() -> Iterator[Trial]:
    """Each provider with each function."""
    for provider, described in KINDS.items():
        for name in ("generateText", "streamText"):
            run = partial(_run, provider=provider, name=name)
            yield Trial(f"{described}: `{name}`, `tools` and `Output.object`", run)
        for name in ("generateObject", "streamObject"):
            yield Trial(f"{described}: `{name}`", partial(_run, provider=provider, name=name), called=False)


def _run(case: Case, provider: str, name: str) -> None:
    asked: dict[str, Any] = {"url": case.url, "model": case.model, "provider": provider, "name": name, "prompt": PROMPT}
    asked |= {"tokens": TOKENS, "turns": TURNS, "parameters": PARAMETERS, "report": REPORT}
    script = Path(__file__).with_suffix(".mjs")
    found = json.loads(ran(["node", str(script), json.dumps(asked)], case.folder, case.node))
    for call in found["calls"]:
        case.weather(**call)
    for answer in found["answers"]:
        case.answered(answer)
