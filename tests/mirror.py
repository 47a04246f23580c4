"""The operations of the CPU on matrices as a file has them, for comparisons with those of a GPU."""

from dataclasses import replace
from typing import Any

import numpy as np

from engine.cpu.backend import Backend
from engine.cpu.products.repack import Matrix
from engine.ops.experts import Experts
from engine.ops.weight import Weight


class Mirror(Backend):
    """A CPU backend that converts matrices when an operation uses them, not when they are loaded."""

    def embed(self, table: Matrix, tokens: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """Rows of the table, times scale."""
        return super().embed(self._converted(table), tokens, scale)

    def _products(self, x: np.ndarray, residual: np.ndarray, *weights: Matrix) -> list[np.ndarray]:
        return super()._products(x, residual, *(self._converted(weight) for weight in weights))

    def experts(
        self,
        experts: Experts[np.ndarray, Matrix],
        residual: np.ndarray | None,
        x: np.ndarray,
        router_x: np.ndarray | None = None,
        tokens: np.ndarray | None = None,
    ) -> np.ndarray:
        """The mixture of experts of x."""
        return super().experts(self._with_stacks(experts), residual, x, router_x, tokens)

    def sum_experts(
        self, experts: Experts[np.ndarray, Matrix], x: np.ndarray, ids: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        """The weighted sum of the outputs of given experts."""
        return super().sum_experts(self._with_stacks(experts), x, ids, weights)

    def _with_stacks(self, experts: Experts[np.ndarray, Matrix]) -> Experts[np.ndarray, Matrix]:
        names = ("gate", "up", "down") if experts.gate is not None else ("up", "down")
        stacks = {name: self._converted(getattr(experts, name), experts.n_expert) for name in names}
        return replace(experts, **stacks)  # type: ignore[arg-type]

    def _converted(self, weight: Any, stack: int = 1) -> Matrix:
        return self.weight(replace(weight, stack=stack)) if isinstance(weight, Weight) else weight
