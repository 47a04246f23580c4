"""A network of EAGLE-3 as a source of drafts (``engine/models/eagle3.py``)."""

from engine.speculative.mtp import MTPDraft


class Eagle3Draft(MTPDraft):
    """A chain of drafts by a network that reads layers of the target.

    The token at position 0 has nothing before it that the network could read, so an answer begins without drafts there.
    """

    name = "eagle3"
    behind = 1
