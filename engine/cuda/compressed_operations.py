"""The operations of hyper-connections and of attention over compressed rows, which no GPU computes yet."""

from typing import NoReturn

from engine.arrays import Pass
from engine.cache.compressed import Blocks, CompressedLayer
from engine.cuda.runtime.tensor import DeviceWeight, Tensor
from engine.errors import ModelError
from engine.models.compressor import Compressor


def _refuse() -> NoReturn:
    raise ModelError("models with hyper-connections run on the CPU only; choose it with --device cpu.")


class CompressedOperations:
    """Refuses models that need these operations."""

    def grouped_matmul(self, x: Tensor, weight: DeviceWeight, n_group: int) -> Tensor:
        """The parts of each row of x [rows, n_group * K] times the matrices of their groups, stacked as [n_group * R, K]."""
        _refuse()

    def repeat(self, x: Tensor, n: int) -> Tensor:
        """Each row of x [rows, width], n times."""
        _refuse()

    def stream_weights(self, m: Tensor, scale: Tensor, base: Tensor, epsilon: float, rounds: int) -> Tensor:
        """The weights of hyper-connections (Xie et al."""
        _refuse()

    def collapse(self, x: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of streams."""
        _refuse()

    def expand(self, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        """The streams after a sub-layer, x'_d = b_d y + sum_s C_sd x_s with b and C the weights from the fifth on."""
        _refuse()

    def rotate_tail(
        self,
        x: Tensor,
        n_head: int,
        batch: Pass[Tensor],
        table: Tensor,
        norm: Tensor | None = None,
        eps: float = 0.0,
        inverse: bool = False,
    ) -> Tensor:
        """The heads of x [rows, n_head * d], normalized if there are weights ``norm`` [d], their last elements rotated by
        position in pairs of neighbours, or back if ``inverse``."""
        _refuse()

    def keep_latents(self, x: Tensor, memory: CompressedLayer[Tensor], batch: Pass[Tensor]) -> None:
        """Store latents x [rows, d] at the rows' positions."""
        _refuse()

    def compress(
        self,
        law: Compressor[Tensor],
        values: Tensor,
        scores: Tensor,
        blocks: Blocks[Tensor],
        batch: Pass[Tensor],
        table: Tensor,
        transposed: bool = False,
    ) -> None:
        """Store the compressed rows of all blocks that end in the pass, and what later rows are made of."""
        _refuse()

    def choose_rows(
        self,
        q: Tensor,
        weights: Tensor,
        factor: float,
        ratio: int,
        top_k: int,
        keys: Blocks[Tensor],
        batch: Pass[Tensor],
    ) -> Tensor:
        """The ``top_k`` compressed rows of each row with the largest sums of weights * factor * relu(q ."""
        _refuse()

    def attend_compressed(
        self,
        q: Tensor,
        memory: CompressedLayer[Tensor],
        batch: Pass[Tensor],
        scale: float,
        sinks: Tensor,
        ratio: int,
        chosen: Tensor | None,
    ) -> Tensor:
        """Attend q [rows, n_head * d] over the latents of the window and the compressed rows of blocks that end before or at
        the row's position, or of these the ``chosen`` ones."""
        _refuse()
