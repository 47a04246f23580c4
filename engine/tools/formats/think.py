"""Models that think between tags, and whose calls are of no known format: DeepSeek-R1 and its distillations, for example."""

from engine.tools.formats.parser import FormatParser


class Think(FormatParser):
    """``<think>\\nTHOUGHT\\n</think>\\n\\nTEXT``

    Many prompts end with ``<think>``, so that the answer begins with the thought. ``<think>`` after the beginning of the text
    is part of the text.
    """

    THOUGHT = ("<think>", "</think>")
