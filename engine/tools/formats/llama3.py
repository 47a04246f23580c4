"""Llama 3.1, 3.2 and 3.3: an answer that is JSON is a call."""

from engine.tools.formats.json_call import JsonCalls
from engine.tools.formats.reader import Steps


class Llama3(JsonCalls):
    """A call, or text::

        {"name": "NAME", "parameters": {"KEY": VALUE}}

    Only at the beginning of the answer, which may be ``<|python_tag|>``, is it a call; others may follow after ``;``.
    """

    TAGS = ("<|python_tag|>",)

    def beginning(self) -> Steps[None]:
        if self.looks_for_calls:
            yield from self.attempt(self._calls())

    def is_opening(self, pending: str) -> bool:
        # Other JSON than a call is text, so the object must have shown that it is one.
        text = pending.lstrip()
        return text[:1] == self.input.symbol("<|python_tag|>") or (text[:1] == "{" and '"name"' in text)

    def _calls(self) -> Steps[None]:
        yield from self.input.blanks()
        if (yield from self.input.peek()) == self.input.symbol("<|python_tag|>"):
            self.input.take(1)
        while True:
            yield from self.json_call(arguments_needed=True)
            yield from self.input.accept(";")
