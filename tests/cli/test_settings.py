"""The settings of a chat: every sampling parameter is one, and values are checked as on the command line."""

from dataclasses import fields
from typing import Any

import pytest

from engine.cli.flags import generation_options, parser
from engine.cli.settings import Settings, actions, find
from engine.errors import UsageError
from engine.sampling.sampler import SamplerParams

DEFAULTS = Settings(generation_options(parser().parse_args(["-s", "7"])))


def test_every_sampling_parameter_is_a_setting() -> None:
    missing = {field.name for field in fields(SamplerParams)} - actions().keys()
    # Breakers are texts here, and a function cannot be typed.
    assert missing == {"dry_breakers", "logits_processors"}
    assert "dry_sequence_breakers" in actions()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.5", 0.5),
        ("top_k", "0", 0),
        ("repeat_last_n", "-1", -1),
        ("seed", "18446744073709551615", 2**64 - 1),
        ("max_tokens", "-1", -1),
        ("stop", "-", []),
        ("stop", '"a b" \\n "c\\td" don\'t', ["a b", "\n", "c\td", "don't"]),
        ("logit_bias", "5+1 6-inf 7-2.5e-3", {5: 1.0, 6: -float("inf"), 7: -0.0025}),
        ("logit_bias", "-", {}),
        ("dry_multiplier", "0.8", 0.8),
        ("dry_sequence_breakers", '"\\n" "a b"', ["\n", "a b"]),
        ("dry_sequence_breakers", "-", []),
        ("ignore_eos", "on", True),
        ("ignore_eos", "FALSE", False),
    ],
)
def test_values(name: str, text: str, value: Any) -> None:
    changed = DEFAULTS.parsed(name, text)
    assert changed[name] == value
    assert type(changed[name]) is type(value)
    assert {key: changed[key] for key in changed.options if key != name} == {
        key: DEFAULTS[key] for key in DEFAULTS.options if key != name
    }
    again = DEFAULTS.from_json(changed.as_json())
    assert again.options == changed.options


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "hot"), ("temperature", "nan"), ("temperature", "1e60"), ("top_k", "1.5"), ("top_p", "-1"),
        ("repeat_penalty", "0"), ("seed", "-2"), ("max_tokens", "-2"), ("stop", '"open'), ("stop", "\\xff"),
        ("logit_bias", "5"), ("ignore_eos", "maybe"), ("repeat_last_n", "-2"),
    ],
)  # fmt: skip
def test_values_out_of_range(name: str, text: str) -> None:
    with pytest.raises(UsageError):
        DEFAULTS.parsed(name, text)


def test_names() -> None:
    assert find("temp") == find("Temperature") == "temperature"
    assert find("n-predict") == "max_tokens"
    assert find("typical") == "typical_p"
    for name, hint in (
        ("tmperature", "did you mean temperature?"),
        ("top", "top_k or top_p"),
        ("zzz", "/set lists them"),
    ):
        with pytest.raises(UsageError, match=hint.replace("?", r"\?")):
            find(name)
