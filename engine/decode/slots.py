"""The slots of a model: which slot a text gets, and how much of it the slot already contains."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from engine.cache.kv import KVCache
from engine.cache.pages import Paging
from engine.cache.recurrent import States
from engine.cache.types import CHUNK
from engine.decode.slot import Slot

log = logging.getLogger("bitmirror.decode")


class Slots(Sequence[Slot]):
    """The slots of a model with a cache of keys and values.

    Attributes: ``current``: the slot that was used last; ``reread``: why more than a page of the latest text had to be read
    again, as a sentence, or None.
    """

    def __init__(self, slots: Sequence[Slot], cache: KVCache, decode_rows: int) -> None:
        """decode_rows: the most rows of an answer in a decode batch."""
        self.current = slots[0]
        self.reread: str | None = None
        #: The pages of each kind that are copied from or to values, besides those of sequences.
        self.pinned: dict[Paging, Counter[int]] = {paging: Counter() for paging in cache.pools}
        self._slots = list(slots)
        self._cache = cache
        self._decode_rows = decode_rows
        self._uses = 0

    @overload
    def __getitem__(self, index: int) -> Slot: ...

    @overload
    def __getitem__(self, index: slice) -> list[Slot]: ...

    def __getitem__(self, index: int | slice) -> Slot | list[Slot]:
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def use(self, slot: Slot) -> None:
        """Record a use of a slot."""
        self._uses += 1
        slot.used, self.current = self._uses, slot

    def free(self, tokens: np.ndarray, salt: str, wanted: int = -1) -> Slot | None:
        """A slot without an owner for ``tokens``, int32 [n], with a salt, or None if all have owners.

        It is slot ``wanted`` if that has no owner.  Otherwise it is the one with the longest common prefix, if that is at
        least half of its sequence, or else the least recently used one.  A sequence with another salt is cleared.
        """

        def worth(slot: Slot) -> tuple[int, int]:
            common = slot.common(tokens, salt)
            return common if 2 * common >= slot.sequence.length else 0, -slot.used

        idle, first = [slot for slot in self._slots if slot.owner is None], tokens[:1].tolist()
        if not idle:
            return None
        oldest = min(idle, key=lambda slot: slot.used)
        # Of many slots, most begin differently.
        alike = [slot for slot in idle if slot.sequence.tokens[:1] == first]
        slot = max([oldest, *alike], key=worth) if alike else oldest
        if wanted >= 0 and self._slots[wanted].owner is None:
            slot = self._slots[wanted]
        slot.sequence.belong(salt)
        return slot

    def rewind(self, slot: Slot, tokens: np.ndarray) -> int:
        """Truncate a slot to the longest reusable prefix of ``tokens``, int32 [n], shorter than n, and return its length."""
        kept, self.reread = slot.rewind(tokens)
        if self.reread is not None:
            log.debug("%s", self.reread)
        self.use(slot)
        return kept

    def has_room(self, slot: Slot, tokens: np.ndarray) -> bool:
        """Whether the pages without a request suffice for ``tokens``, int32 [n], in a slot, and for one more decode batch."""
        short, rows = {}, self._decode_rows
        for paging, pool in self._cache.pools.items():
            needed = min(paging.held(self._cache.n_ctx, rows), -(-(tokens.size + rows) // paging.span))
            if needed > pool.n_free:
                idle = sum(len(other.sequence.pages(paging)) for other in self._slots if other.owner is None)
                short[paging] = needed - pool.n_free - idle
        if max(short.values(), default=0) <= 0:
            return True
        found = slot.shared(tokens)
        return all(n <= (0 if paging.window else found // paging.span) for paging, n in short.items())

    def free_pages(self, besides: Slot | None = None) -> bool:
        """Clear the least recently used slot without an owner, other than ``besides``; returns whether there was one."""
        idle = [slot for slot in self._slots if slot.owner is None and slot.sequence.length and slot is not besides]
        if idle:
            min(idle, key=lambda slot: slot.used).clear()
        return bool(idle)

    def erase(self, slot: Slot, states: States) -> int:
        """Forget what a slot holds, and the pages and snapshots that nobody else uses; returns the number of tokens."""
        length, keys = slot.sequence.length, list(slot.sequence.keys)
        slot.clear()
        for paging, pool in self._cache.pools.items():
            chunks = paging.span // CHUNK
            # Pages of other texts begin alike; a page that another sequence uses stays.
            for key in keys[chunks - 1 :: chunks]:
                pool.erase(key)
        states.remove(keys)
        return length

    def forget_others(self, states: States) -> None:
        """Free the pages and snapshots of texts that no slot contains."""
        for pool in self._cache.pools.values():
            pool.clear()
        states.keep({key for slot in self._slots for key in slot.sequence.keys})

    def check_pages(self) -> None:
        """Raise AssertionError unless every page of the cache is either used by sequences, kept for reuse, or free."""
        for paging, pool in self._cache.pools.items():
            held = [page for slot in self._slots for page in slot.sequence.pages(paging).values()]
            pool.check([*held, *self.pinned[paging].elements()])

    def close(self) -> None:
        """Release all slots and the cache."""
        vars(self).clear()
        self._slots = []
