"""The grammar of the calls of a request, in the format that a model writes."""

from collections.abc import Callable, Collection, Mapping, Sequence

from engine.tools.calls.apertus import ApertusCalls
from engine.tools.calls.deepseek3 import DeepSeek3Calls
from engine.tools.calls.deepseek4 import DeepSeek4Calls
from engine.tools.calls.function import Function, Unenforceable
from engine.tools.calls.gemma4 import Gemma4Calls
from engine.tools.calls.generic import GenericCalls
from engine.tools.calls.glm import GlmCalls
from engine.tools.calls.gpt_oss import GptOssCalls
from engine.tools.calls.granite import GraniteCalls
from engine.tools.calls.hunyuan import HunyuanCalls
from engine.tools.calls.kimi import KimiCalls
from engine.tools.calls.llama3 import Llama3Calls
from engine.tools.calls.minimax import MiniMaxCalls
from engine.tools.calls.mistral import MistralCalls
from engine.tools.calls.qwen3 import Qwen3Calls
from engine.tools.calls.qwen3_coder import Qwen3CoderCalls
from engine.tools.calls.rules import Rules
from engine.tools.calls.seed_oss import SeedOssCalls
from engine.tools.calls.tagged import NONE, Tagged
from engine.tools.formats.select import parser

CALLS: Mapping[str, type[Tagged]] = {
    "qwen3": Qwen3Calls,
    "qwen3_coder": Qwen3CoderCalls,
    "gemma4": Gemma4Calls,
    "llama3": Llama3Calls,
    "deepseek4": DeepSeek4Calls,
    "generic": GenericCalls,
    "granite": GraniteCalls,
    "apertus": ApertusCalls,
    "mistral": MistralCalls,
    "deepseek3": DeepSeek3Calls,
    "kimi": KimiCalls,
    "seed_oss": SeedOssCalls,
    "glm": GlmCalls,
    "minimax": MiniMaxCalls,
    "hunyuan": HunyuanCalls,
    "gpt_oss": GptOssCalls,
}
"""The grammars of the formats that have calls, by the names of the formats."""


def calls_source(
    name: str,
    functions: Sequence[Function],
    *,
    token: Callable[[str], int | None],
    ends: Collection[int],
    special: Collection[int],
    forced: bool,
    several: bool,
    thought: str = NONE,
    text: str = "",
) -> str:
    """The grammar of an answer that may call ``functions``, in llguidance's variant of Lark.

    Parameters
    ----------
    name : str
        The format, a key of :data:`CALLS`.
    functions : sequence of Function
        The functions, at least one.
    token : callable
        The id of a control or user-defined token by its text, None if there is none.
    ends, special : collection of int
        The ids of the tokens that end an answer, and of all that are no text.
    forced : bool
        Whether the answer consists of calls, after a thought if there is one; otherwise it is any text with calls in it.
    several : bool
        Whether it may have more than one call.
    thought : str
        ``OPEN``, ``MAYBE`` or ``NONE``: how an answer that is forced, or may be ``text``, begins.
    text : str
        The expression of the text that an answer is if it has no calls; by default it is any text. Not with ``forced``.

    Returns
    -------
    str
        The grammar.

    Raises
    ------
    Unenforceable
        If the calls of a function cannot be described.
    """
    for function in functions:
        function.check()
    rules = Rules(parser(name, single=lambda tag: False).tags, token, ends, special)
    made = CALLS[name](rules, functions, several)
    try:
        return rules.source(made.forced(thought, text) if forced or text else made.free())
    except RecursionError:
        raise Unenforceable("has a schema that is nested too deeply or refers to itself") from None
