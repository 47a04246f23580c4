"""``python -m engine.models``: lists, fetches, verifies and removes the named models."""

import sys
from collections.abc import Sequence

from engine.cli.report import Report
from engine.cli.table import print_table
from engine.errors import EngineError
from engine.hub import catalog
from engine.hub.resolve import resolve

USAGE = """\
usage: python -m engine.models [list]          list the named models and where they are
       python -m engine.models fetch NAME      download one now (python -m engine.run -m NAME does so when needed)
       python -m engine.models verify NAME     read the whole file and compare its SHA-256
       python -m engine.models remove NAME     delete a downloaded model

NAME is a name from the list; fetch also accepts hf:owner/repo/file.gguf. Downloaded models are stored in the user's
cache folder, or in the folder that BITMIRROR_CACHE names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; every expected failure is one sentence on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    command, names = (words[0], words[1:]) if words else ("list", [])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    try:
        if command == "list" and not names:
            list_models()
            return 0
        if command not in ("fetch", "verify", "remove") or len(names) != 1:
            print(f"error: {' '.join(words)!r} is not a command\n{USAGE}", file=sys.stderr)
            return 2
        if command == "fetch":
            with Report() as report:
                path = resolve(names[0], report.progress)
            print(path)
        elif command == "verify":
            print(f"{catalog.verify(catalog.named(names[0]))}: the SHA-256 matches")
        else:
            model = catalog.named(names[0])
            print(
                f"removed {catalog.model_file(model)}" if catalog.remove(model) else f"{model.name} is not downloaded"
            )
        return 0
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def list_models() -> None:
    """Print one line per named model: its name, place, size and description."""
    rows = []
    for model in catalog.CATALOG.values():
        place = "bundled" if model.bundled else "fetched" if catalog.is_present(model) else "-"
        rows.append((model.name, place, f"{model.n_bytes / 1e6:.1f} MB", model.description))
    print_table(("name", "place", "size", "description"), rows, right=("size",))


if __name__ == "__main__":
    sys.exit(main())
