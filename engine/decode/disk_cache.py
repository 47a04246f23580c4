"""The cache on disk of a model: pages and snapshots in files, by the keys of the texts that they belong to.

When a request ends, the pages and snapshots of its text that are not in a file are queued, and a thread writes them.  A
request whose text begins with one that is in files gets it from there, if memory does not hold it and reading is faster than
computing: pages are copied to memory without a user, snapshots to the others, and then they are found like those of any
earlier text.  So a damaged or missing file costs time and changes nothing else.
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from engine.cache.disk import ValueFolder
from engine.cache.pages import NoPages, PagePool, Paging
from engine.cache.recurrent import Snapshot, States
from engine.cache.sequence import Sequence
from engine.cache.types import CHUNK
from engine.cache.values import kind_of, packed, packed_bytes, unpacked
from engine.decode.slot import Slot
from engine.decode.slot_values import PIECE, SlotValues, ValuedModel, fits
from engine.errors import DeviceError, EngineError
from engine.forks import renew_in_children
from engine.machine import records

log = logging.getLogger("bitmirror.decode")

MOST_COPIED = 256 << 20
"""The most bytes of pages that were copied because their memory was needed, and have not been written."""

LEAST_TOKENS = 256
"""The fewest tokens whose time is measured: that of fewer is mostly not in proportion to them."""

WEIGHT = 0.25
"""The weight of the latest measurement in a mean."""


class ValueKey(NamedTuple):
    """What a value is: a page of a kind, or a snapshot if that is None, and the key of the text that ends with it."""

    paging: Paging | None
    key: bytes


class Mean:
    """The mean time of something, in seconds, in which the latest measurements count most; 0 before the first."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float, count: int) -> None:
        """Take ``seconds`` for ``count`` of it into account."""
        each = seconds / count
        self.seconds = each if not self.seconds else self.seconds + WEIGHT * (each - self.seconds)


