"""Counts of a server, for Prometheus."""

from engine.serving.answer import Answer


class Metrics:
    """The counts of a server."""

    def begin(self, model: str, answer: Answer) -> None:
        """Count an answer, and what it was when it ends."""
