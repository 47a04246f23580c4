"""Formats whose calls begin with a tag, wherever they stand in the answer: what their grammars have in common."""

from collections.abc import Callable, Sequence
from typing import ClassVar

from engine.tools.calls.function import Function
from engine.tools.calls.rules import Rules
from engine.tools.formats.parser import FormatParser

OPEN, MAYBE, NONE = "open", "maybe", "none"
"""Whether an answer begins in a thought, may begin with one, or has none."""


class Tagged:
    """The grammar of one format.

    functions: those that can be called; several: whether an answer may have more than one call.
    """

    FORMAT: ClassVar[type[FormatParser]]
    OPENINGS: ClassVar[tuple[str, ...]]
    """The tags with which calls begin; if the model must call, the answer begins with one of ``FORCED``."""
    FORCED: ClassVar[tuple[str, ...]]
    THOUGHT_BEGIN: ClassVar[str] = ""
    """The text between the tag of a thought and the thought."""
    BETWEEN: ClassVar[str] = "\n"
    """The text between a call and the next one."""
    MANY: ClassVar[bool] = False
    """Whether several calls stand behind one tag."""

    def __init__(self, rules: Rules, functions: Sequence[Function], several: bool) -> None:
        self.rules = rules
        self.functions = functions
        self.several = several

    def rest(self, opening: str) -> str:
        """What follows the tag ``opening``, up to the end of the call.  Raises Unenforceable."""
        raise NotImplementedError

    def forced(self, thought: str, text: str = "") -> str:
        """A thought if there is one, and calls; thought: ``OPEN``, ``MAYBE`` or ``NONE``; text: the expression of a text that
        may stand for the calls.  Raises Unenforceable."""
        blocks = [f"{self.rules.text(opening)} {self.rest(opening)}" for opening in self.FORCED]
        block = self.rules.rule(" | ".join(blocks))
        more = f" ({self.rules.plain(self.BETWEEN)} {block})*" if self.several and not self.MANY else ""
        calls = f'"\\n"{{0,2}} {block}{more}'
        if not text:
            return f"{self._thought(thought)} {calls}"
        # After the tag of a thought, newlines are no part of the text.
        answer = f"({calls} | {self.rules.rule(text)})"
        if not (before := self._thought(thought)):
            return answer
        separated = f'({calls} | "\\n"{{0,2}} {self.rules.rule(text)})'
        return f"{before} {separated}" if thought == OPEN else f"({before.removesuffix('?')} {separated} | {answer})"

    def free(self) -> str:
        """Any text, and calls.  Raises Unenforceable."""
        openings = {opening: self.rest(opening) for opening in self.OPENINGS}
        return self.rules.free(openings, self.FORMAT.OPENS, self.several)

    def alternatives(self, bodies: Sequence[str]) -> str:
        """One of the expressions."""
        return self.rules.rule(" | ".join(bodies))

    def each(self, body: Callable[[Function, str], str]) -> str:
        """One of the functions, as ``body`` writes it with the expression of its arguments in JSON.  Raises Unenforceable."""
        return self.alternatives([body(one, self.rules.json(one.schema, one.strict)) for one in self.functions])

    def _thought(self, thought: str) -> str:
        if self.FORMAT.THOUGHT is None or thought == NONE:
            return ""
        begin, end = self.FORMAT.THOUGHT
        inner = self.rules.until(end)
        return inner if thought == OPEN else f"({self.rules.text(begin + self.THOUGHT_BEGIN)} {inner})?"
