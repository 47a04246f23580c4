"""Decoding on the device: a captured graph of a forward pass and the choice of its token, launched again and again.

The graph reads its token and position from device memory and leaves the next ones there, so a step needs nothing from the
host, which only launches steps ahead of time and reads the tokens as they come.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cuda import sample
from engine.cuda.device import Graph
from engine.errors import DeviceError
from engine.sampler import Sampler

if TYPE_CHECKING:
    from engine.cuda.backend import Backend

AHEAD = 4
"""Steps that are launched before the token of the first of them is read."""

POLL_SECONDS = 5e-5
"""How long the host sleeps when a token is not there yet: less than a step, and enough steps are under way."""


class Decoder:
    """Steps of one model on one GPU."""

    def __init__(self, ops: "Backend", model: Any) -> None:
        self._ops = ops
        self._model = model
        self._sampler = sample.DeviceSampler(ops.device, model.config.n_vocab, model.cache.n_ctx)
        self._history = ops.zeros((model.cache.n_ctx,), np.int32)
        self._graphs: dict[tuple[bool, bool], Graph] = {}

    def tokens(self, sampler: Sampler, history: Sequence[int], count: int) -> Iterator[int]:
        """``count`` tokens that follow ``history``, each chosen as ``sampler`` does.

        The cache holds all of the history but its last token.  Positions of steps that were launched and not asked for
        remain claimed; whoever ends this early has the cache truncated.
        """
        device, first = self._ops.device, len(history) - 1
        device.write(self._ops.tokens.address, np.array([history[-1]], np.int32))
        device.write(self._ops.positions.address, np.array([first], np.int32))
        device.write(self._history.address, np.asarray(history, np.int32))
        self._sampler.begin(sampler)
        graph = self._graph(sampler.params.greedy, sample.edits(sampler.params))
        launched = 0
        try:
            for taken in range(count):
                while launched < min(count, taken + AHEAD):
                    self._model.prepare(first + launched, 1)
                    graph.launch()
                    launched += 1
                while not self._sampler.ready():
                    # is_idle raises where a kernel has failed.
                    if device.is_idle() and not self._sampler.ready():
                        raise DeviceError(
                            f"{device.name} ended its work and left no token; this is a defect of this program"
                        )
                    time.sleep(POLL_SECONDS)
                yield self._sampler.take()
        finally:
            device.synchronize()

    def _graph(self, greedy: bool, with_edit: bool) -> Graph:
        key = (greedy, with_edit)
        if key not in self._graphs:
            ops = self._ops
            plan = ops.plan(self._model.compute, 1, 1)
            assert plan.result is not None
            addresses = (plan.result.address, ops.tokens.address, ops.positions.address, self._history.address)
            for kernel in self._sampler.kernels(greedy, with_edit):
                ops.device.load(kernel)
            with ops.device.capture() as graph:
                ops.start(plan)
                self._sampler.launch(*addresses, greedy, with_edit)
            self._graphs[key] = graph
        return self._graphs[key]
