"""A table on stdout: with a header on a terminal, whose width it fits; elsewhere plain lines with aligned columns."""

import sys
from collections.abc import Collection, Iterable, Sequence

from engine.cli.terminal import printable

PLAIN_WIDTH = 1 << 16
"""Most characters of a line if stdout is not a terminal; there, no cell is wrapped, because scripts read them."""


def print_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Collection[str] = (), titled: bool = False
) -> None:
    """Print a table.

    head: the names of the columns.
    rows: the cells of each row.
    right: the names of the columns that are aligned to the right.
    titled: whether the names are also printed if stdout is not a terminal.
    """
    # Imported here: the modules that print tables are also imported for other commands.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    box = SIMPLE_HEAD if terminal else None
    table = Table(box=box, show_header=terminal or titled, padding=(0, 2, 0, 0), pad_edge=False)
    for name in head:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=not terminal)
    for row in rows:
        # As it is: rich would read [...] in a string as a style. Names come from files.
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(force_terminal=terminal, width=None if terminal else PLAIN_WIDTH)
    with console.capture() as printed:
        console.print(table)
    for line in printed.get().splitlines():
        print(line.rstrip())
