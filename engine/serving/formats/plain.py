"""Models whose format is not known: everything is text."""

from engine.serving.formats.parser import FormatParser


class Plain(FormatParser):
    """``TEXT``

    There are no tags: what the model writes is the answer, whatever it looks like.
    """
