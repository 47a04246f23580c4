"""The grammar of calls of Kimi K2."""

from engine.tools.calls.function import Function
from engine.tools.calls.tagged import Tagged
from engine.tools.formats.kimi import Kimi

_CALLS, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"


class KimiCalls(Tagged):
    """Calls as :class:`engine.tools.formats.kimi.Kimi` reads them: an id and arguments in JSON."""

    FORMAT = Kimi
    OPENINGS = FORCED = (_CALLS,)
    MANY = True

    def rest(self, opening: str) -> str:
        text = self.rules.text
        number = self.rules.terminal(self.rules.regex(["[0-9]{1,4}"]))

        def body(function: Function, arguments: str) -> str:
            name = text(f"{_CALL}functions.{function.name}:")
            return f"{name} {number} {text(_ARGUMENTS)} {arguments} {text(_CALL_END)}"

        call = self.each(body)
        return f"{call}{'+' if self.several else ''} {text(_CALLS_END)}"
