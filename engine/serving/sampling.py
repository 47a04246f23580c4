"""The parameters of sampling in a request, as keyword arguments of ``LLM.generate``."""

from collections.abc import Mapping
from typing import Any

from engine.checks import described
from engine.llm import LLM
from engine.sampling.params import SamplerParams
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.text.breakers import MOST_CHARACTERS

SAMPLING = SamplerParams()

DEFAULTS = {name: getattr(SAMPLING, name) for name in ("temperature", "top_p", "top_k", "min_p")}
"""llama.cpp's defaults.  Flags of the server, and what a model's file recommends, replace them."""

PENALTIES = ("typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
"""Further parameters of requests whose defaults are the same in all interfaces."""

REPETITIONS = (
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("xtc_probability", "xtc_threshold"),
)
"""The parameters of DRY and XTC."""

LONGEST_STOP = 1000
"""The most characters of a stop text."""

LONGEST_BIASED = 100
"""The most characters of a text in ``logit_bias``: its tokens are made in the event loop."""


def read_options(fields: Fields, llm: LLM, limits: Limits, defaults: Mapping[str, float] = DEFAULTS) -> dict[str, Any]:
    """The parameters under the names of OpenAI and of vLLM's extensions; defaults: what counts for those of
    :data:`DEFAULTS` that neither the request, nor a flag, nor the file of the model gives."""
    defaults = {**{name: getattr(SAMPLING, name) for name in PENALTIES}, **defaults, **llm.sampling}
    options: dict[str, Any] = {
        "temperature": fields.number("temperature", defaults["temperature"], 0, 2),
        "top_p": fields.number("top_p", defaults["top_p"], 0, 1),
        "top_k": max(0, fields.whole("top_k", int(defaults["top_k"]), -1)),
        "min_p": fields.number("min_p", defaults["min_p"], 0, 1),
        "typical_p": fields.number("typical_p", defaults["typical_p"], 0, 1),
        "presence_penalty": fields.number("presence_penalty", defaults["presence_penalty"], -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", defaults["frequency_penalty"], -2, 2),
        "repeat_penalty": fields.number(
            "repetition_penalty", fields.number("repeat_penalty", defaults["repeat_penalty"], 0.01, 10), 0.01, 10
        ),
        "ignore_eos": fields.flag("ignore_eos", False),
        "seed": fields.whole("seed", -1, -(2**63), 2**64 - 1),
        "logit_bias": read_bias(fields, llm, limits),
        "repeat_last_n": fields.whole("repeat_last_n", None, -1),
        **read_repetitions(fields, llm, limits),
    }
    if options["seed"] < -1:
        options["seed"] += 2**64
    return options


def read_repetitions(fields: Fields, llm: LLM, limits: Limits) -> dict[str, Any]:
    """The parameters of DRY and XTC under llama-server's names."""
    defaults = {**{name: getattr(SAMPLING, name) for name in REPETITIONS}, **llm.sampling}
    options: dict[str, Any] = {
        "dry_multiplier": fields.number("dry_multiplier", defaults["dry_multiplier"], 0, 100),
        "dry_base": fields.number("dry_base", defaults["dry_base"], 1, 100),
        "dry_allowed_length": fields.whole("dry_allowed_length", int(defaults["dry_allowed_length"]), 0, 2**31 - 1),
        "dry_penalty_last_n": fields.whole("dry_penalty_last_n", int(defaults["dry_penalty_last_n"]), -1, 2**31 - 1),
        "xtc_probability": fields.number("xtc_probability", defaults["xtc_probability"], 0, 1),
        "xtc_threshold": fields.number("xtc_threshold", defaults["xtc_threshold"], 0, 1),
    }
    breakers = fields.texts("dry_sequence_breakers", limits.stop, "--stop")
    for text in breakers:
        if not 1 <= len(text) <= MOST_CHARACTERS or any("\ud800" <= character <= "\udfff" for character in text):
            problem = f"must be texts of 1 to {MOST_CHARACTERS} whole characters, not {described(text)}"
            raise fields.refuse("dry_sequence_breakers", problem)
    # An empty list has a meaning: repetitions of any length.
    return options | ({"dry_sequence_breakers": breakers} if "dry_sequence_breakers" in fields else {})


def read_bias(fields: Fields, llm: LLM, limits: Limits) -> dict[int, float]:
    """Token ids and what is added to their logits, -100 and less, or false: never.

    It is an object or a list of pairs.  What is not the number of a token is a text, whose tokens are all meant.
    """
    value = fields.get("logit_bias")
    if isinstance(value, list):
        for i, pair in enumerate(value):
            if not isinstance(pair, list) or len(pair) != 2 or isinstance(pair[0], bool):
                raise fields.refuse(
                    f"logit_bias[{i}]", f"must be a token id or a text, and its bias, not {described(pair)}"
                )
            if not isinstance(pair[0], (int, str)):
                raise fields.refuse(f"logit_bias[{i}][0]", f"must be a token id or a text, not {described(pair[0])}")
        given: Mapping[str, Any] = {str(name): bias for name, bias in value}
    else:
        given = fields.mapping("logit_bias")
    if len(given) > limits.logit_bias:
        problem = f"has {len(given)} entries and this server accepts {limits.logit_bias} (--logit-bias)"
        raise fields.refuse("logit_bias", problem)
    bias: dict[int, float] = {}
    own = Fields(dict(given), fields.name("logit_bias"))
    for name in given:
        value = -100.0 if given[name] is False else own.number(name, 0.0, -100, 100)
        for id in _meant(own, name, llm):
            bias[id] = float("-inf") if value <= -100 else value
    return bias


def _meant(fields: Fields, name: str, llm: LLM) -> list[int]:
    """The tokens that a name in ``logit_bias`` means."""
    number = name.removeprefix("-")
    if number.isascii() and number.isdigit():
        if number == name and len(name) < 20 and int(name) < llm.config.n_vocab:
            return [int(name)]
    elif name and len(name) <= LONGEST_BIASED and not any("\ud800" <= character <= "\udfff" for character in name):
        return llm.tokenizer.encode(name, add_special=False, parse_special=False)
    problem = f"is no token id of this model, which are 0 to {llm.config.n_vocab - 1}, and no text of at most"
    raise fields.refuse(name[:40], f"{problem} {LONGEST_BIASED} characters")


def read_stop(fields: Fields, limits: Limits, name: str = "stop") -> list[str]:
    """The stop texts."""
    texts = fields.texts(name, limits.stop, "--stop")
    for text in texts:
        # Each token is compared with every beginning of a stop text.
        if len(text) > LONGEST_STOP:
            raise fields.refuse(
                name, f"has a text of {len(text)} characters, and a stop text has at most {LONGEST_STOP}"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise fields.refuse(name, "holds half a character, which no text contains: give whole characters")
    return [text for text in texts if text]


def read_logprobs(fields: Fields, limits: Limits) -> int | None:
    """How many of the most probable tokens to report per token; None: no log-probabilities at all."""
    logprobs = fields.flag("logprobs", False)
    top = fields.whole("top_logprobs", 0, 0, limits.top_logprobs, "--top-logprobs")
    if top and not logprobs:
        raise fields.refuse("top_logprobs", "needs logprobs: true")
    return top if logprobs else None


def read_most(fields: Fields, *names: str, default: int | None = None) -> int | None:
    """The most tokens of an answer: the first of these fields that is given; None or -1: no limit."""
    given = [fields.whole(name, None, -1) for name in names]
    most = next((value for value in given if value is not None), default)
    return None if most == -1 else most


def clamped(most: int | None, llm: LLM, n_prompt: int) -> int:
    """``max_tokens`` of an answer: no more than the context has room for; None: as many.  Raises ContextError if the prompt
    alone does not fit."""
    llm.check_length(n_prompt)
    room = max(0, llm.n_ctx - n_prompt)
    return room if most is None else min(most, room)
