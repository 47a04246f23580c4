"""The settings of a conversation: the options of its answers that can be changed while it lasts."""

import argparse
import difflib
import json
import shlex
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from engine.checks import require, whole
from engine.cli.flags import parser
from engine.cli.texts import unescape, valid
from engine.errors import UsageError
from engine.sampling.params import SamplerParams
from engine.text.breakers import BREAKERS

FLAGS = {"max_tokens": "--predict", "dry_sequence_breakers": "--dry-sequence-breaker"}
"""The flags of settings that have another name."""

PARAMS = tuple(field.name for field in fields(SamplerParams) if field.name not in ("dry_breakers", "logits_processors"))
"""The parameters of sampling that can be written as text."""

TEXTS = ("dry_sequence_breakers", "stop")
"""The settings that are lists of texts."""

NAMES = ("max_tokens", *PARAMS, *TEXTS, "ignore_eos")

WORDS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


@cache
def actions() -> dict[str, argparse.Action]:
    """The flag of each setting: its help, and the type that checks its value."""
    flags = parser()._option_string_actions
    named = {name: FLAGS.get(name, f"--{name.replace('_', '-')}") for name in NAMES}
    return {name: flags[flag] for name, flag in named.items() if flag in flags}


def meaning(name: str) -> str:
    """What a setting does."""
    return " ".join((actions()[name].help or "").split())


def find(name: str) -> str:
    """The setting that a user names, by its own name or as its flag is named; raises UsageError."""
    plain = name.lower().replace("-", "_")
    if plain in actions():
        return plain
    names = {
        option.lstrip("-").replace("-", "_"): name for name, flag in actions().items() for option in flag.option_strings
    }
    if len(plain) > 1 and plain in names:
        return names[plain]
    near = [each for each in actions() if each.startswith(plain)] or difflib.get_close_matches(plain, actions(), n=1)
    hint = f"did you mean {' or '.join(near)}?" if near else "/set lists them"
    raise UsageError(f"there is no setting {name}: {hint}")


class Settings:
    """The keyword arguments of ``LLM.generate`` for the next answers; it never changes."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = {"dry_sequence_breakers": list(BREAKERS)} | dict(options)

    def __getitem__(self, name: str) -> Any:
        return self.options[name]

    def changed(self, values: Mapping[str, Any]) -> "Settings":
        """Settings with other values; raises UsageError for one that is out of range."""
        options = self.options | dict(values)
        params = SamplerParams(**{name: options[name] for name in PARAMS})
        options |= {name: getattr(params, name) for name in PARAMS}
        most = whole("max_tokens", options["max_tokens"])
        require(most >= -1, "max_tokens", "-1 (no limit) or a whole number of at least 0", most)
        for name in TEXTS:
            options[name] = [valid(text) for text in _strings(name, options[name]) if text]
        require(isinstance(options["ignore_eos"], bool), "ignore_eos", "on or off", options["ignore_eos"])
        return Settings(options)

    def parsed(self, name: str, text: str) -> "Settings":
        """Settings with one changed, as a user writes it; raises UsageError. ``-`` empties a list."""
        action = actions()[name]
        try:
            if isinstance(action, argparse._AppendAction):
                value: Any = self._list(action, [] if text in ("-", "none") else _words(text))
            elif action.nargs == 0:
                value = WORDS[text.lower()]
            else:
                value = _value(action, text)
        except KeyError:
            raise UsageError(f"{name} must be on or off, not {text!r:.40}") from None
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise UsageError(f"{name} {error}") from error
        return self.changed({name: value})

    def shown(self, name: str) -> str:
        """The value as a user would write it."""
        value = self.options[name]
        if isinstance(value, Mapping):
            return " ".join(_pairs(value)) or "none"
        if isinstance(value, (list, tuple)):
            return " ".join(json.dumps(text, ensure_ascii=False) for text in value) or "none"
        return ("off", "on")[value] if isinstance(value, bool) else str(value)

    def as_json(self) -> dict[str, Any]:
        """The values as JSON can hold them: biases as their flag writes them."""
        values = {name: self.options[name] for name in actions()}
        return {name: _pairs(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    def from_json(self, values: Any) -> "Settings":
        """Settings with the values that ``as_json`` gave; raises UsageError for anything else."""
        if not isinstance(values, dict):
            raise UsageError("the settings must be an object of names and values")
        read = {}
        for name, value in values.items():
            if name not in actions():
                raise UsageError(f"there is no setting {name!r:.40}")
            read[name] = value
            if isinstance(self.options[name], Mapping):
                try:
                    read[name] = self._list(actions()[name], _strings(name, value))
                except argparse.ArgumentTypeError as error:
                    raise UsageError(f"{name} {error}") from error
        return self.changed(read)

    def _list(self, action: argparse.Action, words: list[str]) -> Any:
        if action.type is None:
            return [unescape(word) for word in words]
        return dict(_value(action, word) for word in words)


def _value(action: argparse.Action, text: str) -> Any:
    return action.type(text) if callable(action.type) else text


def _strings(name: str, value: Any) -> list[str]:
    """A list of strings as it is; raises UsageError for anything else."""
    require(isinstance(value, list) and all(isinstance(text, str) for text in value), name, "a list of strings", value)
    return list(value)


def _words(text: str) -> list[str]:
    """Words separated by spaces; a word that contains spaces is in double quotes, as on the command line."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split = True
    words.escape = words.commenters = ""
    words.quotes = '"'
    try:
        return list(words)
    except ValueError:
        raise UsageError(f"a closing double quote is missing in {text}") from None


def _pairs(bias: Mapping[int, float]) -> list[str]:
    return [f"{token}{value:+}" for token, value in bias.items()]
