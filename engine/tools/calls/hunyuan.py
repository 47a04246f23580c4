"""The grammar of calls of Hunyuan."""

from engine.tools.calls.function import Function
from engine.tools.calls.listed import Listed
from engine.tools.formats.hunyuan import Hunyuan


class HunyuanCalls(Listed):
    """Calls as :class:`engine.tools.formats.hunyuan.Hunyuan` reads them: a list, or blocks of Markdown with a name."""

    FORMAT = Hunyuan
    OPENINGS = FORCED = ("<tool_calls>",)

    def rest(self, opening: str) -> str:
        text = self.rules.text

        def body(function: Function, arguments: str) -> str:
            name = text(f"{function.name}\n```json\n")
            return f"({text('function<tool_sep>')})? {name} {arguments}"

        call = self.rules.rule(f'{text("<tool_call>")} {self.each(body)} "\\n```" "\\n"? {text("</tool_call>")}')
        more = f' ("\\n"? {call})*' if self.several else ""
        return f'({self.items()} | "\\n"? {call}{more} "\\n"?) {text("</tool_calls>")}'
