"""The rules of a grammar in llguidance's variant of Lark, with the tags of a format as the tokens of a model."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from engine.grammar.grammar import JSON_OPTIONS, MOST_BYTES
from engine.tools.calls.function import Unenforceable

ANY = "(?s:.*)"
"""The regular expression of any text."""

MOST_PARTS = 20_000
"""The most parts of schemas that are looked at for a grammar."""


class Rules:
    """Builds a grammar.

    A tag that is one token of the vocabulary can be nothing but this token, and text contains none.  Other tags are text, and
    so other text must not contain them.

    tags: the tags of the format, and the tokens that some contain; token: the id of a control or user-defined token, None if
    a text is none; ends: the ids of the tokens that end an answer; special: those of all tokens that are no text.
    """

    def __init__(
        self,
        tags: Sequence[str],
        token: Callable[[str], int | None],
        ends: Collection[int] = (),
        special: Collection[int] = (),
    ) -> None:
        #: The tags of the format.
        self.tags = tuple(tags)
        self._ids = {tag: id for tag in tags if (id := token(tag)) is not None}
        self._split = re.compile("(" + "|".join(map(re.escape, self._ids)) + ")") if self._ids else None
        #: The tags that are text.
        self.spelled = [tag for tag in tags if not any(token in tag for token in self._ids)]
        self._ends = ends
        self._special = special
        self._lines: dict[str, str] = {}
        self._defined: dict[str, str] = {}
        self._parts = 0
        self._size = 0

    def source(self, start: str) -> str:
        """The grammar of what the expression ``start`` describes."""
        return "\n".join(
            [
                f"start: {start}",
                *(f"{name}: {body}" for body, name in self._lines.items()),
                *(f"{name}: {body}" for name, body in self._defined.items()),
            ]
        )

    def rule(self, body: str) -> str:
        """A name for an expression."""
        return self._named(body, "r")

    def reserved(self) -> str:
        """A name for an expression that :meth:`define` gives later, since it contains the name."""
        name = f"d{len(self._defined)}"
        self._defined[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Give the expression of a name from :meth:`reserved`."""
        self._grow(body)
        self._defined[name] = body

    def terminal(self, body: str) -> str:
        """A name for an expression that is one regular expression."""
        return self._named(body, "T")

    def spend(self) -> None:
        """Count a part of a schema.  Raises Unenforceable if there are too many."""
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise Unenforceable(f"has a schema that stands for more than {MOST_PARTS} parts")

    def _named(self, body: str, prefix: str) -> str:
        if body not in self._lines:
            self._grow(body)
            self._lines[body] = f"{prefix}{len(self._lines)}"
        return self._lines[body]

    def _grow(self, body: str) -> None:
        """Count the characters of a rule.  Raises Unenforceable if the grammar cannot be used, because it is too long."""
        self._size += len(body)
        if self._size > MOST_BYTES:
            raise Unenforceable(f"has a schema whose grammar is longer than {MOST_BYTES} characters")

    # --- expressions -------------------------------------------------------------------------------------------

    def plain(self, text: str) -> str:
        """A text that contains no tag, whatever it looks like."""
        return json.dumps(text, ensure_ascii=False) if text else '""'

    def text(self, text: str) -> str:
        """A text and the tags in it.  A token that ends the answer is left out: it may follow every complete answer."""
        parts = self._split.split(text) if self._split else [text]
        kept = [part for part in parts if part and self._ids.get(part) not in self._ends]
        return " ".join(self._part(part) for part in kept) or '""'

    def ends(self, tag: str) -> bool:
        """Whether a tag is a token that ends the answer."""
        return self._ids.get(tag) in self._ends

    def json(self, schema: Mapping[str, Any], strict: bool) -> str:
        """A JSON value; strict: whether a keyword that is not supported is an error."""
        return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS | {'lenient': not strict}})}"

    def until(
        self, end: str, patterns: Sequence[str] = (), without: Sequence[str] = (), words: Sequence[str] = ()
    ) -> str:
        """Any text that contains no tag, and the text ``end``, in which a tag may be.

        patterns: regular expressions that the text before ``end`` matches; without: those that it must not match; words:
        those of which it may match one instead.
        """
        parts = self._split.split(end) if self._split else [end]
        content = self.regex(patterns or [ANY], [*without, self.any_of(self.spelled)])
        if words:
            content = f"({content}) | {self.regex(['|'.join(words)])}"
        content = self.terminal(content)
        if len(parts) == 1:
            return self.lazy(f"{content} {self.plain(end)}")
        head = f"{content} {self.plain(parts[0])}" if parts[0] else content
        return f"{self.terminal(head)} {self.text(end[len(parts[0]) :])}"

    def untagged(self) -> str:
        """Any text that contains no tag."""
        return self.terminal(self.regex([ANY], [self.any_of(self.spelled)]))

    def lazy(self, body: str) -> str:
        """A name for an expression that is one regular expression, and ends as soon as it can."""
        name = self._lines.get(body)
        if name is None:
            name = self._lines[body] = f"z{len(self._lines)}[lazy]"
        return name.removesuffix("[lazy]")

    def regex(self, patterns: Sequence[str], without: Sequence[str] = ()) -> str:
        """The texts that match all ``patterns`` and none of ``without``, in which "" matches nothing."""
        return " & ".join([*map(_slashed, patterns), *(f"~{_slashed(each)}" for each in without if each)])

    def any_of(self, tags: Sequence[str]) -> str:
        """The regular expression of the texts that contain one of ``tags``; "" if there are none."""
        return f"{ANY}(?:{'|'.join(map(re.escape, tags))}){ANY}" if tags else ""

    # --- free text ---------------------------------------------------------------------------------------------

    def free(self, openings: Mapping[str, str], closed: Sequence[str], several: bool) -> str:
        """Any text and any tokens, in which the tags of ``openings`` are followed by what they stand for.

        openings: expressions of what follows, by tags; closed: all tags that begin a call, of which those that are no key of
        ``openings`` cannot come; several: whether text and more of them may follow.
        """
        spelled = [tag for tag in closed if tag in self.spelled]
        opened = {self._ids[token] for tag in closed for token in self._ids if token in tag}
        pieces, begun, heads = [], [], set()
        for tag, rest in openings.items():
            parts = self._split.split(tag) if self._split else [tag]
            if len(parts) == 1:
                content = self.terminal(self.regex([ANY], [self.any_of(spelled)]))
                begun.append(f"{self.lazy(f'{content} {self.plain(tag)}')} {rest}")
                continue
            head = parts[0]
            before = ""
            if head:
                heads.add(head)
                before = self.terminal(self.regex([ANY + re.escape(head)], [self.any_of(spelled)])) + " "
                pieces.append(before.strip())
            begun.append(f"{before}{self.text(tag[len(head) :])} {rest}")
        ends = [ANY + re.escape(head) for head in sorted(heads)]
        pieces.append(self.terminal(self.regex(["(?s:.+)"], [self.any_of(spelled), *ends])))
        if others := sorted(set(self._special) - opened - set(self._ends)):
            pieces.append(f"<[{_ranges(others)}]>")
        piece, call = self.rule(" | ".join(dict.fromkeys(pieces))), self.rule(" | ".join(begun))
        return f"({piece} | {call})*" if several else f"{piece}* {call}?"

    def _part(self, part: str) -> str:
        return f"<[{self._ids[part]}]>" if part in self._ids else self.plain(part)


def _slashed(pattern: str) -> str:
    """A regular expression as Lark writes it."""
    pattern = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
    return "/" + re.sub(r"\\?\n", r"\\n", re.sub(r"\\?\r", r"\\r", pattern)) + "/"


def _ranges(ids: Sequence[int]) -> str:
    """Numbers in order as ``1-3,7``."""
    found: list[list[int]] = []
    for id in ids:
        if found and found[-1][1] == id - 1:
            found[-1][1] = id
        else:
            found.append([id, id])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)
