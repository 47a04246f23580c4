"""Mixtures of experts."""

import numpy as np

from engine.cpu.operations.products import Pairs, ProductOperations
from engine.cpu.products import experts as mixture
from engine.cpu.products import router
from engine.cpu.products.repack import Matrix, Records
from engine.ops.experts import GATINGS, ChosenExperts, Experts, Routing, present

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
        (logits,) = self.matmul(x if router_x is None else router_x, experts.router)
        ids, weights = self._route(experts, logits, tokens)
        pairs = self._pairs(ids, experts.n_expert)
        # Independent of the grouping of pairs.
        self._scale(experts, ids, weights, joined=True)
        (y, weights), shared = self._outputs(experts, x, ids, weights, pairs), _NOTHING
        if experts.shared is not None:
            others: list[Matrix] = present(*experts.shared[:2])
            *gate, up = self.matmul(x, *others)
            act = self.activate(experts.common, gate[0] if gate else None, up)
            (shared,) = self.matmul(act, experts.shared[2])
        last = logits if experts.shared_gated else _NOTHING
        return self._join(_NOTHING if residual is None else residual, y, weights, shared, last)

    def choose_experts(
        self, experts: Experts[np.ndarray, Matrix], x: np.ndarray, tokens: np.ndarray | None = None
    ) -> ChosenExperts[np.ndarray]:
        (logits,) = self.matmul(x, experts.router)
        ids, weights = self._route(experts, logits, tokens)
        self._scale(experts, ids, weights, joined=False)
        return ChosenExperts(ids, weights, logits)

    def sum_experts(
        self, experts: Experts[np.ndarray, Matrix], x: np.ndarray, ids: np.ndarray, weights: np.ndarray
    ) -> np.ndarray:
        y, weights = self._outputs(experts, x, ids, weights, self._pairs(ids, experts.n_expert))
        return self._join(_NOTHING, y, weights, _NOTHING, _NOTHING)

    def activate_experts(self, experts: Experts[np.ndarray, Matrix], x: np.ndarray, ids: np.ndarray) -> np.ndarray:
        gate, up = self._inputs(experts, x, ids, self._pairs(ids, experts.n_expert))
        return self.activate(experts.activation, gate, up)

    def join_experts(
        self,
        experts: Experts[np.ndarray, Matrix],
        activations: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray,
    ) -> np.ndarray:
        (y,) = self._expert_products(activations, self._pairs(ids, experts.n_expert), experts.down)
        self._finish(y, ids, experts.down_scale, experts.down_bias)
        return self._join(_NOTHING, y, weights, _NOTHING, _NOTHING)

    def _inputs(
        self, experts: Experts[np.ndarray, Matrix], x: np.ndarray, ids: np.ndarray, pairs: Pairs
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """The products with gate, if there is one, and with up of the expert of each pair, float32 [pairs, n_ff]."""
        stacks: list[Matrix] = present(experts.gate, experts.up)
        *gate, up = self._expert_products(x, pairs, *stacks)
        if experts.gate is not None:
            self._finish(gate[0], ids, experts.gate_scale, experts.gate_bias)
        self._finish(up, ids, experts.up_scale, experts.up_bias)
        return gate[0] if gate else None, up

    def _route(
        self, experts: Experts[np.ndarray, Matrix], logits: np.ndarray, tokens: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The experts of each row, int32 [rows, n_used], and their weights without ``experts.scales``, float32."""
        rows, n_used, n_expert = logits.shape[0], experts.n_used, experts.n_expert
        ids, weights = self.empty((rows, n_used), np.int32), self.empty((rows, n_used))
        routing, ns = experts.routing, 1.0 * n_used * n_expert
        if routing == Routing():
            self.do(mixture.route, logits, n_expert, ids, weights, items=rows, ns=ns)
            return ids, weights
        gating, numbers = GATINGS.index(routing.gating), (f32(routing.floor), f32(routing.weight_scale))
        biases = tuple(_NO_WEIGHTS if b is None else b for b in (experts.router_bias, experts.selection_bias))
        given: tuple[object, ...] = logits, n_expert, gating, *biases, routing.normalized, *numbers
        groups, table = (routing.n_group, routing.n_group_used, routing.group_best), (_NO_TABLE, _NO_IDS)
        if experts.given is not None:
            assert tokens is not None, "experts that a table gives need the tokens"
            table = experts.given, tokens
        self.do(router.route_by, *given, *groups, *table, ids, weights, items=rows, ns=ns + 10.0 * n_expert)
        return ids, weights

    def _scale(self, experts: Experts[np.ndarray, Matrix], ids: np.ndarray, weights: np.ndarray, joined: bool) -> None:
        """Multiply weights by those of their experts; joined: whether the previous operation computes neither of them."""
        if experts.scales is not None:
            ns = 2.0 * experts.n_used
            self.do(mixture.scale_weights, ids, experts.scales, weights, items=ids.shape[0], ns=ns, joined=joined)

    def _outputs(
        self,
        experts: Experts[np.ndarray, Matrix],
        x: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray,
        pairs: Pairs,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The output of the expert of each pair, float32 [pairs, n_embd], and the weights of the outputs, float32 [rows,
        n_used]."""
        gate, up = self._inputs(experts, x, ids, pairs)
        if experts.weighs_inputs:
            ones, ns = self.empty(weights.shape), 0.2 * up.shape[1]
            given = _NOTHING if gate is None else gate, up, weights, ones
            self.do(mixture.weigh_products, *given, items=up.shape[0], ns=ns)
            weights = ones
        quantized = None
        if isinstance(experts.down, Records):
            # One operation, because 16 threads wait for each other after each.
            unit = experts.down.format.unit
            act, units = self._quantize_activated(experts.activation, up if gate is None else gate, up, unit)
            quantized = {unit: units}
        else:
            act = self.activate(experts.activation, gate, up)
        (y,) = self._expert_products(act, pairs, experts.down, quantized=quantized)
        self._finish(y, ids, experts.down_scale, experts.down_bias)
        return y, weights

    def _join(
        self, residual: np.ndarray, y: np.ndarray, weights: np.ndarray, shared: np.ndarray, last: np.ndarray
    ) -> np.ndarray:
        (rows, n_used), n = weights.shape, y.shape[1]
        out = self.empty((rows, n))
        items, ns = rows * -(-n // mixture.RUN), 0.4 * (n_used + 2) * mixture.RUN
        self.do(mixture.join, residual, y, weights, shared, last, out, items=items, ns=ns)
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
