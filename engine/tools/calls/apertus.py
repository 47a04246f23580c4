"""The grammar of calls of Apertus."""

import json

from engine.tools.calls.function import Function
from engine.tools.calls.listed import Listed
from engine.tools.formats.apertus import Apertus


class ApertusCalls(Listed):
    """Calls as :class:`engine.tools.formats.apertus.Apertus` reads them: a list of objects with the name as the key."""

    FORMAT = Apertus
    OPENINGS = FORCED = ("<|tools_prefix|>",)

    def head(self, function: Function) -> str:
        return f"{{{json.dumps(function.name)}: "

    def rest(self, opening: str) -> str:
        return f"{self.items()} {self.rules.text('<|tools_suffix|>')}"
