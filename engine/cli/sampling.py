"""Where the sampling parameters of an answer come from: a flag, the file of the model, or the default."""

import argparse
from collections.abc import Collection, Mapping
from typing import Any

FIELDS = {"temp": "temperature", "typical": "typical_p"}
"""The parameters whose flags have another name."""

NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "xtc_probability", "xtc_threshold"),
)
"""The parameters whose origin is reported."""


class Given(argparse.Action):
    """Stores the value of a flag, and in ``given`` of the namespace that there was one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = given(namespace) | {FIELDS.get(self.dest, self.dest)}


def given(args: argparse.Namespace) -> frozenset[str]:
    """The parameters that flags set."""
    return getattr(args, "given", frozenset())


def flagged(args: argparse.Namespace) -> dict[str, float]:
    """The parameters that flags set, with their values."""
    flags = {field: flag for flag, field in FIELDS.items()}
    return {name: getattr(args, flags.get(name, name)) for name in NUMBERS if name in given(args)}


def with_file(options: Mapping[str, Any], flags: Collection[str], file: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``LLM.generate`` in which the parameters of the file replace those that no flag sets."""
    return {**options, **{name: value for name, value in file.items() if name not in flags}}


def origins(flags: Collection[str], file: Mapping[str, Any]) -> dict[str, str]:
    """Where each parameter comes from: flag, file or default."""
    return {name: "flag" if name in flags else "file" if name in file else "default" for name in NUMBERS}
