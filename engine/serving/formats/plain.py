"""Models whose format is not known: everything is text."""

from engine.serving.formats.parser import FormatParser


class Plain(FormatParser):
    """``TEXT``

    There are no tags: what the model writes is the answer, whatever it looks like.
    """


def plain() -> Plain:
    """A parser of the continuation of a text, in which everything is text."""
    return Plain((), single=lambda tag: False)
