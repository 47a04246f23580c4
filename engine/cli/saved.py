"""Conversations in JSON files: written without overwriting anything else, and checked when they are read."""

import json
import os
from pathlib import Path
from typing import Any

from engine.cli.conversation import Message
from engine.cli.texts import valid
from engine.errors import UsageError

MOST_BYTES = 64 << 20
"""The largest file that is read; no conversation is nearly as long."""


def path_of(name: str) -> Path:
    """The path that a user means; raises UsageError."""
    try:
        return Path(name).expanduser().absolute()
    except (OSError, RuntimeError) as error:  # ~nobody
        raise UsageError(f"{name} is not the name of a file: {error}") from error


def write(path: Path, messages: list[Message], settings: dict[str, Any], *, replace: bool) -> None:
    """Writes messages and settings. Raises UsageError if the file exists, unless ``replace`` is set; then it is replaced at
    once, or stays as it was."""
    text = json.dumps({"messages": messages, "settings": settings}, ensure_ascii=False, indent=2) + "\n"
    new = path.with_name(f".{path.name}.{os.getpid()}") if replace and path.exists() else path
    created = False
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            created = True
            file.write(text)
        if new != path:
            os.replace(new, path)
    except FileExistsError as error:
        raise UsageError(f"{path} exists: give /save another name") from error
    except (OSError, ValueError) as error:
        if created:
            new.unlink(missing_ok=True)
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"the conversation cannot be saved to {path}: {why}") from error


def read(path: Path) -> tuple[str | None, list[Message], Any]:
    """The system prompt (None without one), the messages after it, and the settings ({} if there are none) of a file.

    A file may also hold the list of messages alone. Raises UsageError, one sentence, for anything else.
    """
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path} is not a file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} cannot be read: {why}") from error
    if len(data) > MOST_BYTES:
        raise UsageError(f"{path} is too large to be a conversation: the limit is {MOST_BYTES >> 20} MiB")
    try:
        value: Any = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a conversation: it is not JSON ({error})") from error
    settings = {}
    if isinstance(value, dict):
        value, settings = value.get("messages"), value.get("settings", {})
    try:
        system, turns = _checked(value)
    except UsageError as error:
        raise UsageError(f"{path} is not a conversation: {error}") from error
    return system, turns, settings


def _checked(messages: Any) -> tuple[str | None, list[Message]]:
    if not isinstance(messages, list):
        raise UsageError("it contains no list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UsageError(f"message {i + 1} must have a role and a content that are strings")
    read = [{"role": message["role"], "content": valid(message["content"])} for message in messages]
    system = read.pop(0)["content"] if read and read[0]["role"] == "system" else None
    if any(message["role"] != ("user", "assistant")[i % 2] for i, message in enumerate(read)):
        raise UsageError("after a system prompt, if any, messages of user and assistant must alternate")
    if len(read) % 2:
        raise UsageError("its last message has no answer")
    return system, read
