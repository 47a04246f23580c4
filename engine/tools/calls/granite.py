"""The grammar of calls of Granite 3."""

from engine.tools.calls.listed import Listed
from engine.tools.formats.granite import Granite


class GraniteCalls(Listed):
    """Calls as :class:`engine.tools.formats.granite.Granite` reads them: a list behind a tag."""

    FORMAT = Granite
    OPENINGS = ("<|tool_call|>", "<tool_call>")
    FORCED = ("<|tool_call|>",)

    def rest(self, opening: str) -> str:
        end = self.rules.text("</tool_call>") if opening == "<tool_call>" else ""
        return f"{self.items()} {end}"
