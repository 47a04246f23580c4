"""Calls whose name stands before their arguments, which are a JSON object, perhaps in a block of Markdown."""

from engine.tools.formats.parser import FormatParser
from engine.tools.formats.reader import Broken, Steps


class NamedCalls(FormatParser):
    """A format whose calls are a name, something that separates, and ``{…}`` or the lines `````json``, ``{…}`` and `````."""

    def named_call(self, name: str) -> Steps[None]:
        """Reads the arguments of a call of ``name``; raises Broken if there are none, or no such function."""
        if not self.tools.has(name):
            raise Broken
        yield from self.input.blanks()
        fenced = (yield from self.input.peek()) == "`"
        if fenced:
            yield from self.input.literal("```json")
            yield from self.input.blanks()
        yield from self.json_arguments(name)
        if fenced:
            yield from self.input.blanks()
            yield from self.input.literal("```")
        yield from self.end()
