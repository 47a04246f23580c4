"""argparse as every command line here uses it: one-sentence errors, values with ranges, and one style of help."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.checks import shown
from engine.cli.llama_cpp import Flag, Other, find, replace
from engine.errors import UsageError


class Document(argparse.RawDescriptionHelpFormatter):
    """Help that shows the value of a flag once (``-n, --predict N``) and every default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=98)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join(action.option_strings) + value

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        default = action.default
        silent = not action.option_strings or isinstance(default, bool) or default in (None, "", [], argparse.SUPPRESS)
        text = action.help or ""
        if silent:
            return text
        # A list is written as on the command line.
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        return f"{text} (default {shown})"


class Parser(argparse.ArgumentParser):
    """argparse that raises its errors as UsageError, and accepts values that begin with a dash.

    prog: name of the command, such as ``bitmirror run``; ``%(prog)s`` in ``usage`` stands for it.
    foreign: flags of llama.cpp that have another name here, or none (``engine/cli/llama_cpp.py``).
    positional: advice for a positional argument that is not accepted; if it ends with ``-m``, that flag names a model.
    finish: called with the parsed arguments, to combine those that belong together.
    """

    def __init__(
        self,
        prog: str,
        *,
        foreign: Sequence[Other | Flag] = (),
        positional: str = "",
        finish: Callable[[argparse.Namespace], None] | None = None,
        **options: Any,
    ) -> None:
        style: dict[str, Any] = {"formatter_class": Document, "allow_abbrev": False, "add_help": False}
        super().__init__(prog, exit_on_error=False, **style, **options)
        self.foreign = foreign
        self.positional = positional
        self.finish = finish
        self.commands: dict[str, Parser] = {}
        self.most: float = 0
        """Number of positional arguments."""

    def error(self, message: str) -> NoReturn:
        missing = message.removeprefix("the following arguments are required: ")
        problem = message if missing == message else f"{self.prog} needs {missing}"
        raise UsageError(f"{problem} (--help lists every flag)")

    def print_help(self, file: Any = None) -> None:
        """Prints the help; unlike that of argparse, it does not hide a closed pipe."""
        print(self.format_help(), end="", file=file)

    def add_positional(self, name: str, group: Any = None, **options: Any) -> None:
        """Adds an optional positional argument, which the help shows in ``group``."""
        (group or self).add_argument(name, nargs="?", **options)
        self.most += 1

    def add_positionals(self, name: str, group: Any = None, **options: Any) -> None:
        """Adds any number of positional arguments, which the help shows in ``group``."""
        (group or self).add_argument(name, nargs="*", **options)
        self.most = math.inf

    def add_commands(self, default: str, commands: Iterable[tuple[str, str, str]]) -> None:
        """Adds commands, each a name, the name of its argument or "", and its help; ``default`` is run if none is given.

        The command becomes ``args.command``, its argument ``args.name``.
        """
        group = self.add_subparsers(title="commands", metavar="", dest="command", parser_class=Parser)
        self.set_defaults(command=default)
        for name, argument, text in commands:
            usage = f"%(prog)s {argument}".rstrip()
            sub = group.add_parser(name, prog=f"{self.prog} {name}", usage=usage, help=text, description=text)
            if argument:
                sub.add_argument("name", metavar=argument)
                sub.most = 1
            add_help(sub)
            self.commands[name] = sub

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses like argparse, but ``-p --x`` means the prompt ``--x``, as it does in llama.cpp.  Raises UsageError."""
        words = list(sys.argv[1:] if args is None else args)
        try:
            parsed = super().parse_args(self._joined(list(words)), namespace)
        except argparse.ArgumentError as error:
            names = (error.argument_name or "").split("/")
            used = {word.partition("=")[0] for word in words}
            name = next((name for name in names if name in used), names[0])
            raise UsageError(f"{name} {error.message}".strip()) from None
        if self.finish is not None:
            self.finish(parsed)
        return parsed

    def _joined(self, rest: list[str]) -> list[str]:
        """The words with each flag joined to its value, and llama.cpp's flags replaced by those of this parser."""
        joined: list[str] = []
        words: list[str] = []
        while rest:
            word = rest.pop(0)
            name, equals, _ = word.partition("=")
            if word == "--":
                words += rest
                joined, rest = [*joined, word, *rest], []
            elif word == "-" or not word.startswith("-"):
                if self.commands:
                    return [*joined, word, *self._command(word)._joined(rest)]
                joined.append(word)
                words.append(word)
            elif action := self._option_string_actions.get(_dashed(name)):
                if action.nargs == 0:
                    if equals:
                        raise UsageError(f"{name} takes no value")
                    joined.append(action.option_strings[-1])
                elif equals or rest:
                    joined.append(action.option_strings[-1] + word[len(name) :] + ("" if equals else f"={rest.pop(0)}"))
                else:
                    raise UsageError(f"{name} needs a value: {name} {action.metavar or 'VALUE'}")
            elif foreign := find(self.foreign, name):
                rest = [*replace(foreign, word, rest), *rest]
            else:
                raise UsageError(self._unknown(name))
        if len(words) > self.most:
            raise UsageError(self._unexpected(words, joined))
        if math.isinf(self.most):
            # argparse wants any number of words to follow one another.
            flags = joined[: joined.index("--")] if "--" in joined else joined
            return [*(each for each in flags if each.startswith("-") and each != "-"), "--", *words]
        return joined

    def _unexpected(self, words: list[str], joined: list[str]) -> str:
        """A sentence on positional arguments that are too many; joined: the whole command line."""
        from engine.hub.resolve import names_model  # here: only a mistake needs it

        advice = self.positional or "--help lists every flag"
        models = [word for word in words if names_model(word)]
        if models and advice.endswith("-m") and not any(map(_is_model, joined)):
            return f"unexpected argument {models[0]!r:.80}: did you mean -m {shown(models[0])}?"
        return f"unexpected argument {words[-1]!r:.40}: {advice}"

    def _command(self, word: str) -> "Parser":
        if word not in self.commands:
            raise UsageError(f"there is no command {word!r}: the commands are {listed(self.commands, 'and')}")
        return self.commands[word]

    def _unknown(self, word: str) -> str:
        near = nearest(word, self._option_string_actions)
        return f"unknown flag {shown(word)}: " + (f"did you mean {near}?" if near else "--help lists every flag")


