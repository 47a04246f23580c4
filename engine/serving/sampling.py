"""The parameters of sampling in a request, as keyword arguments of ``LLM.generate``."""

from collections.abc import Mapping
from typing import Any

from engine.decode.params import SamplingParams
from engine.llm import LLM
from engine.serving.fields import Fields
from engine.serving.limits import Limits

SAMPLING = SamplingParams()

DEFAULTS = {name: getattr(SAMPLING, name) for name in ("temperature", "top_p", "top_k", "min_p")}
"""llama.cpp's defaults.  Flags of the server, and what a model's file recommends, replace them."""

PENALTIES = ("typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
"""Further parameters of requests whose defaults are the same in all interfaces."""

LONGEST_STOP = 1000
"""The most characters of a stop text."""


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
    }
    if options["seed"] < -1:
        options["seed"] += 2**64
    return options


def read_bias(fields: Fields, llm: LLM, limits: Limits) -> dict[int, float]:
    """Token ids and what is added to their logits, -100 and less: never."""
    given = fields.mapping("logit_bias")
    if len(given) > limits.logit_bias:
        problem = f"has {len(given)} entries and this server accepts {limits.logit_bias} (--logit-bias)"
        raise fields.refuse("logit_bias", problem)
    bias: dict[int, float] = {}
    own = Fields(dict(given), fields.name("logit_bias"))
    for name in given:
        written = name.isascii() and name.isdigit() and len(name) < 20
        if not written or not int(name) < llm.config.n_vocab:
            raise own.refuse(name[:40], f"is no token id of this model: ids are 0 to {llm.config.n_vocab - 1}")
        value = own.number(name, 0.0, -100, 100)
        bias[int(name)] = float("-inf") if value <= -100 else value
    return bias


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


def clamped(most: int | None, llm: LLM, n_prompt: int) -> int:
    """``max_tokens`` of an answer: no more than the context has room for; None: as many.  Raises ContextError if the prompt
    alone does not fit."""
    llm.check_length(n_prompt)
    room = max(0, llm.n_ctx - n_prompt)
    return room if most is None else min(most, room)
