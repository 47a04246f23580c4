"""Codex: ``codex exec --output-schema`` with a provider of its own, over Responses.

The model is offered Codex's own functions, in a sandbox without rights to write.

Run with @openai/codex 0.171.0.
"""

import json
from collections.abc import Iterator

from tests.clients.case import PROMPT, REPORT, Case, ran
from tests.clients.trial import Trial

NODE_PACKAGES = ("@openai/codex",)


def trials() -> Iterator[Trial]:
    """One task, and several that go on with one conversation."""
    yield Trial("`codex exec --output-schema`", lambda case: _run(case, 1), called=False, brief=True)
    yield Trial(
        "a conversation by `codex exec resume --last`", lambda case: _run(case, case.turns), called=False, brief=True
    )


def _run(case: Case, turns: int) -> None:
    home, folder = case.folder / "home", case.folder / "work"
    home.mkdir()
    folder.mkdir()
    (folder / "schema.json").write_text(json.dumps(REPORT), encoding="utf-8")
    provider = f'{{name="local", base_url="{case.url}/v1", wire_api="responses", request_max_retries=0'
    settings = ('model_provider="local"', f"model_providers.local={provider}, stream_max_retries=0}}")
    words = ["--json", "--skip-git-repo-check", "--output-schema", "schema.json", "-o", "last.txt", "-m", case.model]
    if turns > 1:
        # A goal that the model has set goes on by itself, and then the program refuses the schema of the next task.
        words += ["--disable", "goals"]
    words += [word for setting in settings for word in ("-c", setting)]
    codex = str(case.node / "node_modules" / ".bin" / "codex")
    for turn in range(turns):
        begin = (
            [codex, "exec", "-s", "read-only", "-C", str(folder)] if turn == 0 else [codex, "exec", "resume", "--last"]
        )
        text = ran([*begin, *words, PROMPT if turn == 0 else f"And in {turn} days?"], home, folder)
        events = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        failed = [event for event in events if event["type"] in ("error", "turn.failed")]
        assert not failed, failed
        case.answered((folder / "last.txt").read_text(encoding="utf-8"))
