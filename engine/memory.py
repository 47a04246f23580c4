"""The memory of a model, by what it is for."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Memory:
    """The memory of a model in bytes, of its device unless noted otherwise.

    Attributes
    ----------
    weights : int
        Tensors of the file.
    pages_held : int
        Pages of the cache that sequences hold: texts of answers, and the latest text of each slot.
    pages_kept : int
        Pages of earlier texts, which are kept until their room is wanted.
    pages_free : int
        Pages that hold nothing. On the CPU, the system gives them memory when they are first used.
    rings : int
        What layers keep of the latest tokens of each sequence, such as recurrent states.
    snapshots : int
        Snapshots of recurrent states, in host memory.
    buffers : int
        Intermediate results of passes.
    snapshots_limit : int
        The most bytes of snapshots.
    """

    weights: int
    pages_held: int
    pages_kept: int
    pages_free: int
    rings: int
    snapshots: int
    buffers: int
    snapshots_limit: int

    @property
    def cache(self) -> int:
        """The whole cache."""
        return self.pages_held + self.pages_kept + self.pages_free + self.rings

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes of each kind of memory. No byte belongs to two kinds."""
        kinds = dict(vars(self))
        del kinds["snapshots_limit"]
        return kinds

    def __add__(self, other: "Memory") -> "Memory":
        """The memory of two models together."""
        return Memory(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        used = self.pages_held + self.pages_kept
        text = f"weights {shown(self.weights)}, cache {shown(self.cache)} ({shown(used)} in use), "
        if self.snapshots_limit:
            text += f"snapshots {shown(self.snapshots)} (up to {shown(self.snapshots_limit)}), "
        return text + f"buffers {shown(self.buffers)}"


def shown(n_bytes: int) -> str:
    """A number of bytes in MB or GB."""
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"
