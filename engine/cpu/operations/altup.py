"""The operations of alternating updates, and of sparse gates, on the CPU."""

import numpy as np

from engine.cpu import altup, sparsify
from engine.cpu.operations.shared import SharedOperations
from engine.limits import STREAMS

f32 = np.float32


class AltUpOperations(SharedOperations):
    """What Gemma 3n needs besides the operations of other models."""

    def columns(self, x: np.ndarray, begin: int, n: int) -> np.ndarray:
        out = self.empty((x.shape[0], n))
        self.do(altup.columns, x, begin, out, items=x.shape[0], ns=0.1 * n)
        return out

    def altup_enter(self, x: np.ndarray, a: np.ndarray) -> np.ndarray:
        rows, n = x.shape
        out = self.empty((rows, (STREAMS + 1) * n))
        self.do(altup.altup_enter, x, a, out, items=rows, ns=100.0 + 2.0 * n)
        return out

    def altup_predict(self, x: np.ndarray, m: np.ndarray, coef: np.ndarray) -> np.ndarray:
        out = self.empty(x.shape)
        self.do(altup.altup_predict, x, m, coef, out, items=x.shape[0], ns=100.0 + 0.5 * x.shape[1])
        return out

    def altup_active(
        self, p: np.ndarray, y: np.ndarray, m: np.ndarray, coef: np.ndarray, scale: np.ndarray
    ) -> np.ndarray:
        out = self.empty(y.shape)
        self.do(altup.altup_active, p, y, m, coef, scale, out, items=y.shape[0], ns=100.0 + 0.3 * y.shape[1])
        return out

    def altup_correct(
        self, p: np.ndarray, y: np.ndarray, m: np.ndarray, coef: np.ndarray, first: np.ndarray
    ) -> np.ndarray:
        out = self.empty(p.shape)
        self.do(altup.altup_correct, p, y, m, coef, first, out, items=p.shape[0], ns=100.0 + 0.5 * p.shape[1])
        return out

    def altup_leave(self, x: np.ndarray, a: np.ndarray) -> np.ndarray:
        rows, n = x.shape[0], x.shape[1] // (STREAMS + 1)
        out = self.empty((rows, n))
        self.do(altup.altup_leave, x, a, out, items=rows, ns=100.0 + 2.0 * n)
        return out

    def sparsify(self, x: np.ndarray, multiplier: float) -> np.ndarray:
        y, n = self.empty(x.shape), x.shape[1]
        self.do(sparsify.sparsify, x, f32(multiplier), y, items=x.shape[0], ns=100.0 + 1.0 * n)
        return y
