"""The grammar of calls of MiniMax M2."""

from engine.tools.calls.qwen3_coder import Qwen3CoderCalls
from engine.tools.formats.minimax import MiniMax


class MiniMaxCalls(Qwen3CoderCalls):
    """Calls as :class:`engine.tools.formats.minimax.MiniMax` reads them: strings as plain text, other values as JSON."""

    FORMAT = MiniMax
    OPENINGS = FORCED = ("<minimax:tool_call>",)
    MANY = True
    CALL, CALL_END = '<invoke name="{}">\n', "</invoke>\n"
    PARAMETER, NAME_END = '<parameter name="', '">'
    LINE_END = ""

    def rest(self, opening: str) -> str:
        call = self.rules.rule(super().rest(opening))
        return f'"\\n" {call}{"+" if self.several else ""} {self.rules.text("</minimax:tool_call>")}'
