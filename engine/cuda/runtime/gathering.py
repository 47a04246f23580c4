"""Columns of several GPUs brought together by packets (``engine/cuda/gather.py``), while a pass is recorded.

Packets have two places, which exchanges use in turn.  An owner gives into a place for the second time only after it has taken
the packets of the exchange between, and those come from an owner that has taken the ones before.

Every owner clears its packets at the end of a pass.  The next pass starts after that, so its exchanges find no number of this
one.  If an owner has been given up, its packets may come after that, and passes in flight may find them.  So the host clears
them, too, when it raises the error, and uses no result of a pass in flight (``EngineCore.guarded``).

If the columns are what the latest product of every owner computes, the products give them, so that the way over the links
overlaps their end.  Nothing has been exchanged since, so this is still the order in which packets are taken.  Otherwise the
kernels of the exchange give.

If the owners are different GPUs, their kernels wait for each other: an exchange is a single launch at each owner, without
events.  Whether that works is tried when the group is made, by a graph with as many exchanges as a long pass.  Otherwise
(several owners on one GPU, a simulated GPU, or a trial that has failed) products give, or every owner gives in a launch of
its own, and events order the launches, so that packets have come before a kernel loads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from engine.arrays import Role
from engine.cuda import gather
from engine.cuda.products import dense, quantize
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.device import Buffer
from engine.cuda.runtime.plans import Plans
from engine.cuda.runtime.recorder import Int8, Recorder
from engine.cuda.runtime.tensor import Argument, Tensor
from engine.cuda.runtime.values import Deferred, Gated, Normalized, gathered, plain
from engine.errors import DeviceError
from engine.shares import STEP, Cut, even_cut

WHAT = "columns that GPUs exchange"

TRIAL = 512
"""Exchanges of a trial."""

TRIAL_POLLS = 1 << 18
"""``gather.POLLS`` of a trial."""


class _Number(NamedTuple):
    """The number of an exchange; is_given: whether all owners have given before a kernel takes."""

    number: int
    is_given: bool


@dataclass
class _Exchange:
    """One exchange of a pass, or several if its rows are used more than once.

    parts: the columns of each owner.
    """

    cut: Cut
    parts: Sequence[Any]
    numbers: list[_Number] = field(default_factory=list)


class _Taking(NamedTuple):
    """The arguments ``gather.PLACES`` and ``gather.PACKETS`` of a kernel; is_given: whether it only takes."""

    places: tuple[int, ...]
    packets: tuple[int, ...]
    is_given: bool


class _Rows(Deferred):
    """All columns of an exchange at one owner."""

    inputs = ()

    def __init__(self, of: "PacketGathering", exchange: _Exchange, owner: int) -> None:
        self._of, self._exchange, self._owner = of, exchange, owner
        self._uses = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._part.shape[0], self._exchange.cut.size

    @property
    def peers(self) -> int:
        """The number of other owners."""
        return self._of.n_owners - 1

    @property
    def _part(self) -> Tensor | Deferred:
        part: Tensor | Deferred = self._exchange.parts[self._owner]
        return part

    def take(self) -> _Taking:
        """How the next launch brings the columns together."""
        self._uses += 1
        return self._of.take(self._exchange, self._owner, self._uses - 1)

    def part(self, recorder: Recorder, taking: _Taking) -> Tensor | int:
        """The own columns, if the next launch gives them."""
        return 0 if taking.is_given else plain(recorder, self._part)

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launch that stores the rows."""
        taking, (rows, columns) = self.take(), self.shape
        part = self.part(recorder, taking)
        arguments = (part, *taking.places, *taking.packets, out)
        recorder.launch(gather.gather(self.peers), _grid(rows, columns), quantize.RUN, arguments, result=out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The rows as int8.  The same launch computes the own columns, which it gives, or an activation of all columns, if
        products have given what it is computed from."""
        taking, part = self.take(), self._part
        to, grid = recorder.int8(unit, *self.shape, layout=layout), _grid(*self.shape)
        if taking.is_given:
            kind, numbers = "plain", (0.0, 0.0, 0.0, 0.0)
            if isinstance(part, Gated):
                kind, numbers = part.activation.kind, part.activation.numbers
            (n, *_, number, polls), (here, *_, state, alarm) = taking.places, taking.packets
            given: tuple[Argument, ...] = n, number, polls, *numbers, here, state, alarm, *to
            kernel = gather.take_quantize(unit, kind, layout)
            recorder.launch(kernel, grid[::-1], quantize.RUN, given, **to.outputs())
            return to
        kernel, own = gathered(recorder, part, unit, layout, self.peers)
        arguments = (*own, *taking.places, *taking.packets, *to)
        recorder.launch(kernel, grid, quantize.RUN, arguments, **to.outputs())
        return to


@dataclass
class _NormalizedRows(Deferred):
    """rms_norm of rows."""

    inputs = ()

    rows: _Rows
    weight: Tensor
    eps: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.rows.shape

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launches that compute the value as float32."""
        Normalized(self.rows.plain(recorder), self.weight, self.eps).write(recorder, out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The value as int8."""
        taking, (rows, columns) = self.rows.take(), self.shape
        part = self.rows.part(recorder, taking)
        to = recorder.int8(unit, rows, columns, layout=layout)
        kernel = gather.gather_norm_quantize(unit, columns, self.rows.peers, layout)
        arguments = (part, self.weight, self.eps, *taking.places, *taking.packets, *to)
        recorder.launch(kernel, _grid(rows, columns), quantize.RUN, arguments, **to.outputs())
        return to


def _grid(rows: int, columns: int) -> tuple[int, int]:
    """The grid of a kernel of an exchange: (runs of a row, rows)."""
    return -(-columns // quantize.RUN), rows


def _results(part: Tensor | Deferred) -> list[Tensor]:
    """The results of products of which a part consists, if a kernel that takes them can compute it from them."""
    if isinstance(part, Gated):
        return [part.up] if part.gate is None else [part.gate, part.up]
    return [part] if isinstance(part, Tensor) else []


def record_clearing(
    recorders: Sequence[Recorder], packets: Sequence[Buffer], states: Sequence[Buffer], n: int, size: int
) -> None:
    """Record the launches with which all owners clear the first ``n`` words of both places of packets, of ``size`` bytes."""
    for recorder, memory, state in zip(recorders, packets, states, strict=True):
        grid, given = (-(-n // (4 * quantize.RUN)), 2), (memory.address, n, size // 4, state.address)
        recorder.launch(gather.clear_packets(), grid, quantize.RUN, given)


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
        #: Bytes of the packets of one of the two places: for gates and what they multiply.
        self._size = 2 * 8 * self._most * quantize.RUN
        self._packets = [device.allocate(2 * self._size, WHAT) for device in devices]
        self._states = [device.allocate(4, WHAT) for device in devices]
        #: All memory that is zero between passes.
        self.cleared = [*zip(devices, self._packets, strict=True), *zip(devices, self._states, strict=True)]
        self.clear()
        # One for all, since several of them may wait in vain for the same reason.
        self.alarm = devices[0].alarm(
            f"{devices[0].name} has waited too long for another GPU; run again, and if it persists, give each GPU some of "
            'the layers (split_mode="layer").',
            self.clear,
        )
        self._polls = gather.POLLS
        #: The number of exchanges of the pass, and the most columns of all rows of one of them.
        self._latest = self._used = 0
        self.waits = all(one is other or one.runs_beside(other) for one in devices for other in devices)
        self.waits = self.waits and len(set(devices)) == len(devices) and self._works()

    # --- a pass ----------------------------------------------------------------------------------------------------

    def begin(self, rows: int) -> None:
        self._latest = self._used = 0

    def end(self) -> None:
        if self._used:
            # A packet is two words, and gates may come in addition to what they multiply.
            record_clearing(self._recorders, self._packets, self._states, 4 * self._used, self._size)

    def takes(self, rows: int, cut: Cut) -> bool:
        if self._recorders[0].role is not Role.DECODE or rows > NARROW_ROWS or cut.period is None:
            return False
        return rows * -(-cut.size // quantize.RUN) <= self._most

    def arrays(self, parts: Sequence[Any], cut: Cut) -> list[Tensor]:
        return [rows.plain(recorder) for recorder, rows in zip(self._recorders, self.inputs(parts, cut), strict=True)]

    def inputs(self, parts: Sequence[Any], cut: Cut) -> list[_Rows]:
        exchange = _Exchange(cut, parts)
        if not self.waits:
            self._give(exchange)
        return [_Rows(self, exchange, i) for i in range(self.n_owners)]

    def normalized(
        self, parts: Sequence[Any], cut: Cut, weights: Sequence[Tensor], eps: float
    ) -> list[_NormalizedRows]:
        rows = self.inputs(parts, cut)
        return [_NormalizedRows(own, weight, eps) for own, weight in zip(rows, weights, strict=True)]

    # --- launches --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Zero the packets of all owners after all passes that have been started."""
        for device, memory in self.cleared:
            device.clear(memory.address, memory.n_bytes)

    def _give(self, exchange: _Exchange) -> None:
        """Let every owner give, and then wait for all of them."""
        number = self._number(exchange)
        if not number.is_given:
            exchange.parts = [plain(recorder, x) for recorder, x in zip(self._recorders, exchange.parts, strict=True)]
            grid = _grid(exchange.parts[0].shape[0], exchange.cut.size)
            for i, (recorder, part) in enumerate(zip(self._recorders, exchange.parts, strict=True)):
                arguments = (
                    part,
                    *self._places(exchange.cut, i, number.number),
                    0,
                    *self._packets_of(i, number.number),
                    0,
                )
                recorder.launch(gather.gather(self.n_owners - 1), grid, quantize.RUN, arguments)
            exchange.numbers[0] = number._replace(is_given=True)
        self._recorders[0].meet()

    def take(self, exchange: _Exchange, owner: int, use: int) -> _Taking:
        """How the next launch of an owner takes columns; use: the number of its earlier launches for the same exchange."""
        if not self.waits:
            number, is_given = exchange.numbers[0]
            assert number >= self._latest - 1, "other exchanges have used the packets"
        else:
            number, is_given = exchange.numbers[use] if use < len(exchange.numbers) else self._number(exchange)
        n, period, *own = self._places(exchange.cut, owner, number)
        if is_given:
            own = [0, 0, number]
        polls = self._polls if self.waits else 1
        return _Taking((n, period, *own, polls), self._packets_of(owner, number), is_given)

    def _number(self, exchange: _Exchange) -> _Number:
        """Another number of an exchange.  If the latest launches compute all of its parts, they give them."""
        cut, pairs = exchange.cut, zip(self._recorders, map(_results, exchange.parts), strict=True)
        is_given = cut.period == cut.size and all(dense.computes(recorder, results) for recorder, results in pairs)
        self._latest += 1
        self._used = max(self._used, exchange.parts[0].shape[0] * cut.size)
        if is_given:
            for i, recorder in enumerate(self._recorders):
                (first, _), packets = cut.runs[i][0], self._packets_of(i, self._latest)[: 1 + gather.PEERS]
                dense.give(recorder, self.n_owners - 1, (cut.size, first, self._latest, *packets))
        exchange.numbers.append(_Number(self._latest, is_given))
        return exchange.numbers[-1]

    def _places(self, cut: Cut, owner: int, number: int) -> tuple[int, ...]:
        """``gather.PLACES`` without polls of an owner that gives."""
        assert cut.period is not None
        return cut.size, cut.period, *cut.runs[owner][0], number

    def _packets_of(self, owner: int, number: int) -> tuple[int, ...]:
        """``gather.PACKETS`` of an owner."""
        at = self._size * (number & 1)
        peers = [packets.address + at for i, packets in enumerate(self._packets) if i != owner]
        spare = [0] * (gather.PEERS - len(peers))
        here = self._packets[owner].address + at
        return here, *peers, *spare, self._states[owner].address, self.alarm

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
            self.begin(1)
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
            self.clear()
