"""The operations of alternating updates, and of sparse gates, on a GPU.

Shapes are described in ``engine/ops/arithmetic.py``; the recording in ``engine/cuda/backend.py``.
"""

from engine.cuda import altup, sparsify
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import DeviceWeight, Tensor
from engine.cuda.runtime.values import Deferred
from engine.ops.arithmetic import Arithmetic


class AltUpOperations(Arithmetic[Tensor, Tensor | Deferred, DeviceWeight]):
    """What Gemma 3n needs besides the operations of other models."""

    recorder: Recorder

    def columns(self, x: Tensor, begin: int, n: int) -> Tensor:
        rows, width = x.shape
        out = self.recorder.empty((rows, n))
        self.recorder.launch(altup.columns(), (-(-n // 256), rows), 256, (x, width, begin, n, out), result=out)
        return out

    def altup_enter(self, x: Tensor, a: Tensor) -> Tensor:
        rows, n = x.shape
        out = self.recorder.empty((rows, altup.WIDTH * n))
        self.recorder.launch(altup.altup_enter(), (1, rows), 256, (x, a, n, out), result=out)
        return out

    def altup_predict(self, x: Tensor, m: Tensor, coef: Tensor) -> Tensor:
        rows, n = x.shape[0], x.shape[1] // altup.WIDTH
        out = self.recorder.empty(x.shape)
        self.recorder.launch(altup.altup_predict(), (-(-n // 256), rows), 256, (x, m, coef, n, out), result=out)
        return out

    def altup_active(self, p: Tensor, y: Tensor, m: Tensor, coef: Tensor, scale: Tensor) -> Tensor:
        (rows, n), out = y.shape, self.recorder.empty(y.shape)
        arguments = (p, y, m, coef, scale, n, out)
        self.recorder.launch(altup.altup_active(), (-(-n // 256), rows), 256, arguments, result=out)
        return out

    def altup_correct(self, p: Tensor, y: Tensor, m: Tensor, coef: Tensor, first: Tensor) -> Tensor:
        (rows, n), out = y.shape, self.recorder.empty(p.shape)
        arguments = (p, y, m, coef, first, n, out)
        self.recorder.launch(altup.altup_correct(), (-(-n // 256), rows), 256, arguments, result=out)
        return out

    def altup_leave(self, x: Tensor, a: Tensor) -> Tensor:
        rows, n = x.shape[0], x.shape[1] // altup.WIDTH
        out = self.recorder.empty((rows, n))
        self.recorder.launch(altup.altup_leave(), (1, rows), 256, (x, a, n, out), result=out)
        return out

    def sparsify(self, x: Tensor, multiplier: float) -> Tensor:
        (rows, n), out = x.shape, self.recorder.empty(x.shape)
        self.recorder.launch(sparsify.sparsify(), (1, rows), 256, (x, multiplier, n, out), result=out)
        return out
