"""The grammar of calls of Hunyuan."""

from engine.serving.calls.listed import Listed
from engine.serving.formats.hunyuan import Hunyuan


class HunyuanCalls(Listed):
    """Calls as :class:`engine.serving.formats.hunyuan.Hunyuan` reads them: a list, or blocks of Markdown with a name."""

    FORMAT = Hunyuan
    OPENINGS = FORCED = ("<tool_calls>",)

    def rest(self, opening: str) -> str:
        text, bodies = self.rules.text, []
        for function in self.functions:
            arguments = self.rules.json(function.schema, function.strict)
            name = text(f"{function.name}\n```json\n")
            bodies.append(f"({text('function<tool_sep>')})? {name} {arguments}")
        call = self.rules.rule(
            f'{text("<tool_call>")} {self.alternatives(bodies)} "\\n```" "\\n"? {text("</tool_call>")}'
        )
        more = f' ("\\n"? {call})*' if self.several else ""
        return f'({self.items()} | "\\n"? {call}{more} "\\n"?) {text("</tool_calls>")}'
