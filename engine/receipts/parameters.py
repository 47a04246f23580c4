"""The parameters of an answer as a receipt holds them, and back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.checks import described, token_ids
from engine.errors import UsageError
from engine.grammar.grammar import Grammar
from engine.sampling.params import SamplerParams

PLAIN = tuple(
    field.name
    for field in fields(SamplerParams)
    if field.name not in ("logit_bias", "dry_breakers", "logits_processors")
)
"""The fields of :class:`SamplerParams` that are numbers."""

OTHERS = ("logit_bias", "dry_breakers", "grammar", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "begins_with")
"""What else a receipt holds; :class:`Parameters` describes it."""


@dataclass(frozen=True)
class Parameters:
    """What determines an answer besides the model and its prompt.

    sampler: how tokens are chosen, with the seed in use and every bias, also those that ban tokens which a model never says;
    max_tokens: the most tokens that it could have, in its context; stop, stop_token_ids: texts and tokens that end it besides
    the end-of-generation tokens; ignore_eos: whether these are banned, or, with a grammar, are chosen only if the grammar
    permits nothing else; begins_with: a text that its first token begins with, "" for none.
    """

    sampler: SamplerParams
    max_tokens: int
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    begins_with: str = ""
    grammar: Grammar | None = None

    def written(self) -> dict[str, Any]:
        """As an object for JSON."""
        own, grammar = self.sampler, self.grammar
        found: dict[str, Any] = {name: getattr(own, name) for name in PLAIN}
        bias = sorted(own.logit_bias.items())
        return found | {
            "logit_bias": [[token, value if math.isfinite(value) else None] for token, value in bias],
            "dry_breakers": sorted([*tokens] for tokens in own.dry_breakers),
            "grammar": None if grammar is None else {"kind": grammar.kind, "source": grammar.source},
            "max_tokens": self.max_tokens,
            "stop": [*self.stop],
            "stop_token_ids": sorted(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "begins_with": self.begins_with,
        }


def read(given: Mapping[str, Any]) -> Parameters:
    """The parameters of a receipt, which may come from anywhere.  Raises UsageError if they are none, or if this engine does
    not know one of them."""
    for name in (*PLAIN, *OTHERS):
        if name not in given:
            raise UsageError(f"the receipt lacks the parameter {name}.")
    if extra := sorted(given.keys() - {*PLAIN, *OTHERS}):
        raise UsageError(f"the receipt has a parameter that this engine does not know: {described(extra[0])}.")
    for name, kind in {"max_tokens": int, "ignore_eos": bool, "begins_with": str, "stop": list}.items():
        if type(given[name]) is not kind:
            raise _wrong(name, given[name])
    if not all(isinstance(text, str) for text in given["stop"]):
        raise _wrong("stop", given["stop"])
    bias, grammar = given["logit_bias"], given["grammar"]
    try:
        banned = {token: -math.inf if value is None else value for token, value in bias}
    except (TypeError, ValueError):
        raise _wrong("logit_bias", bias) from None
    if not 0 <= given["seed"] < 2**64 if type(given["seed"]) is int else True:
        raise _wrong("seed", given["seed"])
    numbers = {name: given[name] for name in PLAIN}
    return Parameters(
        SamplerParams(**numbers, logit_bias=banned, dry_breakers=given["dry_breakers"]),
        given["max_tokens"],
        given["stop"],
        token_ids(given["stop_token_ids"]),
        given["ignore_eos"],
        given["begins_with"],
        None if grammar is None else _grammar(grammar),
    )


def _grammar(given: object) -> Grammar:
    if not isinstance(given, Mapping) or given.keys() != {"kind", "source"}:
        raise _wrong("grammar", given)
    return Grammar.restored(given["kind"], given["source"])


def _wrong(name: str, value: object) -> UsageError:
    return UsageError(f"the parameter {name} of the receipt cannot be {described(value)}.")
