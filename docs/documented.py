"""The reference of the Python interface as plain Markdown: signatures and docstrings, written into ``docs/api.md``.

    python -m docs.documented           write them anew
    python -m docs.documented --check   only tell whether the page is out of date

The page names what it documents in a comment, which no reader sees.  What follows, up to a second comment, is written by this
module, so that the page can be read on GitHub::

    <!-- documented: class engine.Stream()
    :members: aclose
    -->
    ...
    <!-- end of documented -->

The first line is a directive of Sphinx's autodoc without its prefix (``function``, ``class`` or ``exception``), and the
others are its options.  The book is built from these directives (:func:`directives`).
"""

import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docs.page import fill

PAGE = Path(__file__).with_name("api.md")

PLACE = re.compile(
    r"(?P<comment><!-- documented: (?P<kind>\w+) (?P<name>[\w.]+)(?P<hidden>\(\))?\n(?P<options>(?::[a-z-]+:[^\n]*\n)*)-->\n)"
    r"(?P<text>.*?)(?P<end><!-- end of documented -->)",
    re.S,
)

COLUMNS = 126
"""The longest line of text."""

CODE_COLUMNS = 96
"""The longest line of a signature."""

LISTS = ("Parameters", "Attributes", "Returns", "Yields", "Raises")
"""Sections of docstrings that are lists of names, types or errors, each with a description."""


def filled(text: str) -> str:
    """The text of the page with its reference written anew."""
    return PLACE.sub(lambda place: "\n".join((place["comment"], *entry(place), "", place["end"])), text)


def directives(text: str) -> str:
    """The text of the page with directives of autodoc in place of what this module has written."""

    def directive(place: re.Match[str]) -> str:
        options = textwrap.indent(place["options"], "   ")
        return f"```{{eval-rst}}\n.. auto{place['kind']}:: {place['name']}{place['hidden'] or ''}\n{options}```"

    return PLACE.sub(directive, text)


def entry(place: re.Match[str]) -> Iterator[str]:
    """The lines of Markdown of a place: an object, and the members that its options name."""
    name = place["name"]
    found = named(name)
    short = name.rpartition(".")[2]
    yield from heading(3, name, name)
    if place["hidden"] is None:
        yield from signature(name, found)
    yield from markdown(inspect.getdoc(found) or "")
    members = re.search(r"^:members: (.+)$", place["options"], re.M)
    for member in members[1].split(", ") if members else ():
        raw = inspect.getattr_static(found, member)
        yield ""
        yield from heading(4, f"{short}.{member}", f"{name}.{member}")
        value = getattr(found, member)
        if not isinstance(raw, (property, functools.cached_property)):
            yield from signature(f"{short}.{member}", value)
        yield from markdown(inspect.getdoc(raw if isinstance(raw, property) else value) or "")


def named(name: str) -> Any:
    """The object of a dotted name.  Raises AttributeError or ImportError if there is none."""
    module, _, rest = name.rpartition(".")
    return getattr(importlib.import_module(module), rest)


def heading(level: int, title: str, target: str) -> Iterator[str]:
    """A heading, and a target for links: ``#engine.load``."""
    yield f'<a id="{target}"></a>'
    yield ""
    yield f"{'#' * level} `{title}`"
    yield ""


def signature(name: str, found: Any) -> Iterator[str]:
    """A call with the names of its parameters and their defaults; docstrings have the types."""
    bare, star, slash = list[str](), False, False
    for parameter in inspect.signature(found).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            bare.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        if bare and slash and parameter.kind is not parameter.POSITIONAL_ONLY:
            bare.append("/")
        slash = parameter.kind is parameter.POSITIONAL_ONLY
        many = parameter.kind is parameter.VAR_POSITIONAL
        prefix = "*" if many else "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        bare.append(f"{prefix}{parameter.name}{default}")
    if slash:
        bare.append("/")
    line = f"{name}({', '.join(bare)})"
    yield "```python"
    if len(line) <= CODE_COLUMNS:
        yield line
    else:
        yield f"{name}("
        part = "   "
        for argument in bare:
            if len(part) + len(argument) + 2 > CODE_COLUMNS:
                yield part
                part = "   "
            part += f" {argument},"
        yield part
        yield ")"
    yield "```"
    yield ""


def markdown(docstring: str) -> Iterator[str]:
    """The lines of a docstring in the style of NumPy as Markdown."""
    parts = re.split(r"^(\w[\w ]*)\n-{3,}\n", docstring, flags=re.M)
    yield from paragraphs(parts[0])
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        yield ""
        yield f"**{title}**"
        yield ""
        yield from entries(title, body) if title in LISTS else paragraphs(body)


def entries(title: str, body: str) -> Iterator[str]:
    """A list of names, each with its type and description; what is returned may have no name."""
    for found in re.finditer(r"^(\S.*)\n((?:(?:[ \t].*)?\n?)*)", body, re.M):
        name, colon, kind = found[1].partition(" : ")
        names = ", ".join(f"`{each}`" for each in name.split(", "))
        if not colon and title in ("Returns", "Yields"):
            names = inline(name)
        first, *rest = textwrap.dedent(found[2]).strip().split("\n\n")
        text = f"- {names}{f' ({inline(kind)})' if colon else ''}: {inline(first)}"
        yield from wrapped(text, "  ")
        for more in rest:
            yield ""
            yield from (f"  {line}".rstrip() for line in paragraphs(more))


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, lists, and examples of an interpreter."""
    for i, part in enumerate(re.split(r"\n\s*\n", text.strip())):
        if i:
            yield ""
        if part.startswith(">>> "):
            yield "```pycon"
            yield from part.splitlines()
            yield "```"
        elif part.startswith("- "):
            for item in re.split(r"\n(?=- )", part):
                yield from wrapped(inline(item), "  ")
        else:
            yield from wrapped(inline(part), "")


def wrapped(text: str, indent: str) -> list[str]:
    """Lines of a paragraph."""
    return textwrap.wrap(
        " ".join(text.split()), COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def inline(text: str) -> str:
    """Code and references of reStructuredText as code of Markdown, and nothing else that Markdown would take for markup."""
    pieces = re.split(r"(``.+?``|:\w+:`~?[\w.]+`)", " ".join(text.split()))
    for i, piece in enumerate(pieces):
        if i % 2:
            pieces[i] = "`" + re.sub(r"^:\w+:`~?|^``|`+$", "", piece) + "`"
        else:
            pieces[i] = piece.replace("**", r"\*\*").replace("<", r"\<")
    return "".join(pieces)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the reference, or with ``--check`` only tell whether the page is out of date.  Returns the exit status."""
    return fill("python -m docs.documented", "Write the reference of the interface.", PAGE, filled, argv)


if __name__ == "__main__":
    sys.exit(main())
