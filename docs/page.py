"""What the scripts share that fill one page of the book: the option ``--check``, and writing the page."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def fill(prog: str, description: str, page: Path, filled: Callable[[str], str], argv: Sequence[str] | None) -> int:
    """Write a page, or with ``--check`` only tell whether it is out of date.  Returns the exit status.

    prog, description: of the command, for its help; filled: the text of the page made anew from its text; argv: the
    arguments of the command, None: those of the process.
    """
    top = argparse.ArgumentParser(prog=prog, description=description)
    top.add_argument(
        "--check", action="store_true", help="write nothing; the exit status is 1 if the page is out of date"
    )
    check, text = top.parse_args(argv).check, page.read_text(encoding="utf-8")
    if (new := filled(text)) == text:
        return 0
    print(f"docs/{page.name} {'is out of date' if check else 'was written'}")
    if not check:
        page.write_text(new, encoding="utf-8")
    return int(check)
