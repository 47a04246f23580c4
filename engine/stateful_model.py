"""Saved states of a model: what a slot holds as a file, and a slot that holds what a file has."""

import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from engine import state
from engine.cache.disk import ValueFolder
from engine.cache.pages import NoPages, Paging
from engine.cache.recurrent import Snapshot
from engine.cache.sequence import first_key
from engine.cache.values import kind_of, packed, unpacked
from engine.checks import function
from engine.decode.disk_cache import DiskCache
from engine.decode.slot import Slot
from engine.decode.slot_values import PageAt, SlotValues
from engine.errors import UsageError
from engine.fingerprint import IdentifiedModel
from engine.gguf.digest import sampled_digest
from engine.locking import in_turn
from engine.machine import records
from engine.receipts.form import fingerprint_of


class Saved(NamedTuple):
    """A saved state: its tokens, and the bytes of the file."""

    ids: list[int]
    n_bytes: int


class StatefulModel(IdentifiedModel):
    """A model whose cache can be saved and taken up again."""

    def keep_on_disk(self, folder: ValueFolder) -> None:
        """Keep what the cache holds of texts in files, too."""
        self.disk = DiskCache(self, self.states, self.snapshot_bytes > 0, folder, self._page_identity)
        for slot in self.slots:
            slot.store = self.disk

    def _page_identity(self) -> bytes:
        """What the contents of pages depend on besides the text: the model, its networks that draft, and the cache."""
        wanted = self._state_identity(self.identity()["weights"])
        networks = [sampled_digest(each.gguf) for each in self.model.further]
        return json.dumps([wanted, networks, SlotValues(self).pages.layout]).encode()

    def _state_identity(self, weights: str) -> dict[str, Any]:
        return state.identity(weights, self.model.gguf.n_bytes, self.config, self.cache)

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Save the cache of the text that was used last, so that :meth:`load_state` can restore it.

        The file holds the token ids and, unless the cache has dropped some of the text, all that the cache has of them. It
        identifies the model by a hash of all weights, and the types of the cache. An existing file is replaced only when the
        new one is complete. Answers are computed meanwhile.

        Parameters
        ----------
        path : str or path
            File to write.

        Raises
        ------
        UsageError
            If the file cannot be written, or if the model is closed.
        """
        self.check_open()
        self.save_slot(self.slots.current, path)

    def load_state(
        self,
        path: str | os.PathLike[str],
        on_prefill: Callable[[int, int], None] | None = None,
        *,
        trusted: bool = False,
    ) -> list[int]:
        """Restore a saved state, so that prompts that begin with its tokens need not be read from the beginning.

        What the file has of the cache is checked by its hashes and used if this installation has written it. Otherwise, and
        if it is damaged, the tokens are read again, which takes longer and gives the same bits.

        Parameters
        ----------
        path : str or path
            File that :meth:`save_state` wrote. The device, the number of threads, the batch size and the draft model
            may differ from those of the saving model.
        on_prefill : callable, optional
            Called as ``on_prefill(done, total)``, in tokens, while they are restored or read. It must not use the model.
        trusted : bool
            Use what the file has of the cache even if another installation has written it. Whoever can change the file can
            then change the answers that continue it.

        Returns
        -------
        list of int
            The token ids that the cache now holds. A prompt that begins with them continues from there, with the same
            bits.

        Raises
        ------
        UsageError
            If the file cannot be read or its first line is damaged, if it belongs to another model or another type of cache,
            or if the model is closed. The cache does not change.
        ContextError
            If the tokens do not fit into the context.
        """
        self.check_open()
        self.check_free()
        function("on_prefill", on_prefill)
        found = self._read_state(path)
        slot = self.slots.current
        if not found.tokens:
            self.reset()
        elif not self._taken_up(slot, found, "", trusted, on_prefill):
            self.prefill(found.tokens, on_prefill)
        return found.tokens

    def save_slot(self, slot: Slot, path: str | os.PathLike[str]) -> Saved:
        """Save what a slot holds; see :meth:`save_state`."""
        identity = self.identity()
        values = SlotValues(self)
        held = values.pin(slot)
        try:
            at = [] if held.snapshot is None else values.places(held)
            head = self._state_identity(identity["weights"]) | {
                "fingerprint": fingerprint_of(identity),
                "n_ctx": self.n_ctx,
                "salt": first_key(held.salt).hex(),
                "layout": values.pages.layout,
                "tokens": held.tokens,
            }

            def contents() -> Iterator[np.ndarray]:
                if held.snapshot is not None:
                    yield from (value for _, value in values.copies(held))
                    yield packed(held.snapshot)

            pages = [(*kind_of(each.paging), each.chunk) for each in at]
            n_bytes = state.write(path, head, pages, contents(), state.installation_key())
        finally:
            values.unpin(held)
        return Saved(held.tokens, n_bytes)

    def restore_slot(self, slot: Slot, path: str | os.PathLike[str], salt: str) -> Saved:
        """Let a slot hold a saved state with a salt; see :meth:`load_state`.  Raises UsageError also if the state has another
        salt."""
        found = self._read_state(path)
        if found.salt != first_key(salt).hex():
            raise UsageError(
                "the state was saved with another API key or cache_salt, which keeps it from this request."
            )
        if not found.tokens:
            with self.lock:
                self.check_open()
                if slot.owner is not None:
                    self.core.interrupt()
                slot.clear()
        elif not self._taken_up(slot, found, salt, False, None):
            self.hold(self.slots.index(slot), found.tokens, salt)
        return Saved(found.tokens, os.stat(path).st_size)

    @in_turn
    def erase_slot(self, slot: Slot) -> int:
        """Forget what a slot holds, unless others use it, too; returns the number of its tokens."""
        self.check_open()
        if slot.owner is not None:
            self.core.interrupt()
        return self.slots.erase(slot, self.states)

    def _read_state(self, path: str | os.PathLike[str]) -> state.SavedState:
        """The line of a state of this model."""
        state.checked_path(path)
        wanted = self._state_identity(self.identity()["weights"])
        sizes = {kind_of(paging): n_bytes for paging, n_bytes in SlotValues(self).pages.n_bytes.items()}
        return state.read(path, wanted, self.n_ctx, self.config.n_vocab, sizes)

    def _taken_up(
        self,
        slot: Slot,
        found: state.SavedState,
        salt: str,
        trusted: bool,
        on_prefill: Callable[[int, int], None] | None,
    ) -> bool:
        """Let a slot hold the values of a state; returns whether it does, which it does not if one of them is missing, is
        damaged, or comes from elsewhere and is not trusted."""
        values, key, n_tokens = SlotValues(self), state.installation_key(), len(found.tokens)
        kinds = {kind_of(paging): paging for paging in values.pages.kinds}
        if found.layout != values.pages.layout or not found.places:
            return False

        def usable(record: records.ReadRecord | records.Unread) -> np.ndarray | None:
            if isinstance(record, records.Unread) or not (record.ours or trusted):
                return None
            return record.contents

        *places, last = found.places
        snapshot = _snapshot(next(map(usable, records.read_all([last], key))))
        if snapshot is None:
            return False
        wanted: list[tuple[PageAt, records.RecordPlace]] = []
        for (span, window, chunk), place in zip(found.pages, places, strict=True):
            paging = kinds.get((span, window))
            if paging is None:
                return False
            # Where fewer tokens can be rolled back, fewer pages fit behind a window.
            if chunk >= paging.passed(n_tokens):
                wanted.append((PageAt(paging, chunk), place))
        if not _complete([at for at, _ in wanted], values.pages.kinds, n_tokens):
            return False
        n_bytes = max(values.pages.n_bytes.values(), default=0)
        contents = map(usable, records.read_all([place for _, place in wanted], key, n_bytes))

        def tell(n_pages: int) -> None:
            if on_prefill is not None:
                with self.reserved("on_prefill"):
                    on_prefill(n_tokens * n_pages // max(1, len(wanted)), n_tokens)

        try:
            pages = zip((at for at, _ in wanted), contents, strict=True)
            return values.take_up(slot, found.tokens, salt, snapshot, pages, tell)
        except NoPages:
            return False


def _snapshot(value: np.ndarray | None) -> Snapshot | None:
    try:
        return None if value is None else unpacked(value)
    except ValueError:
        return None


def _complete(pages: list[PageAt], kinds: list[Paging], n_tokens: int) -> bool:
    """Whether there is each page that a pass after ``n_tokens`` tokens reads, once, in ascending order, and no other."""
    for paging in kinds:
        chunks = [at.chunk for at in pages if at.paging == paging]
        end = -(-n_tokens // paging.span)
        if chunks != list(range(chunks[0] if chunks else end, end)):
            return False
        first = max(0, n_tokens - paging.window + 1) // paging.span if paging.window else 0
        if chunks and chunks[0] > first or (not chunks and first < end):
            return False
    return len(set(pages)) == len(pages)
