"""Mixtures of experts."""

import numpy as np

from engine.cpu.operations.products import Pairs, ProductOperations
from engine.cpu.products import experts as mixture
from engine.cpu.products import router
from engine.cpu.products.repack import Matrix
from engine.ops.experts import GATINGS, Experts, Routing, present

f32 = np.float32

_NOTHING = np.zeros((0, 0), f32)
_NO_WEIGHTS = np.zeros(0, f32)
_NO_IDS, _NO_TABLE = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)


class ExpertOperations(ProductOperations):
    """The choice of experts, their products, and the weighted sum."""

    def experts(
        self,
        experts: Experts[np.ndarray, Matrix],
        residual: np.ndarray | None,
        x: np.ndarray,
        router_x: np.ndarray | None = None,
        tokens: np.ndarray | None = None,
    ) -> np.ndarray:
        rows, n_used, n_expert = x.shape[0], experts.n_used, experts.n_expert
        (logits,) = self.matmul(x if router_x is None else router_x, experts.router)
        ids, weights = self.empty((rows, n_used), np.int32), self.empty((rows, n_used))
        routing, ns = experts.routing, 1.0 * n_used * n_expert
        if routing == Routing():
            self.do(mixture.route, logits, n_expert, ids, weights, items=rows, ns=ns)
        else:
            gating, numbers = GATINGS.index(routing.gating), (f32(routing.floor), f32(routing.weight_scale))
            biases = tuple(_NO_WEIGHTS if b is None else b for b in (experts.router_bias, experts.selection_bias))
            given: tuple[object, ...] = logits, n_expert, gating, *biases, routing.normalized, *numbers
            groups, table = (routing.n_group, routing.n_group_used, routing.group_best), (_NO_TABLE, _NO_IDS)
            if experts.given is not None:
                assert tokens is not None, "experts that a table gives need the tokens"
                table = experts.given, tokens
            self.do(router.route_by, *given, *groups, *table, ids, weights, items=rows, ns=ns + 10.0 * n_expert)
        pairs = self._pairs(ids, n_expert)
        if experts.scales is not None:
            self.do(mixture.scale_weights, ids, experts.scales, weights, items=rows, ns=2.0 * n_used, joined=True)
        activation = experts.activation
        stacks: list[Matrix] = present(experts.gate, experts.up)
        *gate, up = self._expert_products(x, pairs, *stacks)
        if experts.gate is not None:
            self._finish(gate[0], ids, experts.gate_scale, experts.gate_bias)
        self._finish(up, ids, experts.up_scale, experts.up_bias)
        act = self.activate(activation, gate[0] if gate else None, up)
        (y,) = self._expert_products(act, pairs, experts.down)
        self._finish(y, ids, experts.down_scale, experts.down_bias)
        shared = _NOTHING
        if experts.shared is not None:
            others: list[Matrix] = present(*experts.shared[:2])
            *gate, up = self.matmul(x, *others)
            (shared,) = self.matmul(self.activate(activation, gate[0] if gate else None, up), experts.shared[2])
        out = self.empty(x.shape)
        last = logits if experts.shared_gated else _NOTHING
        self.do(
            *(mixture.join, _NOTHING if residual is None else residual, y, weights, shared, last, out),
            items=rows,
            ns=0.2 * (n_used + 2) * x.shape[1],
        )
        return out

    def _finish(self, y: np.ndarray, ids: np.ndarray, scales: np.ndarray | None, biases: np.ndarray | None) -> None:
        """y * scale + bias of the pair's expert, in place: y [pairs, n]."""
        if scales is not None or biases is not None:
            given = y, ids, _NO_WEIGHTS if scales is None else scales, _NOTHING if biases is None else biases
            self.do(mixture.finish_products, *given, items=y.shape[0], ns=0.1 * y.shape[1])

    def _pairs(self, ids: np.ndarray, n_expert: int) -> Pairs:
        """The pairs of rows and experts, grouped by expert."""
        most = min(n_expert, ids.size)
        pairs = Pairs(
            self.empty((ids.size,), np.int32),
            self.empty((most,), np.int32),
            self.empty((most + 1,), np.int32),
            self.empty((1,), np.int32),
        )
        self.do(mixture.group, ids, n_expert, *pairs, items=1, ns=2.0 * (n_expert + ids.size))
        return pairs
