"""What llguidance reports, as a part of a sentence."""

import re

MOST_CHARACTERS = 200
"""The most characters of a report that a sentence shows."""

SLOW = "it takes too long to compile"
DEEP = "it is nested too deeply"
LARGE = "it is too large or too ambiguous"
CRASH = "it is too large or nested too deeply"
ONE_WAY = "the options max_tokens and stop are not supported"
DEAD_END = "no token of the model can continue the text"

_KNOWN = {
    DEEP: ("recursion limit", "too deeply nested"),
    LARGE: (
        *("DNF too large", "max items exceeded", "too many expressions", "too many states", ") too big"),
        *("schema too large", "stack level exceeded", "Current row has", "Too many items"),
    ),
    ONE_WAY: ("rollback not supported",),
    DEAD_END: ("NoExtension",),
}
_PREFIX = re.compile(r'(at )?(?P<line>\d+)\(\d+\): |failed to (compile JSON schema|parse "%json"): |panic: .*')


def problem(report: str) -> str:
    """The part of a report that a user can act on: without the grammar, states and advice to programmers."""
    for known, marks in _KNOWN.items():
        if any(mark in report for mark in marks):
            return known
    # A report on a regular expression quotes it before it says what is wrong.
    lines = [line for line in report.splitlines() if line.startswith("error: ")] or report.splitlines() or [""]
    text, line = lines[0].removeprefix("error: "), 0
    while match := _PREFIX.match(text):
        line = int(match["line"] or line)
        text = text[match.end() :]
    text = re.split(r"; |\. ", text)[0].rstrip(".:")
    text = "".join(character if character.isprintable() else " " for character in text)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}…"
    return (f"line {line}: " if line > 1 else "") + (text or "llguidance does not accept it")