class DiskCache:
    """The pages and snapshots of a model in files.

    Attributes: ``per_byte``: the time to read a byte into the memory of the device; ``per_token``: the time to compute what a
    token needs.
    """

    def __init__(
        self, served: ValuedModel, states: States, needs_state: bool, folder: ValueFolder, identify: Callable[[], bytes]
    ) -> None:
        """states: the snapshots of the model; needs_state: whether a text can only be continued from one; identify: returns
        what identifies the model and its cache, which may take seconds."""
        self.per_byte, self.per_token = Mean(), Mean()
        self._served = served
        self._states = states
        self._needs_state = needs_state
        self._folder = folder
        self._identify = identify
        self._values = SlotValues(served)
        #: What identifies the model; b"" if that could not be found out.
        self._identity = b""
        self._identified = threading.Event()
        #: What is to be written, with its value if that has been copied already.
        self._queue: dict[ValueKey, np.ndarray | Snapshot | None] = {}
        self._copied = 0
        self._changed = threading.Condition()
        #: Whether the thread has taken something from the queue that is not in a file yet.
        self._writing = self._closing = False
        for paging, pool in self._pools.items():
            pool.evicted = partial(self._evicted, paging)
        self._thread = threading.Thread(target=self._run, name="cache on disk", daemon=True)
        self._thread.start()
        renew_in_children(self)

    def renew(self) -> None:
        """In a process that was forked: the thread does not exist, and the files are those of the other process."""
        self._identity, self._queue, self._changed = b"", {}, threading.Condition()
        self._identified.set()

    @property
    def _pools(self) -> dict[Paging, PagePool]:
        return self._served.model.cache.pools

    def close(self) -> None:
        """Write what is queued, and end the thread.  The caller must not hold the lock of the model."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def flush(self) -> None:
        """Wait until all that is queued has been written.  The caller must not hold the lock of the model."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._queue or self._writing) or not self._thread.is_alive())

    # --- write -----------------------------------------------------------------------------------------------------

    def keep(self, sequence: Sequence) -> None:
        """Queue what memory holds of the text of a sequence and the folder has room for."""
        keys, found, fits = sequence.keys, dict[ValueKey, Snapshot | None](), self._folder.fits
        for paging, pool in self._pools.items():
            chunks = paging.span // CHUNK
            if fits(self._values.pages.n_bytes[paging]):
                found |= {
                    ValueKey(paging, key): None for key in keys[chunks - 1 :: chunks] if pool.find(key) is not None
                }
        if self._needs_state:
            snapshots = {key: self._states.get(key) for key in keys if key in self._states}
            found |= {ValueKey(None, key): each for key, each in snapshots.items() if fits(packed_bytes(each))}
        with self._changed:
            for each, value in found.items():
                if not self._stored(each):
                    self._queue.setdefault(each, value)
            self._changed.notify_all()

    def _evicted(self, paging: Paging, page: int, key: bytes) -> None:
        """Copy a page that has not been written before its memory is used for another one."""
        each = ValueKey(paging, key)
        with self._changed:
            if each in self._queue and self._queue[each] is None and self._copied < MOST_COPIED:
                self._queue[each] = value = self._values.pages.read(paging, [page])[0]
                self._copied += value.nbytes

    def _run(self) -> None:
        try:
            self._identity = self._identify()
        except EngineError as error:
            log.warning("the cache on disk is not used: %s", error)
        finally:
            self._identified.set()
        while self._identity:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
            try:
                for name, value in self._piece():
                    self._folder.write(name, value)
            except OSError as error:
                log.warning("the cache on disk cannot be written: %s", error.strerror or error)
            except DeviceError as error:
                log.warning("nothing more is written to the cache on disk: %s", error)
                return
            except EngineError:
                return  # the model is closed
            finally:
                with self._changed:
                    self._writing = False
                    self._changed.notify_all()

    def _piece(self) -> list[tuple[bytes, np.ndarray]]:
        """The names and values of the first entries of the queue, of pages up to a piece."""
        found: list[tuple[bytes, np.ndarray]] = []
        pages: list[tuple[bytes, int]] = []
        kind: Paging | None = None
        most = 0
        with self._values.turn():
            with self._changed:
                self._writing = True
                while self._queue:
                    each, value = next(iter(self._queue.items()))
                    name, page = self._name(each), None
                    if each.paging is not None and value is None:
                        page = self._pools[each.paging].find(each.key)
                        if page is not None and pages and (each.paging != kind or len(pages) >= most):
                            break
                        if page is not None:
                            kind, most = each.paging, max(1, PIECE // self._values.pages.n_bytes[each.paging])
                    del self._queue[each]
                    if page is not None:
                        pages.append((name, page))
                    elif isinstance(value, Snapshot):
                        found.append((name, packed(value)))
                    elif value is not None:
                        self._copied -= value.nbytes
                        found.append((name, value))
                    if found:
                        break
            if pages and kind is not None:
                values = self._values.pages.read(kind, [page for _, page in pages])
                found += zip((name for name, _ in pages), values, strict=True)
        return found

    # --- read ------------------------------------------------------------------------------------------------------

    def fetch(self, slot: Slot, tokens: np.ndarray, have: int) -> bool:
        """Copy pages and snapshots of the longest prefix of ``tokens``, int32 [n], that files and memory have together, to
        memory, if it is longer than ``have`` and that is faster than computing it.  Returns whether something was copied;
        then the slot is empty."""
        self._identified.wait()
        if not self._identity or (self._served.model.cache.rings and not self._needs_state):
            return False
        sequence = slot.sequence
        states = _Either(self, self._states) if self._needs_state else None
        length, keys = sequence.find(tokens, states, lambda paging, key: self._stored(ValueKey(paging, key)))
        if length <= have:
            return False
        used = [ValueKey(paging, key) for paging, key in sequence.needed(length, keys)]
        missing = [each for each in used if each.paging is not None and self._pools[each.paging].find(each.key) is None]
        if self._needs_state and keys[-1] not in self._states:
            missing.insert(0, ValueKey(None, keys[-1]))
        n_bytes = sum(self._folder.size(self._name(each)) for each in missing)
        if self.per_byte.seconds * n_bytes > self.per_token.seconds * (length - have) > 0:
            return False
        begun = time.perf_counter()
        slot.clear()
        absent = set(missing)
        held = self._hold([each for each in used if each not in absent])
        try:
            self._copy(slot, missing, length, held)
        except NoPages:
            pass  # what has been copied can be used
        finally:
            # Those at the end of the text are used for others first.
            for paging, page in reversed(held):
                self._pools[paging].give_back(page)
        if missing:
            self.per_byte.add(time.perf_counter() - begun, max(1, n_bytes))
        return True

    def _hold(self, wanted: list[ValueKey]) -> list[tuple[Paging, int]]:
        """Use pages that are in memory, so that they stay there."""
        held: list[tuple[Paging, int]] = []
        for paging, key in wanted:
            assert paging is not None
            page = self._pools[paging].find(key)
            assert page is not None
            self._pools[paging].share(page)
            held.append((paging, page))
        return held

    def _copy(self, slot: Slot, missing: list[ValueKey], length: int, held: list[tuple[Paging, int]]) -> None:
        """Copy values from files to memory, up to the first one that cannot be used; those after it are only checked, so that
        they are written again.  held: the pages that are in use meanwhile, to which those that are taken are added.  Raises
        NoPages."""
        piece: list[tuple[bytes, np.ndarray]] = []
        kind: Paging | None = None
        usable = True
        for (paging, key), value in zip(missing, self._folder.read([*map(self._name, missing)]), strict=True):
            if paging is None:
                usable = value is not None and self._add(slot, key, value, length)
                continue
            usable = usable and value is not None and value.nbytes == self._values.pages.n_bytes[paging]
            if not usable or value is None:
                continue
            if piece and (paging != kind or (len(piece) + 1) * value.nbytes > PIECE):
                self._place(slot, kind, piece, held)
                piece = []
            kind = paging
            piece.append((key, value))
        self._place(slot, kind, piece, held)

    def _add(self, slot: Slot, key: bytes, value: np.ndarray, length: int) -> bool:
        """Add a snapshot after ``length`` tokens to the others; returns whether it is one, and there is room for it."""
        try:
            snapshot = unpacked(value)
        except ValueError:
            return False
        if snapshot.length == length and fits(self._served.model, snapshot, slot.sequence):
            self._states.add(key, snapshot)
        return key in self._states

    def _place(
        self, slot: Slot, kind: Paging | None, piece: list[tuple[bytes, np.ndarray]], held: list[tuple[Paging, int]]
    ) -> None:
        """Copy values to pages, which then have their keys.  Raises NoPages."""
        if not piece:
            return
        assert kind is not None
        pool, pages = self._pools[kind], list[int]()
        for _ in piece:
            pages.append(self._values.take(kind, slot, interrupts=False))
            held.append((kind, pages[-1]))
        self._values.pages.write(kind, pages, [value for _, value in piece])
        for page, (key, _) in zip(pages, piece, strict=True):
            pool.settle(page, key)

    def computed(self, n_tokens: int, seconds: float) -> None:
        """Take into account that a prompt's tokens were computed in some seconds."""
        if n_tokens >= LEAST_TOKENS:
            self.per_token.add(seconds, n_tokens)

    # --- names -----------------------------------------------------------------------------------------------------

    def _stored(self, each: ValueKey) -> bool:
        return bool(self._identity) and self._name(each) in self._folder

    def has_state(self, key: bytes) -> bool:
        """Whether there is a file with the snapshot for the text with this key."""
        return self._stored(ValueKey(None, key))

    def _name(self, each: ValueKey) -> bytes:
        kind = "snapshot" if each.paging is None else "page {} {}".format(*kind_of(each.paging))
        return records.name_of(self._identity, kind.encode(), each.key)


class _Either:
    """The keys of the texts whose snapshots are in memory or in files."""

    def __init__(self, disk: DiskCache, states: States) -> None:
        self._disk = disk
        self._states = states

    def __contains__(self, key: object) -> bool:
        return key in self._states or (isinstance(key, bytes) and self._disk.has_state(key))
