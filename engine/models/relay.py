"""A model whose layers are on several GPUs, one run of layers on each ("layer split"): passes go from one to the next.

The host starts a stage on each device and a copy to the next one, and waits for none of them.  The rows of a pass over a
prompt go in slices, so that the devices work at the same time::

    GPU 0:  slice 0, send | slice 1, send    | slice 2, send    | ...
    GPU 1:                | receive, slice 0 | receive, slice 1 | ...

The bits of a row do not depend on the other rows, so they do not depend on the slices.  Each device gets its work in the
order of the passes, and so do the keys and values that it stores.  The tokens of answers are chosen on the last device, by
graphs (``engine/decode/stage_graphs.py``).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from engine.arrays import Array, Batch, Role
from engine.models.config import ModelConfig
from engine.models.needs import crossing_width, told_width
from engine.models.stage import RowSlice, Stage, StageInputs
from engine.ops.crossing import Crossing
from engine.ops.executor import BackendPass, Forward
from engine.ops.operations import Ops


class Relay:
    """The stages of a model, each on a device of its own, and the ways between them.

    stages: in the order of a pass; tell: the operations of the per-layer embeddings, None if the model has none.
    """

    def __init__(
        self,
        config: ModelConfig,
        stages: Sequence[Stage],
        inputs: Mapping[Ops, StageInputs],
        tell: Forward[Array] | None,
    ) -> None:
        """inputs: what the stage of each device begins with; tell: the operations of the per-layer embeddings.  Raises
        DeviceError if memory runs out."""
        assert len(inputs) == len(stages), "a device has one stage"
        self.stages = tuple(stages)
        self.tell = tell
        self._inputs = [inputs[stage.ops] for stage in stages]
        first, last = stages[0].ops, stages[-1].ops
        row = 4 * max(each.rows for each in self._inputs)
        #: From each stage to the next one.
        self.borders = [b.ops.crossing(a.ops, row * crossing_width(config)) for a, b in pairwise(stages)]
        #: From the first device to each, for per-layer embeddings.
        self.told: list[Crossing[Array]] = []
        if tell is not None:
            self.told = [stage.ops.crossing(first, row * told_width(config)) for stage in stages]
        #: From a stage to the last device, for the residual stream before layers that a network reads; None without any.
        self.taps = [
            last.crossing(stage.ops, row * config.n_embd * len(stage.tapped))
            if stage.tapped and stage.ops is not last
            else None
            for stage in stages
        ]
        #: Where the latest passes over prompts end: as many as there are stages, and one more.
        self._ends = [last.mark() for _ in range(len(stages) + 1)]
        self._n_ended = 0

    def begin(self) -> "Course":
        """What a pass takes from stage to stage."""
        return Course(self)

    def inputs(self, i: int) -> StageInputs:
        """What stage ``i`` begins with."""
        return self._inputs[i]

    def slices(self, batch: Batch[np.ndarray]) -> list[RowSlice]:
        """A pass as the devices read it."""
        if batch.role is Role.DECODE:
            return [RowSlice(slice(0, batch.rows), batch)]
        return self.stages[-1].slices(batch)

    def ended(self) -> None:
        """Note that all of a pass over a prompt has been started."""
        self._n_ended += 1
        self._ends[self._n_ended % len(self._ends)].set()

    def wait(self) -> None:
        """Wait until the last device has ended a pass, with as many passes after it as there are stages: then the first
        device still has one, while the host prepares the next one.  Raises DeviceError if the pass has failed."""
        self._ends[(self._n_ended + 1) % len(self._ends)].wait("a pass over a prompt")


class Course:
    """What a pass takes from stage to stage: for each, call :meth:`enter`, start it, and call :meth:`leave`."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        #: Tickets of what has been sent and not received.
        self._x: tuple[Crossing[Array], int, int] | None = None
        self._told: dict[int, tuple[int, int]] = {}
        self._taps: list[tuple[int, int, int]] = []

    def tell(self, told: Array) -> None:
        """Send the per-layer embeddings, an array of the first device with float32 [n_layer, rows, n_per_layer]."""
        for i, crossing in enumerate(self._relay.told):
            self._told[i] = crossing.send([told]), told.size

    def enter(self, i: int) -> None:
        """Receive what stage ``i`` begins with."""
        inputs = self._relay.inputs(i)
        if self._x is not None:
            crossing, ticket, rows = self._x
            crossing.receive(ticket, [inputs.x[slice(rows)]])
            self._x = None
        if i in self._told:
            ticket, size = self._told[i]
            assert inputs.told is not None
            self._relay.told[i].receive(ticket, [inputs.told[slice(size)]])
            del self._told[i]
        if i + 1 < len(self._relay.stages):
            return
        while self._taps:
            number, ticket, rows = self._taps[-1]
            way = self._relay.taps[number]
            assert way is not None
            layers = self._relay.stages[number].tapped
            way.receive(ticket, [inputs.taps[il][slice(rows)] for il in layers])
            self._taps.pop()

    def leave(self, i: int, x: Array | None) -> None:
        """Send the result x of stage ``i``, float32 [rows, width], unless it is the last stage."""
        if i + 1 == len(self._relay.stages):
            return
        assert x is not None
        rows = x.shape[0]
        way = self._relay.borders[i]
        self._x = way, way.send([x]), rows
        if (tapped := self._relay.taps[i]) is not None:
            inputs, layers = self._relay.inputs(i), self._relay.stages[i].tapped
            self._taps.append((i, tapped.send([inputs.taps[il][slice(rows)] for il in layers]), rows))

    def cancel(self) -> None:
        """Give up what has been sent and not received."""
        if self._x is not None:
            crossing, ticket, _ = self._x
            crossing.forget(ticket)
        for i, (ticket, _) in self._told.items():
            self._relay.told[i].forget(ticket)
        for number, ticket, _ in self._taps:
            way = self._relay.taps[number]
            assert way is not None
            way.forget(ticket)
        self._x = None
        self._told.clear()
        self._taps.clear()