def _is_model(word: str) -> bool:
    """Whether a joined word is a flag that gives the model."""
    return word.startswith(("--model=", "--hf-repo="))


def _dashed(name: str) -> str:
    """A long flag with dashes for underscores, as llama.cpp accepts them."""
    return name.replace("_", "-") if name.startswith("--") else name


def add_help(parser: argparse.ArgumentParser | Any) -> None:
    """Adds --help, to a parser or to a group of it."""
    parser.add_argument("-h", "--help", action="help", help="print this help and exit")


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The only name that ``word`` is likely to mean; None if there is none, or more than one.

    Such a name has another number of dashes, begins with the word, or differs from it by a typing error.
    """
    names = sorted(set(names), key=len, reverse=True)
    bare = word.lstrip("-")
    for name in names:
        if name.lstrip("-") == bare:
            return name
    # In short flags every letter counts: -ngl is not -n.
    if not word.startswith("--") or len(bare) < 3:
        return None
    begun = [name for name in names if name.startswith(word)]
    if begun:
        return begun[0] if len(begun) == 1 else None
    by_distance: dict[int, list[str]] = {}
    for name in names:
        other = name.lstrip("-")
        distance = _distance(bare, other)
        if len(other) >= 3 and distance <= (1 if len(other) < 8 else 2):
            by_distance.setdefault(distance, []).append(name)
    best = by_distance[min(by_distance)] if by_distance else []
    return best[0] if len(best) == 1 else None


def _distance(a: str, b: str) -> int:
    """The number of letters to insert, delete, replace or swap with a neighbour to turn ``a`` into ``b``."""
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        before, last, row = row, before, [i + 1]
        for j, y in enumerate(b):
            best = min(before[j] + (x != y), before[j + 1] + 1, row[j] + 1)
            if i and j and x == b[j - 1] and y == a[i - 1]:
                best = min(best, last[j - 1] + 1)
            row.append(best)
    return row[-1]


def listed(words: Iterable[str], joint: str = "or") -> str:
    """Words as a list in a sentence: ``a, b or c``."""
    *most, last = words
    return f"{', '.join(most)} {joint} {last}" if most else last


# --- values ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """The type of a numeric flag: converts the text, and rejects what is not a number or out of range.

    least, most: the range, both included; None: no limit.
    above: ``least`` itself is excluded.
    note: advice at the end of the error message.
    """

    least: float | None = None
    most: float | None = None
    whole: bool = False
    above: bool = False
    note: str = ""

    def __call__(self, text: str) -> Any:
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            value = math.nan
        # Infinities are no values of a flag, either; an integer of hundreds of digits is none to isfinite.
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be a {'whole ' if self.whole else ''}number, not {text!r}")
        if abs(value) >= 2**64 and self.whole:
            raise argparse.ArgumentTypeError(f"must be a number of fewer digits, not {text:.20}...")
        too_small = self.least is not None and (value <= self.least if self.above else value < self.least)
        if too_small or (self.most is not None and value > self.most):
            note = f"; {self.note}" if self.note else ""
            raise argparse.ArgumentTypeError(f"must be {self.range}, not {text:.40}{note}")
        return value

    @property
    def range(self) -> str:
        """The range in words."""
        least = str(self.least) if self.least is not None else ""
        most = str(self.most) if self.most is not None else ""
        if self.above:
            return f"above {least}" + (f" and at most {most}" if most else "")
        return f"{least} to {most}" if least and most else f"{least} or more" if least else f"at most {most}"


def whole(least: int | None = None, most: int | None = None, note: str = "") -> Number:
    """The type of a flag that takes a whole number."""
    return Number(least, most, whole=True, note=note)


def real(least: float | None = None, most: float | None = None, *, above: bool = False, note: str = "") -> Number:
    """The type of a flag that takes a real number; infinities and NaN are rejected."""
    return Number(least, most, above=above, note=note)


@dataclass(frozen=True)
class Numbers:
    """The type of a flag that takes whole numbers separated by commas, each at least ``least``."""

    least: int = 0

    def __call__(self, text: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be whole numbers such as 128,512, not {text!r}") from None
        if min(values) < self.least:
            raise argparse.ArgumentTypeError(f"must be {self.least} or more, not {min(values)}")
        return values


@dataclass(frozen=True)
class Choice:
    """The type of a flag that takes one of a few words."""

    words: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text not in self.words:
            raise argparse.ArgumentTypeError(f"must be {listed(self.words)}, not {text!r}")
        return text


def filled(what: str) -> Callable[[str], str]:
    """The type of a flag whose value must not be empty; ``what`` is the advice."""

    def value(text: str) -> str:
        if not text:
            raise argparse.ArgumentTypeError(f"is empty: {what}")
        return text

    return value
