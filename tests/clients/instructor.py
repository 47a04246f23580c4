"""instructor: a response model as a call and as a schema, whole and in parts.

Run with instructor 1.17.0 and openai 3.3.0.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.clients.case import PROMPT, TOKENS, Case
from tests.clients.trial import Trial

PACKAGES = ("instructor", "openai")

MODES = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS")


def trials() -> Iterator[Trial]:
    """Each mode that a server of its own can use.  The call is the answer: the client runs no function."""
    for mode in MODES:
        yield Trial(f"`Mode.{mode}`", partial(_create, mode=mode), called=False)
    for mode in MODES[:-1]:
        yield Trial(f"`Mode.{mode}`, `create_partial`", partial(_partial, mode=mode), called=False)


def _client(case: Case, mode: str) -> Any:
    import instructor
    from openai import OpenAI

    client = OpenAI(base_url=f"{case.url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=getattr(instructor.Mode, mode))


def _create(case: Case, mode: str) -> None:
    from tests.clients.forms import Report

    most = {"max_output_tokens": TOKENS} if mode.startswith("RESPONSES") else {"max_tokens": TOKENS}
    messages = [{"role": "user", "content": PROMPT}]
    report = _client(case, mode).create(
        model=case.model, messages=messages, response_model=Report, max_retries=0, **most
    )
    case.answered(report.model_dump())


def _partial(case: Case, mode: str) -> None:
    from tests.clients.forms import Report

    messages = [{"role": "user", "content": PROMPT}]
    *_, report = _client(case, mode).create_partial(
        model=case.model, messages=messages, response_model=Report, max_retries=0, max_tokens=TOKENS
    )
    case.answered(report.model_dump())
