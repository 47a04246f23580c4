"""``options`` and what else a request says about how tokens are chosen."""

import logging

from engine.grammar.grammar import Grammar
from engine.llm import LLM
from engine.serving.accepted import OPTIONS, check
from engine.serving.answer import Ask
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.permitted import read_permitted
from engine.serving.sampling import clamped, read_logprobs, read_options, read_stop
from engine.serving.structured import grammar_of
from engine.tools.prompt import Prompt

log = logging.getLogger("bitmirror.serving")

DEFAULTS = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0}
"""Ollama's defaults.  Flags of the server, and what a model's file recommends, replace them."""

MOST_CONTEXT = 2**31 - 1
"""The greatest ``num_ctx``, of Ollama's too.  What exceeds the context of the server asks for nothing but that."""

REPEAT_LAST_N = 64
"""Tokens that the three penalties consider, unless the request or the file gives another number."""


def read_ask(fields: Fields, llm: LLM, limits: Limits, prompt: Prompt, grammar: Grammar | None) -> Ask:
    """What a request asks for, once its prompt is known."""
    given = fields.object("options") or Fields({}, "options")
    check(given, OPTIONS)
    if (n_ctx := given.whole("num_ctx", 0, 0, MOST_CONTEXT)) > llm.n_ctx:
        log.info("options.num_ctx is %d, and the context of this server has %d tokens (-c)", n_ctx, llm.n_ctx)
    most = given.whole("num_predict", -1, -2)
    options = read_options(given, llm, limits, DEFAULTS) | {
        "repeat_last_n": given.whole("repeat_last_n", llm.sampling.get("repeat_last_n", REPEAT_LAST_N), -1),
        "max_tokens": clamped(None if most < 0 else most, llm, len(prompt.ids)),
        "grammar": grammar,
    }
    stop = read_stop(given, limits)
    top, permitted = read_logprobs(fields, limits), read_permitted(given, llm)
    return Ask(prompt.ids, prompt.parser, options, logprobs=top, stop=stop, permitted=permitted)


async def read_format(fields: Fields, llm: LLM, limits: Limits) -> Grammar | None:
    """The grammar of ``format``: "json" is any object, an object is a JSON schema; None if any text is an answer."""
    value = fields.get("format")
    if value is None or value == "":
        return None
    if value == "json":
        value = {"type": "object"}
    if not isinstance(value, dict):
        raise fields.refuse("format", 'must be "json" or a JSON schema, which is an object')
    return await grammar_of(fields, "format", Grammar.json_schema, value, llm, limits)
