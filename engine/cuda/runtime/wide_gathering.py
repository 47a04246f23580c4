"""Columns of several GPUs brought together by packets (``engine/cuda/wide_gather.py``), while a pass of many rows is
recorded.

Passes of few rows use ``engine/cuda/runtime/gathering.py``, whose places and numbers work in the same way.  Here activations
become int8 where they are, if no unit has columns of several owners, and the same launch brings the bytes together: a fourth
of the packets.  The launch that normalizes the residual stream adds the chains of the product that computes it, if there are
any.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.arrays import Role
from engine.cuda import gather, wide_gather, wide_gather_norm
from engine.cuda.products import quantize
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.gathering import WHAT, PacketGathering, record_clearing
from engine.cuda.runtime.recorder import Int8, Recorder
from engine.cuda.runtime.tensor import Argument, Tensor
from engine.cuda.runtime.values import Deferred, Normalized, given, plain, quantized
from engine.limits import DECODE_ANSWERS
from engine.shares import Cut

WORDS = 8192
"""The most words of an exchange for each row of the pass; more come together in several exchanges."""

MOST_RUNS = 32
"""The most runs of 256 columns that a block normalizes."""


@dataclass(frozen=True)
class _Runs:
    """The words of an exchange: runs of ``period`` ones, of which an owner has those from ``own[owner][0]`` to before
    ``own[owner][1]``."""

    count: int
    period: int
    own: tuple[tuple[int, int], ...]

    @property
    def words(self) -> int:
        """The number of all words."""
        return self.count * self.period


def _runs_of(cut: Cut, rows: int, unit: int = 1) -> _Runs:
    """Rows that are divided by columns, ``unit`` of which count as one word."""
    assert cut.period is not None
    own = tuple((first // unit, last // unit) for (first, last), *_ in cut.runs)
    return _Runs(rows * cut.size // cut.period, cut.period // unit, own)


@dataclass
class _WideExchange:
    """Columns of all owners, and the numbers of the exchanges that bring them together, one for each use of each owner."""

    cut: Cut
    parts: Sequence[Tensor | Deferred]
    numbers: list[int] = field(default_factory=list)


class _WideRows(Deferred):
    """All columns of an exchange at one owner."""

    inputs = ()
    # Owners exchange words, so all of them have the same layout.
    any_layout = False

    def __init__(self, of: "WideGathering", exchange: _WideExchange, owner: int) -> None:
        self._of, self._exchange, self._owner = of, exchange, owner
        self._cut, self._part = exchange.cut, exchange.parts[owner]
        self._uses = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._part.shape[0], self._cut.size

    def _number(self) -> int:
        """That of the next exchange."""
        self._uses += 1
        if self._uses > len(self._exchange.numbers):
            self._exchange.numbers.append(self._of.next())
        return self._exchange.numbers[self._uses - 1]

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launches that store the rows."""
        part = plain(recorder, self._part)
        self._of.bring(recorder, self._owner, _runs_of(self._cut, self.shape[0]), self._number, part, out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The rows as int8."""
        cut, (rows, columns), of = self._cut, self.shape, self._of
        if layout in quantize.BLOCKS and all(edge % unit == 0 for runs in cut.runs for run in runs for edge in run):
            blocks, units = -(-rows // (8 * layout)), _runs_of(cut, 1, unit)
            words = blocks * units.words * quantize.block_parts(layout)[2]
            if words <= of.most_words:
                kernel, own, block_rows = given(recorder, self._part, layout, of.n_owners - 1)
                places, packets = of.arguments(units, self._owner, self._number(), units.words, words)
                to = recorder.int8(unit, rows, columns, layout=layout)
                grid = 8 * layout * blocks // block_rows, self._part.shape[1] // unit
                arguments = (*own, min(of.takers, grid[0] * grid[1]), *places, *packets, to.q)
                recorder.launch(kernel, grid, quantize.RUN, arguments, **to.outputs())
                return to
        return quantized(recorder, self.plain(recorder), unit, layout=layout)


class _WideNormalizedRows(_WideRows):
    """rms_norm of the rows."""

    any_layout = True

    def __init__(self, rows: _WideRows, weight: Tensor, eps: float) -> None:
        super().__init__(rows._of, rows._exchange, rows._owner)
        self._weight, self._eps = weight, eps

    def _normalized(self, recorder: Recorder) -> Normalized:
        """The value of rows that have been stored."""
        out = recorder.empty(self.shape)
        super().write(recorder, out)
        return Normalized(out, self._weight, self._eps)

    def write(self, recorder: Recorder, out: Tensor) -> None:
        """Record the launches that compute the value as float32."""
        self._normalized(recorder).write(recorder, out)

    def quantized(self, recorder: Recorder, unit: int, layout: int) -> Int8:
        """The value as int8."""
        (rows, columns), of = self.shape, self._of
        each = of.runs_of_block(rows, columns)
        if each > MOST_RUNS or columns > WORDS:
            return self._normalized(recorder).quantized(recorder, unit, layout)
        part = plain(recorder, self._part)
        source: tuple[Argument, ...] = part, 0, 0, 0
        written: dict[str, Tensor] = {}
        of_chains: tuple[int, ...] = ()
        # Kept alive, since a block quantizes while others still add.
        chains = recorder.take_chains(part) if self._cut.period == columns else None
        if chains is not None:
            source = chains.chains, chains.n_chains, chains.residual or 0, part
            written, of_chains = {"result": part}, (chains.tiles, chains.residual is not None)
        to = recorder.int8(unit, rows, columns, layout=layout)
        places, packets = of.arguments(_runs_of(self._cut, rows), self._owner, self._number(), columns)
        kernel = wide_gather_norm.wide_gather_norm_quantize(unit, columns, of.n_owners - 1, layout, each, *of_chains)
        grid, arguments = (-(-columns // (quantize.RUN * each)), rows), (*source, self._weight, self._eps)
        recorder.launch(kernel, grid, quantize.RUN, (*arguments, *places, *packets, *to), **written, **to.outputs())
        return to


class WideGathering:
    """The exchanges of owners that access each other's memory (``engine.ops.gathering.Gathering``): of passes of few rows by
    ``narrow``, and of passes of more rows by packets of its own, if kernels of owners wait for each other."""

    def __init__(self, narrow: PacketGathering, recorders: Sequence[Recorder]) -> None:
        """recorders: those of the owners.  Raises DeviceError if memory runs out."""
        self.narrow, self.n_owners = narrow, len(recorders)
        self._recorders = tuple(recorders)
        devices = [recorder.device for recorder in recorders]
        #: The number of blocks that take what other owners give, as many as multiprocessors; all other blocks only give.
        self.takers = min(device.multiprocessors for device in devices)
        self._most = wide_gather.BLOCKS * self.takers
        #: Bytes of the packets of one of the two places.
        self._size = 8 * WORDS * DECODE_ANSWERS
        self._packets = [device.allocate(2 * self._size, WHAT) for device in devices] if narrow.waits else []
        self._states = [device.allocate(4, WHAT) for device in devices]
        for memory in (self._packets, self._states):
            narrow.cleared += zip(devices, memory, strict=False)
        narrow.clear()
        #: The rows of the pass, the number of its exchanges, and the most words of one of them.
        self._rows, self._latest, self._used = 0, 0, 0

    @property
    def waits(self) -> bool:
        """Whether kernels of an owner wait for those of others."""
        return self.narrow.waits

    # --- a pass ----------------------------------------------------------------------------------------------------

    def begin(self, rows: int) -> None:
        self._rows, self._latest, self._used = rows, 0, 0
        self.narrow.begin(rows)

    def end(self) -> None:
        self.narrow.end()
        if self._used:
            record_clearing(self._recorders, self._packets, self._states, 2 * self._used, self._size)

    @property
    def _is_narrow(self) -> bool:
        return self._rows <= NARROW_ROWS

    def takes(self, rows: int, cut: Cut) -> bool:
        if self._is_narrow:
            return self.narrow.takes(rows, cut)
        fits = rows <= DECODE_ANSWERS and self._recorders[0].role is Role.DECODE
        return self.waits and fits and cut.period is not None

    def arrays(self, parts: Sequence[Any], cut: Cut) -> list[Tensor]:
        return [rows.plain(recorder) for recorder, rows in zip(self._recorders, self.inputs(parts, cut), strict=True)]

    def inputs(self, parts: Sequence[Any], cut: Cut) -> list[Any]:
        return self.narrow.inputs(parts, cut) if self._is_narrow else self._whole(parts, cut)

    def normalized(self, parts: Sequence[Any], cut: Cut, weights: Sequence[Tensor], eps: float) -> list[Any]:
        if self._is_narrow:
            return self.narrow.normalized(parts, cut, weights, eps)
        return [
            _WideNormalizedRows(own, weight, eps) for own, weight in zip(self._whole(parts, cut), weights, strict=True)
        ]

    def _whole(self, parts: Sequence[Any], cut: Cut) -> list[_WideRows]:
        exchange = _WideExchange(cut, parts)
        return [_WideRows(self, exchange, i) for i in range(self.n_owners)]

    # --- launches --------------------------------------------------------------------------------------------------

    @property
    def most_words(self) -> int:
        """The most words of an exchange of the pass, whose rows may become int8 in blocks of rows."""
        smallest = 8 * quantize.BLOCKS[0]
        return WORDS * min(DECODE_ANSWERS, -(-self._rows // smallest) * smallest)

    def next(self) -> int:
        """The number of a further exchange."""
        self._latest += 1
        return self._latest

    def runs_of_block(self, rows: int, columns: int) -> int:
        """The runs of 256 columns that a block normalizes, a power of two, so that all blocks are resident."""
        each, runs = 1, -(-columns // quantize.RUN)
        while each <= MOST_RUNS and -(-runs // each) * rows > self._most:
            each *= 2
        return each

    def bring(
        self,
        recorder: Recorder,
        owner: int,
        runs: _Runs,
        number: Callable[[], int],
        part: Tensor,
        out: Tensor,
    ) -> None:
        """Record the launches that bring words together: part, those of an owner; out: all words; number: that of the next
        exchange."""
        (first, last), kernel = runs.own[owner], wide_gather.gather_words(self.n_owners - 1)
        longest = max(max(end - begin, runs.period - end + begin) for begin, end in runs.own)
        at_once = self.most_words // runs.period
        for done in range(0, runs.count, at_once):
            some = replace(runs, count=min(at_once, runs.count - done))
            places, packets = self.arguments(some, owner, number(), some.words)
            y = min(some.count, self._most)
            x = min(-(-longest // quantize.RUN), self._most // y)
            given = part.address + 4 * done * (last - first), some.count
            found = out.address + 4 * done * runs.period
            recorder.launch(kernel, (x, y), quantize.RUN, (*given, *places, *packets, found), result=out)

    def arguments(
        self, runs: _Runs, owner: int, number: int, n: int, words: int = 0
    ) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
        """Arguments of a launch that gives and takes: ``gather.PLACES`` and ``gather.PACKETS``.  words: those of the
        exchange, if its runs do not count words."""
        self._used = max(self._used, words or runs.words)
        places = n, runs.period, *runs.own[owner], number, gather.POLLS
        return places, self._packets_of(owner, number)

    def _packets_of(self, owner: int, number: int) -> tuple[int, ...]:
        """``gather.PACKETS`` of an owner."""
        at = self._size * (number & 1)
        peers = [packets.address + at for i, packets in enumerate(self._packets) if i != owner]
        spare = [0] * (gather.PEERS - len(peers))
        here = self._packets[owner].address + at
        return here, *peers, *spare, self._states[owner].address, self.narrow.alarm
