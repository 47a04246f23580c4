"""``bitmirror``: one command for all tools of the package."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from bitmirror.tools import TOOLS
from engine.cli import entry
from engine.cli.parser import Parser
from engine.errors import UsageError


def usage() -> str:
    """What ``bitmirror --help`` prints."""
    width = max(map(len, TOOLS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in TOOLS.items()]
    return "\n".join(
        [
            "usage: bitmirror TOOL [flags]",
            "",
            *lines,
            "",
            "`bitmirror TOOL --help` lists the flags of a tool. `bitmirror --version` prints the version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool that the first word names, and returns its exit status: 2 for an unknown name."""
    words = list(sys.argv[1:] if argv is None else argv)
    tool, rest = (words[0], words[1:]) if words else ("--help", [])
    if tool in TOOLS:
        module = import_module(TOOLS[tool][0])
        status: int = module.main(["--cnv", *rest], "bitmirror chat") if tool == "chat" else module.main(rest)
        return status
    if tool == "help" and rest[:1] and rest[0] in TOOLS:
        return main([rest[0], "--help"])
    if tool == "--version":
        return main(["run", "--version"])
    return entry.main(lambda: Parser("bitmirror"), lambda args: explain(tool), [])


def explain(tool: str) -> int:
    """Prints the usage; raises UsageError if ``tool`` is neither a request for it nor a tool."""
    if tool not in ("-h", "--help", "help"):
        raise UsageError(mistake(tool))
    print(usage())
    return 0


def mistake(word: str) -> str:
    """A sentence on a first word that names no tool."""
    if word.startswith("-"):
        return f"{word} must follow the name of a tool, as in `bitmirror run {word} ...` (bitmirror --help lists the tools)"
    from engine.hub.resolve import names_model  # here: only a mistake needs it

    if names_model(word):
        return f"there is no tool {word!r}: to run this model, write bitmirror run -m {word}"
    near = difflib.get_close_matches(word, TOOLS, n=1)
    if near:
        return f"there is no tool {word!r}: did you mean `bitmirror {near[0]}`?"
    return f"there is no tool {word!r}: to answer a prompt, write bitmirror run {word!r} (bitmirror --help lists the tools)"


def program() -> NoReturn:
    """The entry point of the installed command: exits with the status of the tool."""
    entry.program(main)


if __name__ == "__main__":
    program()
