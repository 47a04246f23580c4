"""``bitmirror completion``: print a script with which a shell completes the command line of ``bitmirror``."""

import argparse
from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import shtab

from bitmirror.tools import TOOLS
from engine.cli import entry, shared
from engine.cli.parser import Choice, Parser
from engine.errors import UsageError
from engine.hub.catalog import CATALOG

USAGE = "%(prog)s SHELL"

DESCRIPTION = """\
Prints a script with which a shell completes tools, flags, their values, names of models and files.

  eval "$(bitmirror completion bash)"      in ~/.bashrc
  eval "$(bitmirror completion zsh)"       in ~/.zshrc, after compinit
  bitmirror completion fish | source       in ~/.config/fish/config.fish"""

SHELLS = ("bash", "zsh", "fish")

NAMES = " ".join(CATALOG)

MODEL = {
    "bash": "_bitmirror_models",
    "zsh": "_bitmirror_models",
    "fish": f"{NAMES} (__fish_complete_path (commandline -ct))",
    "preamble": {
        "bash": f'_bitmirror_models() {{ compgen -W "{NAMES}" -- "$1"; _shtab_compgen_files "$1"; }}',
        "zsh": f"_bitmirror_models() {{ compadd {NAMES}; _files }}",
    },
}
"""Completes the value of -m: the name of a model, or a file."""

COMPLETE = {"MODEL": MODEL, "FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY}
"""How a value is completed, by the placeholder in the help."""


def parser(prog: str = "bitmirror completion") -> Parser:
    """The command line as an argparse parser."""
    top = Parser(prog, usage=USAGE, description=DESCRIPTION)
    group = top.add_argument_group("shell")
    top.add_positional("shell", metavar="SHELL", type=Choice(SHELLS), help="bash, zsh or fish", group=group)
    shared.add_other(top.add_argument_group("other"))
    return top


def run(args: argparse.Namespace) -> int:
    """Prints the script and returns the exit status; raises UsageError if no shell is named."""
    if args.shell is None:
        raise UsageError("name the shell: bitmirror completion bash, zsh or fish")
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """The script of a shell, made from the parsers of all tools."""
    top = argparse.ArgumentParser("bitmirror")
    top.add_argument("--version", action="store_true", help="print the version")
    tools = top.add_subparsers(parser_class=cast(Any, _tool))
    for name, (module, text) in TOOLS.items():
        _prepare(tools.add_parser(name, module=module, description=text, help=text), shell)
    return shtab.complete(top, shell)


def _tool(*, module: str, description: str, **_: Any) -> argparse.ArgumentParser:
    """The parser of a tool, described by one line."""
    found: argparse.ArgumentParser = import_module(module).parser()
    found.description = description
    return found


def _prepare(tool: argparse.ArgumentParser, shell: str) -> None:
    """Add to the arguments of a parser what completes their values."""
    for action in tool._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _prepare(command, shell)
            continue
        action.help = " ".join((action.help or "").partition(";")[0].split())
        if isinstance(action.type, Choice):
            action.choices = action.type.words
        elif isinstance(action.metavar, str) and action.metavar in COMPLETE:
            action.complete = COMPLETE[action.metavar]  # type: ignore[attr-defined]
        elif action.metavar == "NAME" and not action.option_strings:  # of bitmirror models
            action.choices = tuple(CATALOG)
        if shell == "fish":
            action.help = action.help.replace("\\", "\\\\")
            # -np would be -n with the value p.
            action.option_strings = [flag for flag in action.option_strings if flag.startswith("--") or len(flag) == 2]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr."""
    return entry.main(parser, run, argv)
