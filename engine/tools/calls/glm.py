"""The grammar of calls of GLM 4.5 to 4.7."""

from engine.tools.calls.qwen3_coder import Qwen3CoderCalls
from engine.tools.formats.glm import Glm


class GlmCalls(Qwen3CoderCalls):
    """Calls as :class:`engine.tools.formats.glm.Glm` reads them: strings as plain text, other values as JSON."""

    FORMAT = Glm
    OPENINGS = FORCED = ("<tool_call>",)
    CALL, CALL_END = "{}\n", "</tool_call>"
    PARAMETER, NAME_END = "<arg_key>", "</arg_key>\n<arg_value>"
    LINE_END, VALUE_END = "", "</arg_value>\n"
