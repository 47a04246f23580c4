"""Columns of several GPUs brought together by packets (``engine/cuda/gather.py``), while a pass is recorded.

Packets have two places, which exchanges use in turn.  An owner gives into a place for the second time only after it has taken
the packets of the exchange between, and those come from an owner that has taken the ones before.

If the owners are different GPUs, their kernels wait for each other: an exchange is a single launch at each owner, without
events.  Whether that works is tried when the group is made, by a graph with as many exchanges as a long pass.  Otherwise
(several owners on one GPU, a simulated GPU, or a trial that has failed) every owner gives in a launch of its own, and events
order the launches, so that packets have come before a kernel loads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.arrays import Role
from engine.cuda import gather
from engine.cuda.products import quantize
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.plans import Plans
from engine.cuda.runtime.recorder import Int8, Recorder
from engine.cuda.runtime.tensor import Argument, Tensor
from engine.cuda.runtime.values import Deferred, Gated, Normalized, plain
from engine.errors import DeviceError
from engine.shares import STEP, Cut, even_cut

WHAT = "columns that GPUs exchange"

TRIAL = 512
"""Exchanges of a trial."""

TRIAL_POLLS = 1 << 18
"""``gather.POLLS`` of a trial."""


@dataclass
class _Exchange:
    """One exchange of a pass, or several if its rows are used more than once: their numbers."""

    cut: Cut
    numbers: list[int]


class _Columns(Deferred):
    """All columns of an exchange at one owner."""

    inputs = ()

    def __init__(self, of: "PacketGathering", exchange: _Exchange, owner: int, part: Tensor | Deferred) -> None:
        self._of, self._exchange, self._owner = of, exchange, owner
        self._part = part
        self._uses = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._part.shape[0], self._exchange.cut.size

    def _given(self) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
        """Arguments of a kernel that gives and takes: ``gather.PLACES`` and ``gather.PACKETS``."""
        given = self._of.arguments(self._exchange, self._owner, self._uses)
        self._uses += 1
        return given

    @property
    def _peers(self) -> int:
        return self._of.n_owners - 1


class _Rows(_Columns):
    """The rows themselves."""

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launch that stores the rows."""
        part = plain(recorder, self._part)
        places, packets = self._given()
        rows, columns = self.shape
        grid = -(-columns // quantize.RUN), rows
        recorder.launch(gather.gather(self._peers), grid, quantize.RUN, (part, *places, *packets, out), result=out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The rows as int8.  An activation of the own columns is computed by the same launch."""
        part, kind, numbers = self._part, "plain", (0.0, 0.0, 0.0, 0.0)
        if isinstance(part, Gated):
            kind, numbers = part.activation.kind, part.activation.numbers
            gate, up = part.gate or part.up, part.up
        else:
            gate = up = plain(recorder, part)
        to = recorder.int8(unit, *self.shape, layout=layout)
        places, packets = self._given()
        kernel = gather.gather_quantize(unit, kind, self._peers, layout)
        rows, columns = self.shape
        grid = rows, -(-columns // quantize.RUN)
        arguments = (gate, up, *places, *numbers, *packets, *to)
        recorder.launch(kernel, grid, quantize.RUN, arguments, **to.outputs())
        return to


class _NormalizedRows(_Columns):
    """rms_norm of the rows."""

    def __init__(self, rows: _Rows, weight: Tensor, eps: float) -> None:
        super().__init__(rows._of, rows._exchange, rows._owner, rows._part)
        self._rows, self._weight, self._eps = rows, weight, eps

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launches that compute the value as float32."""
        Normalized(self._rows.plain(recorder), self._weight, self._eps).write(recorder, out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The value as int8."""
        part, (rows, columns) = plain(recorder, self._part), self.shape
        to = recorder.int8(unit, rows, columns, layout=layout)
        places, packets = self._given()
        kernel = gather.gather_norm_quantize(unit, columns, self._peers, layout)
        grid = -(-columns // quantize.RUN), rows
        arguments = (part, self._weight, self._eps, *places, *packets, *to)
        recorder.launch(kernel, grid, quantize.RUN, arguments, **to.outputs())
        return to


class PacketGathering:
    """The exchanges of owners that access each other's memory (``engine.ops.gathering.Gathering``).

    waits: whether kernels of an owner wait for those of others.
    """

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        """recorders: those of the owners, at most ``gather.PEERS + 1``.  Raises DeviceError if memory runs out."""
        self.n_owners = len(recorders)
        self._recorders = tuple(recorders)
        devices = [recorder.device for recorder in recorders]
        self._most = gather.BLOCKS * min(device.multiprocessors for device in devices)
        #: Bytes of the packets of one of the two places.
        self._size = 8 * self._most * quantize.RUN
        self._packets = [device.allocate(2 * self._size, WHAT) for device in devices]
        self._states = [device.allocate(4, WHAT) for device in devices]
        # One for all, since several of them may wait in vain for the same reason.
        self._alarm = devices[0].alarm(
            f"{devices[0].name} has waited too long for another GPU; run again, and if it persists, give each GPU some of "
            'the layers (split_mode="layer").'
        )
        self._polls = gather.POLLS
        #: The number of exchanges of the pass, and whether its packets are cleared.
        self._latest, self._is_open = 0, False
        self.waits = all(one is other or one.runs_beside(other) for one in devices for other in devices)
        self.waits = self.waits and len(set(devices)) == len(devices) and self._works()

    # --- a pass ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._latest, self._is_open = 0, False

    def takes(self, rows: int, cut: Cut) -> bool:
        if self._recorders[0].role is not Role.DECODE or rows > NARROW_ROWS or cut.period is None:
            return False
        return rows * -(-cut.size // quantize.RUN) <= self._most

    def arrays(self, parts: Sequence[Any], cut: Cut) -> list[Tensor]:
        return [rows.plain(recorder) for recorder, rows in zip(self._recorders, self.inputs(parts, cut), strict=True)]

    def inputs(self, parts: Sequence[Any], cut: Cut) -> list[_Rows]:
        self._open()
        exchange = _Exchange(cut, [])
        if not self.waits:
            parts = [plain(recorder, part) for recorder, part in zip(self._recorders, parts, strict=True)]
            self._give(exchange, parts)
        return [_Rows(self, exchange, i, part) for i, part in enumerate(parts)]

    def normalized(
        self, parts: Sequence[Any], cut: Cut, weights: Sequence[Tensor], eps: float
    ) -> list[_NormalizedRows]:
        rows = self.inputs(parts, cut)
        return [_NormalizedRows(own, weight, eps) for own, weight in zip(rows, weights, strict=True)]

    # --- launches --------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Clear the packets before the first exchange of a pass."""
        if self._is_open:
            return
        self._is_open = True
        n = self._size // 2
        for recorder, packets, state in zip(self._recorders, self._packets, self._states, strict=True):
            given = packets.address, n, state.address
            recorder.launch(gather.clear_packets(), (-(-n // (4 * quantize.RUN)),), quantize.RUN, given)
        self._recorders[0].meet()

    def _give(self, exchange: _Exchange, parts: Sequence[Tensor]) -> None:
        """Let every owner give in a launch of its own, and then wait for all of them."""
        exchange.numbers.append(self._next())
        rows, columns = parts[0].shape[0], exchange.cut.size
        grid = -(-columns // quantize.RUN), rows
        for i, (recorder, part) in enumerate(zip(self._recorders, parts, strict=True)):
            places, packets = self.arguments(exchange, i, 0, polls=0)
            recorder.launch(gather.gather(self.n_owners - 1), grid, quantize.RUN, (part, *places, *packets, 0))
        self._recorders[0].meet()

    def _next(self) -> int:
        self._latest += 1
        return self._latest

    def arguments(
        self, exchange: _Exchange, owner: int, use: int, polls: int | None = None
    ) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
        """Arguments of the launch with which an owner gives and takes, ``gather.PLACES`` and ``gather.PACKETS``.

        use: the number of earlier launches of this owner for the same exchange; polls: None: those that kernels need.
        """
        if not self.waits:
            assert exchange.numbers[0] >= self._latest - 1, "other exchanges have used the packets"
            number = exchange.numbers[0]
        else:
            if use == len(exchange.numbers):
                exchange.numbers.append(self._next())
            number = exchange.numbers[use]
        if polls is None:
            polls = self._polls if self.waits else 1
        cut, at = exchange.cut, self._size * (number & 1)
        assert cut.period is not None
        places = cut.size, cut.period, *cut.runs[owner][0], number, polls
        peers = [packets.address + at for i, packets in enumerate(self._packets) if i != owner]
        spare = [0] * (gather.PEERS - len(peers))
        here = self._packets[owner].address + at
        return places, (here, *peers, *spare, self._states[owner].address, self._alarm)

    # --- a trial ---------------------------------------------------------------------------------------------------

    def _works(self) -> bool:
        """Whether kernels of all owners run at the same time in a graph, and what they give each other comes."""
        lead, others = self._recorders[0], self._recorders[1:]
        columns = STEP * self.n_owners
        cut = even_cut(columns, self.n_owners)
        assert cut is not None
        values = np.arange(1, columns + 1, dtype=np.float32).reshape(1, columns)
        parts, self.waits, self._polls = [], True, TRIAL_POLLS
        for recorder, ((first, last),) in zip(self._recorders, cut.runs, strict=True):
            own = np.ascontiguousarray(values[:, first:last])
            memory = recorder.device.allocate(own.nbytes, WHAT)
            recorder.device.write(memory.address, own)
            parts.append(Tensor(memory.address, own.shape, own.dtype, memory))

        def forward() -> Tensor:
            self.begin()
            with lead.together(others):
                for _ in range(TRIAL):
                    found = self.arrays(parts, cut)
            results.extend(found)
            return found[0]

        results: list[Tensor] = []
        plan = lead.record(forward)
        plans = Plans(lead.device, lead)
        try:
            plans.capture(plan)
            plans.start_whole(plan)
            for recorder in self._recorders:
                recorder.device.synchronize()
            pairs = zip(self._recorders, results, strict=True)
            read = [recorder.device.read(result.address, result.shape, result.dtype) for recorder, result in pairs]
            return all(np.array_equal(array, values) for array in read)
        except DeviceError:
            return False
        finally:
            self._polls = gather.POLLS
