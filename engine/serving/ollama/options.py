"""``options`` and what else a request says about how tokens are chosen."""

from engine.grammar.grammar import Grammar
from engine.llm import LLM
from engine.serving.answer import Ask
from engine.serving.conversation import Prompt
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.sampling import clamped, read_logprobs, read_options, read_stop
from engine.serving.structured import grammar_of

DEFAULTS = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.0}
"""Ollama's defaults.  Flags of the server, and what a model's file recommends, replace them."""

REPEAT_LAST_N = 64
"""Tokens that the three penalties consider, unless the request or the file gives another number."""

MEANINGLESS = (
    *("numa", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "f16_kv", "use_mmap", "use_mlock"),
    *("vocab_only", "logits_all", "embedding_only", "num_keep", "draft_num_predict"),
)
"""Options that say how a model is opened or computed: they change no answer here."""

UNANSWERABLE = ("mirostat", "tfs_z")
"""Options whose silent loss would change an answer, unless they are 0 or 1, which switches them off."""


def read_ask(fields: Fields, llm: LLM, limits: Limits, prompt: Prompt, grammar: Grammar | None) -> Ask:
    """What a request asks for, once its prompt is known."""
    given = fields.object("options") or Fields({}, "options")
    for name in UNANSWERABLE:
        if given.number(name, 0) not in (0, 1):
            raise given.refuse(name, "is not supported by this server: leave it out")
    if given.whole("num_ctx", 0) > llm.n_ctx:
        problem = f"exceeds the context of this server, {llm.n_ctx} tokens: leave it out, or start the server with -c"
        raise given.refuse("num_ctx", problem)
    most = given.whole("num_predict", -1, -2)
    options = read_options(given, llm, limits, DEFAULTS) | {
        "repeat_last_n": given.whole("repeat_last_n", llm.sampling.get("repeat_last_n", REPEAT_LAST_N), -1),
        "max_tokens": clamped(None if most < 0 else most, llm, len(prompt.ids)),
        "grammar": grammar,
    }
    given.ignore(*MEANINGLESS)
    stop = read_stop(given, limits)
    return Ask(prompt.ids, prompt.parser, options, logprobs=read_logprobs(fields, limits), stop=stop)


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
