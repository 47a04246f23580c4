"""A budget of memory for the requests that are being answered."""

from engine.serving.errors import Refusal

MOST = 1 << 30
"""Bytes that requests may take together on any machine."""

SHARE = 4
"""One in this many bytes of the free memory, if that is less."""

RETRY_SECONDS = 2

USUAL = 16
"""Bytes of memory per byte of a body: the text, its values, and what is written of them."""

TOKENIZED = 128
"""Bytes of memory per byte of a text whose tokens are all written out."""


def default_budget() -> int:
    """The bytes that requests may take together: a quarter of the free memory, at most 1 GiB."""
    import psutil

    return min(MOST, int(psutil.virtual_memory().available) // SHARE)


class Budget:
    """Bytes of memory that requests hold while they are answered, by estimates.

    Attributes: ``total``: the most that they may hold together; ``held``: what they hold.  Only the event loop uses it.
    """

    def __init__(self, total: int = 0) -> None:
        """total: bytes; 0: ``default_budget()``."""
        self.total = total or default_budget()
        self.held = 0

    def take(self, scope: dict[str, int], n_bytes: int) -> None:
        """Let the request of ``scope`` hold further bytes.  Raises Refusal with status 503 if others hold too much.

        A request that is alone is never refused: it could never be answered.
        """
        own = scope.get("held", 0)
        if self.held > own and self.held + n_bytes > self.total:
            problem = "the server is busy with other large requests; send the request again later."
            raise Refusal(problem, 503, retry_after=RETRY_SECONDS)
        scope["held"] = own + n_bytes
        self.held += n_bytes

    def give_back(self, scope: dict[str, int]) -> None:
        """Let a request that has been answered hold nothing."""
        self.held -= scope.pop("held", 0)
