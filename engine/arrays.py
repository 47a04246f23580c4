"""Arrays, values and matrices as models see them, and the rows of a pass.

A model never looks inside these objects.  It knows their shapes, slices arrays by row, and passes the objects from one
operation to the next (``engine/ops/arithmetic.py``).
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar, cast


class Value(Protocol):
    """The result of an operation; a device may defer its computation until it is used.

    A value may be used only once.  ``Operations.plain`` turns it into an array, which may be used any number of times.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, then the shape of each row."""


class Array(Value, Protocol):
    """An array in a device's memory."""

    @property
    def size(self) -> int:
        """Number of elements."""

    def reshape(self, first: int, /, *rest: int) -> "Array":
        """An array of this shape with the same elements, without a copy."""

    def __getitem__(self, rows: slice, /) -> "Array":
        """A contiguous slice of the first axis, without a copy."""


class Matrix(Protocol):
    """A weight matrix [rows, columns] of any format, in memory that the operations can read."""

    @property
    def name(self) -> str:
        """The tensor's name in the file."""

    @property
    def rows(self) -> int:
        """Number of output values."""

    @property
    def columns(self) -> int:
        """Number of weights in a row."""


A = TypeVar("A", bound=Array)
"""A backend's arrays."""

V = TypeVar("V", bound=Value)
"""A backend's values, which include its arrays."""

M = TypeVar("M", bound=Matrix)
"""A backend's matrices."""

A_co = TypeVar("A_co", bound=Array, covariant=True)
A_contra = TypeVar("A_contra", bound=Array, contravariant=True)
M_co = TypeVar("M_co", bound=Matrix, covariant=True)


class Role(Enum):
    """What a pass is for, which decides which memory it may use and who waits for it.  Which kernels it uses follows from its
    number of rows, whatever its role.

    DECODE: it continues answers, which wait for its tokens, and is started as a whole.  These passes run one after another
    and share memory.
    PREFILL: it reads a part of a prompt, and may be started in pieces, between which decode passes run.  So it shares no
    memory with them.
    """

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True)
class Thinned(Generic[A_co]):
    """What the rows of a pass need if sequences may be thinned (``engine/cache/thinning.py``).

    dropped: the number of positions that each sequence has dropped, int32 [slots].
    places: the position of each row minus the number of positions that its sequence has dropped, int32 [rows].
    masses: int32 [slots * 64, chunks], to which the attention of layers without a window adds the masses of the chunks that
        a row sees, if the pass is observed; the row at position p of the sequence in slot s adds to row 64 s + p % 64.  None
        if it is not.
    """

    dropped: A_co
    places: A_co
    masses: A_co | None = None


@dataclass
class SharedPositions:
    """The positions that the last layer with an indexer has selected, for the layers after it.

    rows: int32 [rows, top_k], an array of the backend; None: no layer has selected any.
    """

    rows: Any = None


@dataclass(frozen=True)
class Batch(Generic[A_co]):
    """The rows that a forward pass reads.

    tokens: token ids, int32 [rows].
    positions: the position of each token in its sequence, int32 [rows].
    sequences: the slot of the sequence that each row belongs to, int32 [rows].  Rows of one sequence are consecutive, and so
        are their positions.
    mixed: whether rows may belong to several sequences; False: all of them belong to that of the first row.
    per_layer: the per-layer embeddings of the tokens, float32 [n_layer, rows, n_per_layer], once ``Model.begin`` has
        computed them; None for models without per-layer embeddings.
    role: what the pass is for.
    observed: whether the masses of chunks are computed.  All rows belong to one sequence, and are at most as many as a decode
        batch has.
    thinned: what attention needs if sequences may be thinned, once ``Model.placed`` has computed it; None if they may not.
    choice: what layers of this pass share of selected positions, once ``Model.placed`` has prepared it; None if they share
        nothing.
    runs: of a pass that reads prompts of several sequences, where the rows of each begin, in rising order, and its slot:
        int32 [2, MOST_TOGETHER + 1].  Elements [0, r] after the last sequence are the number of rows.  None for other passes.
    ends: of such a pass, the numbers of rows up to and including each row whose logits are wanted, int32 [n].  None: the
        logits of the last rows are wanted.
    """

    tokens: A_co
    positions: A_co
    sequences: A_co
    mixed: bool = False
    per_layer: A_co | None = None
    role: Role = Role.DECODE
    observed: bool = False
    thinned: Thinned[A_co] | None = None
    choice: SharedPositions | None = None
    runs: A_co | None = None
    ends: A_co | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.positions.size

    def part(self, rows: slice) -> "Batch[A_co]":
        """Some of the rows, without ``per_layer``, ``runs`` and ``ends``."""
        # A slice has the type of its array, which the protocol cannot express for NumPy arrays.
        tokens, positions, sequences = (
            cast(A_co, array[rows]) for array in (self.tokens, self.positions, self.sequences)
        )
        return Batch(tokens, positions, sequences, self.mixed, role=self.role)
