"""The grammar of calls of DeepSeek V3, R1 and V3.1."""

from engine.tools.calls.function import Function
from engine.tools.calls.tagged import Tagged
from engine.tools.formats.deepseek3 import DeepSeek3

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeek3Calls(Tagged):
    """Calls as :class:`engine.tools.formats.deepseek3.DeepSeek3` reads them: with or without a block of Markdown."""

    FORMAT = DeepSeek3
    OPENINGS = FORCED = (_CALLS,)
    MANY = True

    def rest(self, opening: str) -> str:
        text = self.rules.text

        def body(function: Function, arguments: str) -> str:
            plain = f"{text(f'{_CALL}{function.name}{_SEPARATOR}')} {arguments} {text(_CALL_END)}"
            fence = text(f"{_CALL}function{_SEPARATOR}{function.name}\n```json\n")
            return f"{plain} | {fence} {arguments} {text(chr(10) + '```' + _CALL_END)}"

        call = self.each(body)
        more = f' ("\\n"? {call})*' if self.several else ""
        return f"{call}{more} {text(_CALLS_END)}"
