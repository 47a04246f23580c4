"""A sequence: the tokens that a model has read, and the cache entries that belong to them."""

import hashlib
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from engine.cache.kv import KVCache
from engine.cache.pages import Paging
from engine.cache.types import CHUNK
from engine.errors import ContextError


def first_key(salt: str) -> bytes:
    """The key of the empty text with a salt, from which the keys of all texts with this salt are derived.  It differs from
    the keys of all chunks of tokens."""
    return (
        hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"salt").digest() if salt else b""
    )


def keys_of(tokens: SequenceOf[int] | np.ndarray, begin: bytes, first: SequenceOf[bytes] = ()) -> list[bytes]:
    """The keys of the prefixes of a text that end after each full chunk.

    A key is a hash of the key of the prefix before the chunk and of the tokens in the chunk.

    tokens: a sequence of ids, or an array int32 [n].
    begin: the key of the empty text.
    first: the keys of the first chunks, if they are known.
    """
    keys = list(first)
    rest = np.asarray(tokens[CHUNK * len(keys) : len(tokens) // CHUNK * CHUNK], np.int32).tobytes()
    key, size = keys[-1] if keys else begin, 4 * CHUNK
    for at in range(0, len(rest), size):
        key = hashlib.blake2b(rest[at : at + size], key=key, digest_size=32).digest()
        keys.append(key)
    return keys


class Sequence:
    """The tokens whose keys, values and states are in the cache of a model: token i is stored at position i.

    Only the sequence records the number of tokens and the pages that hold them.  A pass first claims the positions that it is
    about to store, because it may overwrite older positions in rings.  When it has stored them, its tokens are committed.  If
    a pass fails or is interrupted, the next pass claims the same positions again.

    A sequence shares pages only with sequences that have the same salt.
    """

    def __init__(self, cache: KVCache, slot: int = 0) -> None:
        """Create an empty sequence.

        slot: the index of the sequence in the page tables and rings of ``cache``.  No other sequence may have the same slot.
        """
        #: The tokens at positions 0 .. length - 1.
        self.tokens: list[int] = []
        self.slot = slot
        #: The number of times that ``tokens`` has changed.
        self.changes = 0
        #: The salt, and the key of the empty text with this salt.
        self.salt, self.begin = "", first_key("")
        self._cache = cache
        # The oldest position in each kind of ring.
        self._oldest = dict.fromkeys(cache.rings, 0)
        self._pages: dict[Paging, dict[int, int]] = {paging: {} for paging in cache.pools}
        # The keys of the full chunks whose pages are settled.
        self._keys: list[bytes] = []
        # The number of chunks that were dropped from layers without a window, and the number of tokens at that time.
        self._dropped = self._thinned_at = 0
        # ``tokens`` as an array, and the value of ``changes`` when it was made.
        self._array, self._array_changes = np.empty(0, np.int32), 0

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def array(self) -> np.ndarray:
        """``tokens`` as an array int32 [length], which is cached until they change."""
        if self._array_changes != self.changes:
            self._array, self._array_changes = np.array(self.tokens, np.int32), self.changes
        return self._array

    @property
    def keys(self) -> SequenceOf[bytes]:
        """The keys of the full chunks whose pages are settled."""
        return self._keys

    @property
    def thinned(self) -> bool:
        """Whether layers without a window have dropped some of the tokens."""
        return self._dropped > 0

    @property
    def dropped(self) -> int:
        """The number of positions that layers without a window have dropped."""
        return CHUNK * self._dropped

    def thin(self, kept: SequenceOf[int]) -> None:
        """Drop the pages of all chunks but ``kept`` from layers without a window (``engine/cache/thinning.py``).

        The tokens so far stay the beginning of the sequence until it is emptied.  Later pages are not shared, because their
        contents depend on what was dropped.

        kept: chunks in ascending order, among them the last one.
        """
        assert not self.thinned
        end, self._thinned_at = kept[-1] + 1, self.length
        self._dropped = end - len(kept)
        for paging, held in self._pages.items():
            if paging.window:
                continue
            for chunk in sorted(set(range(end)).difference(kept)):
                self._cache.pools[paging].give_back(held.pop(chunk))
            for place, chunk in enumerate(held):
                self._cache.pools[paging].place(self.slot, place, held[chunk])
        self._cache.thin(self.slot, CHUNK * self._dropped)

    def belong(self, salt: str) -> None:
        """Set the salt.  If it changes, all tokens are removed.  No pass that stores tokens of this sequence may be in
        flight."""
        if salt != self.salt:
            self.truncate(0)
            self.salt, self.begin = salt, first_key(salt)

    def pages(self, paging: Paging) -> Mapping[int, int]:
        """The pages of one kind that the sequence holds, by chunk."""
        return self._pages[paging]

    def claim(self, first: int, count: int) -> None:
        """Claim positions [first, first + count) for a pass that is about to store them.

        Raises ContextError if ``first`` is not the length of the sequence, if the pass has too many rows, or if it exceeds
        the context.  Raises NoPages if all pages of the cache are in use.
        """
        cache = self._cache
        if first != self.length:
            raise ContextError(f"positions must continue at {self.length}, not at {first}.")
        if count > cache.max_rows:
            raise ContextError(f"a batch holds at most {cache.max_rows} rows, not {count}.")
        if first + count > cache.n_ctx:
            raise ContextError(f"position {first + count - 1} is outside the context of {cache.n_ctx}.")
        self.reserve(first + count)
        self.overwrite(first + count)

    def reserve(self, end: int) -> None:
        """Allocate pages for all positions before ``end`` that a pass after the last token reads or stores.

        Raises NoPages if all pages of the cache are in use.
        """
        for (paging, held), pool in zip(self._pages.items(), self._cache.pools.values(), strict=True):
            if paging.window:
                self._drop(paging, 0, paging.passed(self.length))
            first = next(reversed(held)) + 1 if held else paging.passed(self.length)
            for chunk in range(first, -(-min(end, self._cache.n_ctx) // paging.span)):
                self._hold(paging, chunk, pool.take())

    def _hold(self, paging: Paging, chunk: int, page: int) -> None:
        self._pages[paging][chunk] = page
        place = chunk if paging.window else chunk - self._dropped
        self._cache.pools[paging].place(self.slot, place, page)

    def commit(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``, which a pass has stored at the first of the claimed positions.  The other claimed positions
        become free again."""
        self.tokens.extend(tokens)
        self.changes += 1

    def settle(self) -> None:
        """Mark all tokens as final, so that other sequences can share the full pages, unless the sequence is thinned."""
        if self.thinned:
            return
        known = len(self._keys)
        if self.length // CHUNK == known:
            return
        self._keys = keys_of(self.tokens, self.begin, self._keys)
        for paging, held in self._pages.items():
            chunks = paging.span // CHUNK
            for chunk in range(known // chunks, len(self._keys) // chunks):
                if chunk in held:
                    self._cache.pools[paging].settle(held[chunk], self._keys[chunks * (chunk + 1) - 1])

    def find(
        self,
        tokens: SequenceOf[int] | np.ndarray,
        states: Container[bytes] | None = None,
        stored: Callable[[Paging, bytes], bool] | None = None,
    ) -> tuple[int, list[bytes]]:
        """Find the longest prefix of a text that is stored in pages, of any sequence with the same salt, in all layers.

        tokens: a sequence of ids, or an array int32 [n].
        states: the keys of texts for which the contents of rings are known; None: there are no rings.
        stored: whether a page of a kind with a key is stored elsewhere; None: none is.

        Returns the length of the prefix, a multiple of the spans of all pages, and the keys of its chunks.
        """
        keys, pools = keys_of(tokens, self.begin), self._cache.pools

        def has(paging: Paging, key: bytes) -> bool:
            return pools[paging].find(key) is not None or (stored is not None and stored(paging, key))

        most = CHUNK * len(keys)
        for paging in pools:
            if not paging.window:
                chunks = paging.span // CHUNK
                whole = range(chunks - 1, len(keys), chunks)
                found = next((n for n, at in enumerate(whole) if not has(paging, keys[at])), len(whole))
                most = min(most, paging.span * found)
        spans = math.lcm(*(paging.span for paging in self._cache.pools), CHUNK)
        for length in range(most // spans * spans, 0, -spans):
            known = states is None or keys[length // CHUNK - 1] in states
            if known and all(has(paging, key) for paging, key in self.needed(length, keys) if paging.window):
                return length, keys[: length // CHUNK]
        return 0, []

    def needed(self, length: int, keys: SequenceOf[bytes]) -> Iterator[tuple[Paging, bytes]]:
        """The kinds and keys of the pages that a row at position ``length``, a multiple of all spans, reads.  keys: those of
        the chunks before it."""
        for paging in self._cache.pools:
            chunks = paging.span // CHUNK
            for chunk in self._chunks(paging, length):
                yield paging, keys[chunks * (chunk + 1) - 1]

    @staticmethod
    def _chunks(paging: Paging, length: int) -> range:
        """The chunks of a kind that a row at position ``length`` reads, without its own."""
        first = max(0, length - paging.window + 1) // paging.span if paging.window else 0
        return range(first, length // paging.span)

    def adopt(self, tokens: SequenceOf[int], keys: SequenceOf[bytes]) -> None:
        """Replace all tokens by the prefix ``tokens``, which :meth:`find` has found, and share its pages.

        Rings are not filled.  keys: the keys of the chunks of the prefix.
        """
        self.truncate(0)
        for paging, pool in self._cache.pools.items():
            chunks = paging.span // CHUNK
            for chunk in self._chunks(paging, len(tokens)):
                page = pool.find(keys[chunks * (chunk + 1) - 1])
                assert page is not None
                pool.share(page)
                self._hold(paging, chunk, page)
        self.tokens, self._keys = list(tokens), list(keys)
        self.changes += 1
        self._oldest = {ring: max(0, len(tokens) - ring.back) for ring in self._oldest}

    def take_up(self, tokens: SequenceOf[int], pages: Mapping[Paging, Mapping[int, int]]) -> None:
        """Replace all tokens by ``tokens``, which are stored in pages that nobody else uses, and which become those of this
        sequence.

        pages: for each kind, the pages by chunk, in ascending order.  Rings are not filled.
        """
        self.truncate(0)
        for paging, own in pages.items():
            for chunk, page in own.items():
                self._hold(paging, chunk, page)
        self.tokens = list(tokens)
        self.changes += 1
        self._oldest = {ring: max(0, len(tokens) - ring.back) for ring in self._oldest}

    def _drop(self, paging: Paging, first: int, end: int | None = None) -> None:
        """Free the pages of the chunks [first, end), or of all chunks from ``first`` on if ``end`` is None.

        The last pages are freed first, and therefore reused first, because shorter prefixes are shared more often.
        """
        held = self._pages[paging]
        for chunk in [chunk for chunk in reversed(held) if chunk >= first and (end is None or chunk < end)]:
            self._cache.pools[paging].give_back(held.pop(chunk))

    def overwrite(self, end: int) -> None:
        """Record that positions before ``end`` have been or will be written, which overwrites older positions in rings."""
        for ring, oldest in self._oldest.items():
            self._oldest[ring] = max(oldest, end - ring.capacity)

    def can_truncate(self, length: int) -> bool:
        """Whether the sequence can be truncated to ``length`` tokens.

        Rings and windows must still contain what a pass at position ``length`` needs.  A page that the pass would write to
        must not be shared.
        """
        if length == 0:
            return True
        return (
            self._thinned_at <= length <= self.length
            and all(length - ring.back >= oldest or oldest == 0 for ring, oldest in self._oldest.items())
            and all(self._holds(paging, length) for paging in self._pages)
        )

    def _holds(self, paging: Paging, length: int) -> bool:
        """Whether the pages contain what a row at position ``length`` reads, and the row may be written to its page."""
        held = self._pages[paging]
        first, end = max(0, length - paging.window + 1) // paging.span, -(-length // paging.span)
        if paging.window and not all(chunk in held for chunk in range(first, end)):
            return False
        return length % paging.span == 0 or not self._cache.pools[paging].shared(held[length // paging.span])

    @property
    def intact(self) -> bool:
        """Whether the cache contains what the next pass needs.  An interrupted pass may have overwritten it."""
        return self.can_truncate(self.length)

    def truncate(self, length: int) -> None:
        """Remove the tokens from position ``length`` on, and free the pages that contain no other tokens.  No pass that
        stores these tokens may be in flight.

        Raises ContextError if there are fewer tokens, or if entries before ``length`` that a pass needs are no longer stored.
        """
        if not 0 <= length <= self.length:
            raise ContextError(f"a sequence of {self.length} tokens cannot be cut to {length}.")
        if not self.can_truncate(length):
            raise ContextError(f"what precedes position {length} is gone; start again from 0.")
        self._cut(length)
        for paging in self._pages:
            self._drop(paging, -(-length // paging.span))
        if length == 0:
            self._oldest = dict.fromkeys(self._oldest, 0)
            if self.thinned:
                self._dropped = self._thinned_at = 0
                self._cache.thin(self.slot, 0)

    def _cut(self, length: int) -> None:
        """Remove tokens, and the key of each page that the next tokens are written to."""
        del self.tokens[length:]
        self.changes += 1
        del self._keys[length // CHUNK :]
        for paging, held in self._pages.items():
            chunk = length // paging.span
            if length % paging.span and chunk in held and not self._cache.pools[paging].shared(held[chunk]):
                self._cache.pools[paging].forget(held[chunk])

    def can_resume(self, length: int) -> bool:
        """Whether layers without a window still store the positions before ``length``, and the page at ``length`` may be
        written."""
        pools = self._cache.pools
        return (
            not self.thinned
            and length <= self.length
            and all(
                paging.window or length % paging.span == 0 or not pools[paging].shared(held[length // paging.span])
                for paging, held in self._pages.items()
            )
        )

    def resume(self, length: int) -> None:
        """Remove the tokens from position ``length`` on, and continue there with restored rings and windows.

        Pages are allocated for the windows.  The caller must then restore the entries of rings and windows that a pass at
        ``length`` needs.  Older entries are lost.  Layers without a window keep their pages.

        Raises ContextError if there are fewer tokens, and NoPages if all pages of the cache are in use.
        """
        if length > self.length:
            raise ContextError(f"a sequence of {self.length} tokens cannot be continued after {length}.")
        self._cut(length)
        self._oldest = {ring: max(0, length - ring.back) for ring in self._oldest}
        for paging in self._pages:
            self._drop(paging, 0 if paging.window else -(-length // paging.span))
        self.reserve(length)
