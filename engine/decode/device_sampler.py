"""The kernels that choose tokens on a GPU: their memory, and their launches."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.cuda import digest, sample
from engine.cuda.accept import EMPTY, MOST_K, RESULT_WORDS
from engine.cuda.accept import accept as end_of_step
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Buffer, Device
from engine.cuda.sample import PARAMS
from engine.decode.device_params import pack_params, token_of
from engine.limits import DECODE_ANSWERS, DECODE_ROWS
from engine.sampling.row_digest import PACKED, PackedDigest
from engine.sampling.sampler import Sampler
from engine.speculative.params import MODES

DIGEST_PARTS = 8
"""Steps of a slot whose digests are kept: a power of two, and more than may be in flight."""


class Candidates(NamedTuple):
    """Addresses of the lists that ``draw`` writes and ``accept`` compares: ids int32 and probabilities float32 [16][256],
    counts int32 [16]."""

    ids: int
    probabilities: int
    counts: int


NOWHERE = Candidates(0, 0, 0)
"""No lists."""


class Rows(NamedTuple):
    """Addresses of the rows of a step and of what it reads and prepares; see ``engine/cuda/accept.py``.

    tokens, positions, sequences: int32 [128]; starts: int32 [129], the first row of each entry; history: int32 [slots,
    n_ctx], which already contains the drafts.
    """

    tokens: int
    positions: int
    sequences: int
    starts: int
    history: int


class DeviceSampler:
    """The memory of the kernels that choose tokens, and their launches.

    One step: the logits of up to 128 rows of one or more answers become one token per row; the tokens that follow from each
    other are kept, and the last of each answer, its position and the tokens in between are stored where the next step reads
    them.  Each answer has a slot.  The host sets ``history`` and, with :meth:`begin`, the parameters of a slot.

    ``mode`` is a way to accept drafts, one of :data:`engine.speculative.params.MODES`.  A greedy choice has no distribution,
    so every mode is exact then.
    """

    def __init__(self, device: Device, n_vocab: int, n_ctx: int, ring_steps: int = 64, n_slots: int = 1) -> None:
        """device: an ``engine.cuda.runtime.device.Device``; ring_steps: the most steps in flight at once, a power of two;
        n_slots: the number of answers that may be under way at once."""
        assert ring_steps & (ring_steps - 1) == 0
        self._device = device
        self.n_vocab = n_vocab
        self.n_ctx = n_ctx
        #: int32 [n_slots][ring_steps][32] written by the device: the results of the steps of each slot in turn; see
        #: ``engine/cuda/accept.py``.
        self.ring, self.ring_address = device.pinned((n_slots, ring_steps, RESULT_WORDS), np.int32)
        self.ring[...] = EMPTY
        self.params = device.allocate(PARAMS.itemsize * n_slots, "the samplers' parameters")
        self.best = device.allocate(8 * sample.GROUPS * DECODE_ANSWERS, "the sampler's candidates")
        self.found = device.allocate(4 * DECODE_ANSWERS, "the tokens found")
        self.step = device.allocate(4 * n_slots, "the number of steps")
        #: The number of results of each slot that have been taken.
        self.taken = [0] * n_slots
        self._samplers: list[Sampler | None] = [None] * n_slots
        self._lists: list[Buffer] = []
        #: int32 [n_slots][DIGEST_PARTS][16][8] written by the device, and its address; see ``engine/cuda/digest.py``.
        self._digests: tuple[np.ndarray, int] | None = None
        #: The sums of parts of rows.
        self._sums: list[Buffer] = []

    @property
    def digest_memory(self) -> tuple[np.ndarray, int]:
        """Where digests are stored, in memory that is allocated on first use, and its address."""
        if self._digests is None:
            shape = len(self.taken), DIGEST_PARTS, DECODE_ROWS, digest.WORDS
            self._digests = self._device.pinned(shape, np.int32)
            n_bytes = 8 * digest.SUMS * digest.BLOCKS * DECODE_ANSWERS
            self._sums = [self._device.allocate(n_bytes, "the digests of logits")]
        return self._digests

    @property
    def lists(self) -> Candidates:
        """Where candidates are stored, in memory that is allocated on first use."""
        if not self._lists:
            words = MOST_K * DECODE_ROWS, MOST_K * DECODE_ROWS, DECODE_ROWS, DECODE_ROWS, DECODE_ROWS + 1
            self._lists = [self._device.allocate(4 * n, "the lists of candidates") for n in words]
            self._device.write(self._lists[3].address, np.zeros(DECODE_ROWS, np.int32))
            self._device.write(self._lists[4].address, np.arange(DECODE_ROWS + 1, dtype=np.int32))
        return Candidates(*(memory.address for memory in self._lists[:3]))

    @property
    def no_lists(self) -> Candidates:
        """Lists of drafts that are certain."""
        return self.lists._replace(counts=self._lists[3].address)

    def begin(self, sampler: Sampler, mode: str = "exact", p_accept: float = 0.0, slot: int = 0) -> None:
        """Make the steps of a slot that are launched from now on choose as this sampler does; their results begin at
        ring[slot, 0]."""
        mode = _accepts(mode, sampler.params.greedy)
        if mode != "exact":
            # Now, because a graph may be captured next.
            _ = self.lists
        # A launch that accepts by p-min serves answers with exact acceptance too: no probability reaches their bound.
        packed = pack_params(sampler, p_accept if mode == "p-min" else math.inf)
        self._device.write(self.params.address + PARAMS.itemsize * slot, packed)
        self._device.write(self.step.address + 4 * slot, np.zeros(1, np.int32))
        self.ring[slot] = EMPTY
        self.taken[slot] = 0
        self._samplers[slot] = sampler

    def _next(self, slot: int, later: int = 0) -> np.ndarray:
        """The part of a slot's ring for the next result, or for a later one."""
        ring = self.ring[slot]
        return ring[(self.taken[slot] + later) % len(ring)]

    def ready(self, slot: int = 0, later: int = 0) -> bool:
        """Whether the result of the next step of a slot has arrived, or of the step ``later`` steps after that."""
        return bool(self._next(slot, later)[0] != EMPTY)

    def words(self, slot: int, later: int = 0) -> list[int]:
        """The tokens of that step, once :meth:`ready`, without taking them; a negative one could not be chosen."""
        part = self._next(slot, later)
        return part[1 : 1 + int(part[0])].tolist()  # type: ignore[no-any-return]

    def _parts(self, slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The index in ``ring`` of the part of each slot for the next result."""
        taken = np.array([self.taken[slot] for slot in slots])
        return np.array(slots), taken % self.ring.shape[1]

    def all_ready(self, slots: list[int]) -> bool:
        """Whether the results of the next step of each slot have arrived."""
        return bool((self.ring[(*self._parts(slots), 0)] != EMPTY).all())

    def take_all(self, slots: list[int]) -> list[list[int]]:
        """The :meth:`words` of the next step of each slot, once :meth:`all_ready`; frees their parts of the ring."""
        if len(slots) == 1:  # faster than with arrays
            words = [self.words(slots[0])]
            self._next(slots[0])[0] = EMPTY
        else:
            parts = self._parts(slots)
            found = self.ring[parts]
            counts = found[:, 0].tolist()
            words = [row[:n] for row, n in zip(found[:, 1 : 1 + max(counts)].tolist(), counts, strict=True)]
            self.ring[(*parts, 0)] = EMPTY
        for slot in slots:
            self.taken[slot] += 1
        return words

    def check(self, slot: int, word: int) -> None:
        """Raise what ``Sampler.sample`` raises if a token of a slot could not be chosen."""
        token_of(word, self._samplers[slot])

    def digests(self, slot: int, count: int) -> list[PackedDigest]:
        """The digests of the first rows of the latest step of a slot that was taken, if the step has computed them."""
        return packed_digests(self.digest_memory[0][slot, (self.taken[slot] - 1) % DIGEST_PARTS, :count])

    def take(self, slot: int = 0) -> list[int]:
        """The tokens of the next step of a slot, once :meth:`ready`; frees its part of the ring.  Raises what
        ``Sampler.sample`` raises if one could not be chosen; the tokens before it are lost."""
        words = self.words(slot)
        self._next(slot)[0] = EMPTY
        self.taken[slot] += 1
        return [token_of(word, self._samplers[slot]) for word in words]

    @staticmethod
    def kernels(greedy: bool, with_edit: bool, mode: str = "exact", accept: bool = True) -> list[Specialization]:
        """The kernels that a step launches, in order."""
        mode = _accepts(mode, greedy)
        # A draft model's candidates are needed only if their probabilities are.
        keep = mode != "exact" if accept else mode == "ratio"
        choice = sample.argmax(sample.GROUPS) if greedy else sample.draw(sample.GROUPS, keep)
        edit, maxima = sample.edit(sample.EDIT_THREADS), sample.maxima(sample.GROUPS, sample.WARPS)
        return [edit] * with_edit + [maxima, choice] + [end_of_step(mode)] * accept

    def launch_digests(self, logits: int, stride: int, n_rows: int, rows: Rows) -> None:
        """Compute the digests of the rows of a step, before :meth:`launch` changes the logits."""
        whole, join = digest.kernels()
        (_, address), sums = self.digest_memory, self._sums[0].address
        arguments = [logits, stride, self.n_vocab, rows.starts, sums]
        blocks = digest.blocks_of(self.n_vocab)
        self._device.launch(whole, (blocks, n_rows), digest.THREADS, arguments)
        where = [rows.starts, rows.sequences, self.step.address, blocks, sums, DIGEST_PARTS, address]
        self._device.launch(join, n_rows, 32, [logits, stride, *where])

    def launch(
        self,
        logits: int,
        stride: int,
        n_rows: int,
        rows: Rows,
        at: int,
        greedy: bool,
        with_edit: bool,
        mode: str = "exact",
        draft_lists: Candidates | None = None,
        n_entries: int = 1,
    ) -> None:
        """One step of ``n_rows`` rows and ``n_entries`` entries, each a last sampled token and its drafts.

        logits: address of the first row; the next begins ``stride`` logits later.  Biased and penalized logits overwrite
            the given ones.
        at: address of int32 [slots], where the position of the last sampled token of each answer is kept.
        greedy, with_edit, mode: decide which kernels run, and so need a graph each; everything else is in the parameters.
            A step that is not greedy or that has edits serves answers without these too.
        draft_lists: the candidates from which the drafts were drawn, those of tokens[i + 1] in row i; None if they are
            certain.
        """
        mode = _accepts(mode, greedy)
        kernels = self.kernels(greedy, with_edit, mode)
        lists = self.lists if mode != "exact" else NOWHERE
        places = self._lists[4].address if mode != "exact" else 0
        self._find(kernels[:-1], logits, stride, n_rows, rows, 1, [places, 0, *lists])
        others = (draft_lists or self.no_lists) if mode == "ratio" else NOWHERE
        self._accept(mode, rows, at, n_entries, lists, others)

    @staticmethod
    def kernels_of_maxima(groups: int) -> list[Specialization]:
        """The kernels that :meth:`launch_maxima` launches, in order."""
        return [sample.argmax(groups), end_of_step("exact")]

    def launch_maxima(self, maxima: int, groups: int, n_rows: int, rows: Rows, at: int, n_entries: int = 1) -> None:
        """A greedy step without edits, whose pass has found the largest logits.

        maxima: address of their keys, uint64 [n_rows, groups]; the others as in :meth:`launch`.
        """
        choice, _ = self.kernels_of_maxima(groups)
        self._device.launch(choice, n_rows, groups, [maxima, self.found.address])
        self._accept("exact", rows, at, n_entries, NOWHERE, NOWHERE)

    def _accept(self, mode: str, rows: Rows, at: int, n_entries: int, lists: Candidates, others: Candidates) -> None:
        """The end of a step whose tokens have been found."""
        state = [
            self.found.address,
            rows.starts,
            self.n_ctx,
            rows.tokens,
            rows.positions,
            rows.sequences,
            rows.history,
            at,
        ]
        ring = [self.ring_address, self.ring_address, self.ring.shape[1], self.step.address]
        threads = 32 if mode == "exact" else MOST_K
        arguments = [*state, *ring, self.params.address, *lists, *others]
        self._device.launch(end_of_step(mode), n_entries, threads, arguments)

    def launch_draft(
        self,
        logits: int,
        stride: int,
        rows: Rows,
        greedy: bool,
        with_edit: bool,
        mode: str = "exact",
        draft: int = 0,
        n_entries: int = 1,
        every: int = 1,
    ) -> None:
        """Find draft number ``draft`` of each entry, from the logits of a draft model's pass.

        logits: address of the logits of entry 0; those of the next begin ``stride`` logits later.
        rows: those of the draft model, from the row of entry 0 on, but the ``starts`` of the target.  The row of the next
            entry comes ``every`` rows later.
        mode: how the drafts will be accepted; for "ratio", the candidates are stored where acceptance looks for them.
        """
        kernels = self.kernels(greedy, with_edit, mode, accept=False)
        lists = [rows.starts, draft, *self.lists] if _accepts(mode, greedy) == "ratio" else [0, 0, *NOWHERE]
        self._find(kernels, logits, stride, n_entries, rows, every, lists)

    def launch_choices(self, logits: int, stride: int, n_rows: int, rows: Rows, greedy: bool, with_edit: bool) -> None:
        """Find a token for each of ``n_rows`` rows of a text that is known: ``found`` has them, and nothing else changes.

        logits, stride, greedy, with_edit: as in :meth:`launch`; rows: of the addresses, ``tokens`` and ``starts`` are not
            used.
        """
        kernels = self.kernels(greedy, with_edit, accept=False)
        self._find(kernels, logits, stride, n_rows, rows, 1, [0, 0, *NOWHERE])

    def _find(
        self,
        kernels: Sequence[Specialization],
        logits: int,
        stride: int,
        n_rows: int,
        rows: Rows,
        every: int,
        lists: list[int],
    ) -> None:
        """Find a token per row of logits; the last of ``kernels`` is ``argmax`` or ``draw``, which stores to ``lists``."""
        launch, params, found = self._device.launch, self.params.address, self.found.address
        *changes, best, choice = kernels
        for change in changes:
            given = [params, rows.history, self.n_ctx, rows.sequences, rows.positions, every]
            launch(change, n_rows, sample.EDIT_THREADS, [logits, stride, *given])
        grid, threads = (sample.GROUPS // sample.WARPS, n_rows), 32 * sample.WARPS
        launch(best, grid, threads, [logits, stride, self.n_vocab, 0, self.best.address])
        if choice.kernel is sample.argmax:
            launch(choice, n_rows, sample.GROUPS, [self.best.address, found])
        else:
            row = [
                logits,
                stride,
                self.n_vocab,
                self.best.address,
                params,
                rows.sequences,
                rows.positions,
                every,
                found,
            ]
            launch(choice, n_rows, sample.GROUPS, [*row, *lists])


def packed_digests(words: np.ndarray) -> list[PackedDigest]:
    """The digests of rows that ``engine/cuda/digest.py`` has written, int32 [n, 8]."""
    data = words.tobytes()
    return [data[at : at + PACKED] for at in range(0, len(data), PACKED)]


def _accepts(mode: str, greedy: bool) -> str:
    assert mode in MODES, mode
    return "exact" if greedy else mode
