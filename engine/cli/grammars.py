"""The flags that restrict an answer: ``--json-schema``, ``--regex`` and ``--grammar``."""

import argparse
from typing import TYPE_CHECKING

from engine.cli.texts import read_text, valid
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.grammar.grammar import Grammar


def grammar(args: argparse.Namespace) -> "Grammar | None":
    """What the answer may be; None: anything.  Raises UsageError if it cannot be read or used."""
    values = {"--json-schema": args.json_schema, "--regex": args.regex, "--grammar": args.grammar}
    given = [name for name, value in values.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are both given: use only one of them")
    from engine.grammar.grammar import Grammar

    if args.regex is not None:
        return Grammar.regex(valid(args.regex))
    if args.grammar is not None:
        if "::=" in args.grammar:
            raise UsageError("--grammar takes a file with a grammar in Lark's notation, not a grammar in GBNF")
        return Grammar.lark(read_text(args.grammar, "grammar"))
    schema = args.json_schema
    return Grammar.json_schema(valid(schema) if schema.lstrip().startswith("{") else read_text(schema, "JSON schema"))