class RelayedPass:
    """A pass through the stages of a relay (``engine.ops.executor.SplitPass``).  A piece of a pass over a prompt is a stage
    for a slice of its rows; a decode pass is one piece."""

    def __init__(self, relay: Relay, batch: Batch[np.ndarray], n_logits: int) -> None:
        """n_logits: the number of last rows whose logits are wanted."""
        self._relay, self._most = relay, relay.stages[-1].prompt_rows
        self._is_prompt = batch.role is Role.PREFILL
        slices = relay.slices(batch)
        self._end = batch.rows - n_logits
        self._left = deque((part, i) for part in slices for i in range(len(relay.stages)))
        self.pieces = len(self._left) if self._is_prompt else 1
        self._course = relay.begin()
        #: The logits of slices, and the latest pass of the last stage whose logits are wanted.
        self._found: list[np.ndarray] = []
        self._wanted: BackendPass[Array] | None = None

    def advance(self, count: int) -> int:
        """Start the next ``count`` pieces; returns how many are left."""
        try:
            for _ in range(min(count, len(self._left)) if self._is_prompt else len(self._left)):
                self._start(*self._left.popleft())
        except BaseException:
            self.cancel()
            raise
        return len(self._left)

    def _start(self, part: RowSlice, i: int) -> None:
        """Start stage ``i`` for a slice of the rows."""
        relay, (rows, batch) = self._relay, part
        stage = relay.stages[i]
        if i == 0 and relay.tell is not None:
            told = stage.ops.split(relay.tell, batch, 0 if self._is_prompt else batch.rows, self._most, True)
            told.advance(told.pieces)
            assert told.output is not None
            self._course.tell(told.output)
        self._course.enter(i)
        if stage.is_last:
            self._keep()
        n_logits = 0 if self._is_prompt else batch.rows
        if stage.is_last:
            n_logits = min(batch.rows, max(0, rows.stop - self._end))
        compute = stage.compute_observed if batch.observed else stage.compute
        passing = stage.ops.split(compute, batch, n_logits, self._most, True)
        passing.advance(passing.pieces)
        if stage.is_last and n_logits:
            self._wanted = passing
        self._course.leave(i, passing.output)
        if self._is_prompt and not self._left:
            relay.ended()

    def _keep(self) -> None:
        """Wait for the logits of the latest slice, if any are wanted: the next one overwrites them."""
        if self._wanted is not None:
            logits = self._wanted.logits(wait=False)
            assert logits is not None
            self._found.append(logits)
            self._wanted = None

    def is_running(self) -> bool:
        """False: the next pass does not depend on it."""
        return False

    def complete(self) -> np.ndarray | None:
        """Run the pass and return the logits of its last rows, float32 [n_logits, n_vocab]; None if none are wanted."""
        self.advance(self.pieces)
        return self.logits(wait=True)

    def logits(self, wait: bool) -> np.ndarray | None:
        """The logits of the last rows, float32 [n_logits, n_vocab]; None if none are wanted.  wait: whether to wait for
        earlier passes if it has no logits."""
        self._keep()
        found = self._found
        if not found and wait and self._is_prompt:
            self._relay.wait()
        return np.concatenate(found) if len(found) > 1 else (found[0] if found else None)

    def cancel(self) -> None:
        """Start no further piece."""
        self._left.clear()
        self._course.cancel()
