"""The grammar of calls of Llama 3."""

import json

from engine.tools.calls.function import Function
from engine.tools.calls.rules import ANY
from engine.tools.calls.tagged import NONE, Tagged
from engine.tools.formats.llama3 import Llama3


class Llama3Calls(Tagged):
    """Calls as :class:`engine.tools.formats.llama3.Llama3` reads them: the whole answer, as JSON.

    An answer that begins with a brace is a call.
    """

    FORMAT = Llama3

    def forced(self, thought: str, text: str = "") -> str:
        def body(function: Function, arguments: str) -> str:
            head = f'{{"name": {json.dumps(function.name)}, "parameters": '
            return f'{self.rules.plain(head)} {arguments} "}}"'

        call = self.each(body)
        calls = f'{call} ("; " {call})*' if self.several else call
        return f"({calls} | {self.rules.rule(text)})" if text else calls

    def free(self) -> str:
        brace = rf"[ \t\r\n]*\{{{ANY}"
        text = self.rules.terminal(self.rules.regex([ANY], [brace, self.rules.any_of(self.rules.spelled)]))
        return f"{text} | ({self.rules.text('<|python_tag|>')})? {self.rules.rule(self.forced(NONE))}"
