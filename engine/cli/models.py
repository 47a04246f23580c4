"""``bitmirror models``: lists, fetches, verifies and removes the named models, and lists the architectures."""

import argparse
from collections.abc import Sequence

from engine.cli import entry, shared
from engine.cli.parser import Parser
from engine.cli.report import Report
from engine.cli.table import print_table
from engine.hub import catalog
from engine.hub.resolve import resolve

USAGE = """\
%(prog)s                  list the named models, where they are and their licenses
       %(prog)s fetch NAME       download one now; bitmirror run -m NAME does so when needed
       %(prog)s verify NAME      read the whole file and compare its SHA-256"""

DESCRIPTION = """\
Lists, downloads, verifies and removes the models that have a name. Files of other models run as
well, if the engine knows their architecture.

NAME is a name from the list; fetch also accepts hf:owner/repo:Q4_K_M. Downloaded models are
stored in the user's cache folder, or in the folder that BITMIRROR_CACHE names."""

EPILOG = """\
Exit status: 0 done, 2 user error (one sentence on stderr says what to do), 130 interrupted by
Ctrl-C, 1 a bug."""

COMMANDS = (
    ("list", "", "list the named models, where they are and their licenses (the default)"),
    ("fetch", "NAME", "download a model if it is missing, and print the path of its file"),
    ("verify", "NAME", "read the whole file of a model and compare its SHA-256"),
    ("remove", "NAME", "delete a downloaded model"),
)


def parser(prog: str = "bitmirror models") -> Parser:
    """The command line as an argparse parser."""
    top = Parser(prog, usage=USAGE, description=DESCRIPTION, epilog=EPILOG)
    top.add_commands("list", COMMANDS)
    other = top.add_argument_group("other")
    other.add_argument(
        "--architectures", action="store_true", help="list the architectures of files that the engine runs"
    )
    shared.add_other(other)
    return top


def run(args: argparse.Namespace) -> int:
    """Runs one command and returns its exit status; raises EngineError."""
    if args.architectures:
        list_architectures()
    elif args.command == "list":
        list_models()
    elif args.command == "fetch":
        with Report() as report:
            path = resolve(args.name, report.progress)
        print(path)
    elif args.command == "verify":
        print(f"{catalog.verify(catalog.named(args.name))}: the SHA-256 matches")
    else:
        model = catalog.named(args.name)
        print(f"removed {catalog.model_file(model)}" if catalog.remove(model) else f"{model.name} is not downloaded")
    return 0


def list_models() -> None:
    """Print one line per named model: its name, place, size, license and description."""
    rows = []
    for model in catalog.CATALOG.values():
        place = "bundled" if model.bundled else "fetched" if catalog.is_present(model) else "-"
        rows.append((model.name, place, f"{model.n_bytes / 1e6:.1f} MB", model.license, model.description))
    print_table(("name", "place", "size", "license", "description"), rows, right=("size",))


ARCHITECTURE_COLUMNS = ("architecture", "models", "drafts by", "tested against")
"""The columns of the table of architectures."""


def architecture_rows() -> list[tuple[str, str, str, str]]:
    """The rows of the table of architectures, in the order of the registry."""
    # Imported here, because the other commands read no models.
    from engine.models.registry import ARCHITECTURES

    return [(a.name, a.models, a.drafts, a.oracle) for a in ARCHITECTURES.values()]


def list_architectures() -> None:
    """Print one line per architecture: its name in files, models, how they draft, and what its logits are compared with."""
    print_table(ARCHITECTURE_COLUMNS, architecture_rows())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr."""
    return entry.main(parser, run, argv)


if __name__ == "__main__":
    entry.program(main)
