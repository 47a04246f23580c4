"""What each client is asked to do: call a function, then answer in the form of a schema."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

PROMPT = "How warm is it in Oslo? Look it up, then answer."

TURNS = 4
"""The most requests to a model in one trial.  A small model may call functions again and again."""

TOKENS = 200
"""The most tokens of one answer."""

SECONDS = 300
"""The most time that a program may take."""

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Lima", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""The parameters of the function ``weather``."""

REPORT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Lima", "Oslo"]},
        "degrees": {"type": "integer", "minimum": -60, "maximum": 60},
        "advice": {"type": "string", "maxLength": 40},
    },
    "required": ["city", "degrees", "advice"],
    "additionalProperties": False,
}
"""The form of the answer."""


@dataclass
class Case:
    """One trial.

    url: the address of the server, without ``/v1``; model: a name of its model; node: a folder with ``node_modules``; folder:
    an empty one for files; end: the token that ends an answer; turns: of a conversation with a program; calls: the arguments
    with which the client has run the function; answers: the answers that it has handed out.
    """

    url: str
    model: str
    node: Path
    folder: Path
    end: int
    turns: int
    calls: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)

    def weather(self, **arguments: Any) -> str:
        """The function that the model may call.  Raises ``jsonschema.ValidationError`` if its arguments are invalid."""
        self.calls.append(arguments)
        jsonschema.validate(arguments, PARAMETERS)
        return "21 degrees, sunny"

    def answered(self, answer: Any) -> None:
        """Check an answer: a JSON text, or its value.  Raises ``jsonschema.ValidationError`` if it is invalid."""
        value = json.loads(answer) if isinstance(answer, str) else answer
        jsonschema.validate(value, REPORT)
        self.answers.append(value)


def ran(words: Sequence[str], home: Path, folder: Path, **variables: str) -> str:
    """What a program prints that runs in ``folder``, with its settings in ``home`` and without the variables of this process,
    which may hold keys.  Raises RuntimeError, with the end of what it says, if it fails."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **variables}
    given: Any = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL, "timeout": SECONDS}
    done = subprocess.run(words, capture_output=True, text=True, **given)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout
