"""``python -m docs.figures [NAME ...]``: draw the figures of this book, all of them or those that are named."""

import argparse
from collections.abc import Sequence

from docs import figures
from docs.figures.style import Page


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line."""
    names = [*figures.FIGURES, *figures.PLOTS]
    parser = argparse.ArgumentParser(prog="python -m docs.figures", description="Draw the figures of the book as SVG.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names)}")
    chosen = parser.parse_args(argv).names or names
    for name in chosen:
        if name not in names:
            parser.error(f"there is no figure {name!r}; the figures are {', '.join(names)}.")
    for name in chosen:
        module = figures.module(name)
        facts = module.facts()
        for theme, path in figures.files(name).items():
            page = Page(module.SIZE, theme)
            module.draw(facts, page)
            path.write_text(page.svg(module.TITLE, facts), encoding="utf-8")
            print(path.relative_to(figures.IMAGES.parent.parent))


if __name__ == "__main__":
    main()
