"""Loading of a file's tensors as matrices, vectors, linear layers and rotation angles."""

from dataclasses import replace

import numpy as np

from engine.arrays import Array, Matrix
from engine.checks import shown
from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.models.config import ModelConfig
from engine.models.linear import Linear
from engine.models.rope_config import RopeConfig
from engine.models.rotary import Rotary
from engine.models.weights import load_integers, load_vector, load_weight, missing
from engine.ops.operations import Ops
from engine.ops.weight import Weight
from engine.shares import HeadRows


class Loader:
    """Loads tensors of ``gguf`` into memory that the operations of ``ops`` can read, and records which ones have been loaded.

    n_ctx: the number of positions in tables of rotation angles.
    like: another loader on the same device, whose tables of rotation angles are shared if they are equal; or None.
    taken: the names of tensors that loaders of the same file have loaded, which is extended; None: none yet.
    """

    def __init__(
        self,
        config: ModelConfig,
        gguf: GGUF,
        ops: Ops,
        n_ctx: int,
        like: "Loader | None" = None,
        taken: set[str] | None = None,
    ) -> None:
        self.config = config
        self.gguf = gguf
        self.ops = ops
        self._n_ctx = n_ctx
        self._like = like
        self._taken: set[str] = set() if taken is None else taken
        self._rotaries: dict[RopeConfig, Rotary] = {}
        self._temperatures: dict[tuple[float, int, int], Array] = {}

    # --- tensors -----------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the file has a tensor with this name."""
        return name in self.gguf.tensors

    def ignore(self, *names: str) -> None:
        """Record that these tensors are not needed, so that :meth:`check_complete` accepts them."""
        self._taken.update(names)

    def weight(self, name: str, rows: int, columns: int, count: int = 0) -> Weight:
        """Load a matrix [rows, columns] of the file, or ``count`` stacked matrices of one tensor."""
        self._taken.add(name)
        return load_weight(self.gguf, name, rows, columns, count)

    def matrix(self, name: str, rows: int, columns: int, count: int = 0, heads: HeadRows | None = None) -> Matrix:
        """Load a matrix [rows, columns] of the file, or ``count`` stacked matrices of one tensor, into memory that the
        operations can read.

        heads: how the rows belong to heads; None: they do not.
        """
        return self.ops.weight(replace(self.weight(name, rows, columns, count), heads=heads))

    def embedding_matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """Load a matrix [rows, columns] of which passes read single rows."""
        # Devices that share a model do not divide it.
        return self.ops.weight(self.weight(name, rows, columns), host=len(self.ops.owners) > 1)

    def array(self, name: str, *shape: int) -> np.ndarray:
        """Load a small tensor of the file as float32 of this shape."""
        self._taken.add(name)
        return load_vector(self.gguf, name, *shape)

    def vector(self, name: str, *shape: int) -> Array:
        """Load a small tensor of the file as float32 of this shape into memory that the operations can read."""
        return self.ops.upload(self.array(name, *shape))

    def optional(self, name: str, *shape: int) -> Array | None:
        """Load a small tensor as float32 of this shape into memory that the operations can read; None if the file does not
        have it."""
        return self.vector(name, *shape) if self.has(name) else None

    def integers(self, name: str, *shape: int, end: int) -> Array | None:
        """Load a table of ids from 0 to ``end`` - 1 as int32 of this shape; None if the file does not have it."""
        return self.ops.upload(self.host_integers(name, *shape, end=end)) if self.has(name) else None

    def host_integers(self, name: str, *shape: int, end: int) -> np.ndarray:
        """Load a table of ids from 0 to ``end`` - 1 as int32 of this shape."""
        self._taken.add(name)
        return load_integers(self.gguf, name, *shape, end=end)

    def scalar(self, name: str) -> float:
        """The value of a tensor with one element; 1 if the file does not have it."""
        return float(self.array(name, 1)[0]) if self.has(name) else 1.0

    # --- linear layers -----------------------------------------------------------------------------------------

    def linear(self, name: str, rows: int, columns: int, heads: HeadRows | None = None) -> Linear:
        """Load the matrix ``name.weight`` [rows, columns] with its bias and its scale, if the file has them.

        heads: how the rows belong to heads; None: they do not.
        """
        return Linear(
            self.matrix(name + ".weight", rows, columns, heads=heads),
            self.optional(name + ".bias", rows),
            self.scalar(name + ".scale"),
        )

    def product(self, name: str, rows: int, columns: int) -> Linear:
        """Load the matrix ``name`` [rows, columns] as a linear layer without bias and scale.  If the file has them,
        :meth:`check_complete` raises an error."""
        return Linear(self.matrix(name, rows, columns))

    def linears(
        self, blk: str, names: tuple[str, ...], fused: str, rows: tuple[int, ...], columns: int, n_groups: int = 0
    ) -> list[Linear]:
        """Load several linear layers with the same input, either as separate tensors ``names``, or as the rows of one tensor
        ``fused`` in this order.

        rows: the number of rows of each layer.
        n_groups: the number of groups of heads to which the rows of each layer belong; 0: they belong to none.
        """
        heads = [HeadRows(n_groups, (n,)) if n_groups else None for n in rows]
        if not self.has(f"{blk}{fused}.weight"):
            layers = [self.linear(blk + name, n, columns, of) for name, n, of in zip(names, rows, heads, strict=True)]
            self._check_biases(blk, names, layers)
            return layers
        whole = self.weight(f"{blk}{fused}.weight", sum(rows), columns)
        scale, bias = self.scalar(f"{blk}{fused}.scale"), None
        if self.has(f"{blk}{fused}.bias"):
            bias = self.array(f"{blk}{fused}.bias", sum(rows))
        parts, first = [], 0
        for name, n, of in zip(names, rows, heads, strict=True):
            own = self.optional(f"{blk}{name}.bias", n) if bias is None else self.ops.upload(bias[first : first + n])
            part = replace(whole.slice(first, first + n), heads=of)
            parts.append(Linear(self.ops.weight(part), own, scale))
            first += n
        return parts

    def _check_biases(self, blk: str, names: tuple[str, ...], layers: list[Linear]) -> None:
        """Raise ModelError if some of the layers have a bias and others do not."""
        without = [name for name, layer in zip(names, layers, strict=True) if layer.bias is None]
        if 0 < len(without) < len(names):
            raise missing(self.gguf, f"{blk}{without[0]}.bias")

    # --- angles ------------------------------------------------------------------------------------------------

    def table(self, rope: RopeConfig | None) -> Array | None:
        """The table of rotation angles, float32 [n_ctx, 2, n_rot / 2]; None if there is no rotation."""
        return None if rope is None else self.rotary(rope).table

    def rotary(self, rope: RopeConfig) -> Rotary:
        """The rotation angles of a rotation, which are created on the first call."""
        if rope not in self._rotaries:
            factors = self._factors(rope)
            alike = self._like._rotaries.values() if self._like is not None else ()
            same = (rotary for rotary in alike if rotary.turns_as(rope, factors))
            self._rotaries[rope] = next(same, None) or Rotary(self.ops, rope, factors, self._n_ctx)
        return self._rotaries[rope]

    def _factors(self, rope: RopeConfig) -> np.ndarray | None:
        """The divisors of the frequencies, float32 [n_rot / 2], or None."""
        long = bool(rope.long_factors) and self._n_ctx > rope.long_beyond
        name = rope.long_factors if long else rope.factors
        for other in {rope.factors, rope.long_factors} - {""}:
            self.ignore(other)
        if not name:
            return None
        factors = self._padded(name, rope.n_rot // 2)
        if not np.all(np.isfinite(factors) & (factors > 0)):
            raise ModelError(f"{self.gguf.path}: {name} must be positive numbers; the file is damaged.")
        return factors

    def _padded(self, name: str, n: int) -> np.ndarray:
        """The first ``n`` elements of a small tensor, whose further elements must be 1: float32 [n]."""
        shape = self.gguf.tensors[name].shape if self.has(name) else ()
        if len(shape) != 1 or shape[0] <= n:
            return self.array(name, n)
        values = self.array(name, shape[0])
        if not np.all(values[n:] == 1.0):
            raise ModelError(f"{self.gguf.path}: {name} has {shape[0]} elements, and {n} are rotated.")
        return values[:n]

    def temperature(self, given: tuple[float, int, int] | None) -> Array | None:
        """The factors of queries by position p, 1 + s ln(1 + (p + o) // n), where ``given`` is (s, n, o): float32 [n_ctx];
        None if ``given`` is None."""
        if given is None:
            return None
        if given not in self._temperatures:
            s, n, offset = given
            factors = 1.0 + s * np.log1p((np.arange(self._n_ctx) + offset) // n)
            self._temperatures[given] = self.ops.upload(factors.astype(np.float32))
        return self._temperatures[given]

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""
        for rotary in self._rotaries.values():
            rotary.reserve(length)

    # --- completeness ------------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Raise ModelError if the file has tensors that have not been loaded, because ignoring them would give wrong
        results."""
        c = self.config
        # NVFP4 files have scales for activations that are quantized to 4 bits, which this engine does not do.
        scales = {name.removesuffix("weight") + "input_scale" for name in self._taken if name.endswith(".weight")}
        rest = sorted(set(self.gguf.tensors) - self._taken - scales)
        if rest:
            names = ", ".join(shown(name) for name in rest[:4]) + (
                f" and {len(rest) - 4} more" if len(rest) > 4 else ""
            )
            remedy = "this variant is not supported"
            if c.mtp and not c.mtp_apart and all(name.startswith(c.drafting) for name in rest):
                remedy += "; leave out the layers that draft (mtp=False)"
            raise ModelError(
                f"{self.gguf.path}: tensors that a plain {c.architecture} model does not have: {names}; {remedy}."
            )
