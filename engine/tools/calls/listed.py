"""Formats whose calls are the items of a list of JSON."""

import json

from engine.tools.calls.function import Function
from engine.tools.calls.tagged import Tagged


class Listed(Tagged):
    """The grammar of a list of ``{"name": "NAME", "arguments": {…}}``."""

    MANY = True

    def head(self, function: Function) -> str:
        """The text of an item before the arguments."""
        return f'{{"name": {json.dumps(function.name)}, "arguments": '

    def items(self) -> str:
        """The list.  Raises Unenforceable."""
        call = self.each(lambda function, arguments: f'{self.rules.plain(self.head(function))} {arguments} "}}"')
        more = f' (", " {call})*' if self.several else ""
        return f'"[" {call}{more} "]"'
