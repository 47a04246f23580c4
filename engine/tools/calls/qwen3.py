"""The grammar of calls of Qwen3."""

import json
from typing import ClassVar

from engine.tools.calls.function import Function
from engine.tools.calls.tagged import Tagged
from engine.tools.formats.parser import FormatParser
from engine.tools.formats.qwen3 import Qwen3


class Qwen3Calls(Tagged):
    """Calls as :class:`engine.tools.formats.qwen3.Qwen3` reads them: the name and the arguments in JSON."""

    FORMAT: ClassVar[type[FormatParser]] = Qwen3
    OPENINGS = FORCED = ("<tool_call>",)

    def rest(self, opening: str) -> str:
        def body(function: Function, arguments: str) -> str:
            head = f'\n{{"name": {json.dumps(function.name)}, "arguments": '
            return f"{self.rules.plain(head)} {arguments}"

        call, end = self.each(body), self.rules.text("}\n</tool_call>")
        return f"{call} {end}"
