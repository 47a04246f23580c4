"""The grammar of calls of Mistral, Ministral and Devstral."""

from engine.tools.calls.listed import Listed
from engine.tools.formats.mistral import Mistral


class MistralCalls(Listed):
    """Calls as :class:`engine.tools.formats.mistral.Mistral` reads them: a list, or a name and arguments, without ids."""

    FORMAT = Mistral
    OPENINGS = FORCED = ("[TOOL_CALLS]",)
    BETWEEN = ""
    MANY = False

    def rest(self, opening: str) -> str:
        named = self.each(lambda function, arguments: f"{self.rules.text(f'{function.name}[ARGS]')} {arguments}")
        return self.alternatives([self.items(), named])
