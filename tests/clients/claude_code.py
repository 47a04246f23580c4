"""Claude Code: ``claude -p``, streamed over Anthropic's interface, with its own tools, and with a schema.

The model is offered the tools that read files, in an empty folder.

Run with @anthropic-ai/claude-code 2.1.197.
"""

import json
from collections.abc import Iterator

from tests.clients.case import PROMPT, REPORT, Case, ran
from tests.clients.trial import Trial

NODE_PACKAGES = ("@anthropic-ai/claude-code",)


def trials() -> Iterator[Trial]:
    """One task with and without a schema, and several that go on with one conversation."""
    yield Trial("`claude -p`", lambda case: _run(case, 1, False), brief=True)
    yield Trial("`claude -p --json-schema`", lambda case: _run(case, 1, True), called=False, brief=True)
    yield Trial("a conversation by `claude -p --continue`", lambda case: _run(case, case.turns, False), brief=True)


def _run(case: Case, turns: int, schema: bool) -> None:
    home, folder = case.folder / "home", case.folder / "work"
    home.mkdir()
    folder.mkdir()
    variables = {
        "ANTHROPIC_BASE_URL": case.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": case.model,
        "ANTHROPIC_SMALL_FAST_MODEL": case.model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2000",
        "CLAUDE_CODE_MAX_RETRIES": "0",
        "DISABLE_AUTOUPDATER": "1",
    }
    claude = str(case.node / "node_modules" / ".bin" / "claude")
    words = ["--output-format", "json", "--max-turns", "4", "--tools", "Read,Glob,Grep"]
    if schema:
        words += ["--json-schema", json.dumps(REPORT)]
    for turn in range(turns):
        more = ["--continue"] if turn else []
        prompt = PROMPT if turn == 0 else f"And in {turn} days?"
        text = ran([claude, "-p", prompt, *more, *words], home, folder, **variables)
        result = json.loads(text)
        assert result["subtype"] == "success" and not result["is_error"], result
        if schema:
            case.answered(result["structured_output"])
