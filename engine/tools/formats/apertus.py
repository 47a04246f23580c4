"""Apertus: a list of objects whose only key is the name of the function."""

from itertools import count

from engine.tools.formats.json_call import JsonCalls
from engine.tools.formats.reader import Broken, Steps


class Apertus(JsonCalls):
    """Thoughts, text, and calls::

    <|inner_prefix|>THOUGHT<|inner_suffix|>TEXT<|tools_prefix|>[{"NAME": {"KEY": VALUE}}, {"NAME": {}}]<|tools_suffix|>
    """

    THOUGHT = ("<|inner_prefix|>", "<|inner_suffix|>")
    OPENS = ("<|tools_prefix|>",)
    CLOSES = ("<|tools_suffix|>",)

    def call(self, symbol: str) -> Steps[None]:
        yield from self.input.blanks()
        yield from self.items(self._item() for _ in count())

    def _item(self) -> Steps[None]:
        yield from self.input.blanks()
        yield from self.input.accept("{")
        name = yield from self.key()
        if not self.tools.has(name):
            raise Broken
        yield from self.json_arguments(name)
        yield from self.input.blanks()
        yield from self.input.accept("}")
        yield from self.end()
