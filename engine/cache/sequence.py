"""A sequence: the tokens that a model has read, and what its memory holds of them."""

import hashlib
import math
from collections.abc import Container, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np

from engine.cache.kv import KVCache
from engine.cache.pages import Paging
from engine.cache.types import CHUNK
from engine.errors import ContextError


def first_key(salt: str) -> bytes:
    """The key of an empty text with a salt, on which the keys of all texts with this salt depend.  No chunk of tokens has the
    same key."""
    return (
        hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"salt").digest() if salt else b""
    )


def keys_of(tokens: SequenceOf[int] | np.ndarray, begin: bytes, first: SequenceOf[bytes] = ()) -> list[bytes]:
    """The keys of a text after each whole chunk: a key follows from that of the text before the chunk, and from the tokens
    of the chunk.  tokens: int32 [n] if an array; begin: the key of no text; first: those of the first chunks, if known."""
    keys = list(first)
    rest = np.asarray(tokens[CHUNK * len(keys) : len(tokens) // CHUNK * CHUNK], np.int32).tobytes()
    key, size = keys[-1] if keys else begin, 4 * CHUNK
    for at in range(0, len(rest), size):
        key = hashlib.blake2b(rest[at : at + size], key=key, digest_size=32).digest()
        keys.append(key)
    return keys


class Sequence:
    """The tokens whose keys, values and states a model's memory holds: token i is stored at position i.

    It is the only place that knows how many there are, and which pages hold them.  A pass first claims the positions that it
    is about to store, since rings lose then what was stored in their place, and commits its tokens when they are stored.
    What a pass that fails or is interrupted has claimed is claimed again by the next one.

    It shares pages only with sequences of the same salt.
    """

    def __init__(self, cache: KVCache, slot: int = 0) -> None:
        """slot: its place in the tables of pages and among the rings, which it shares with no other sequence."""
        #: The tokens at positions 0 .. length - 1.
        self.tokens: list[int] = []
        self.slot = slot
        #: The number of changes of ``tokens``.
        self.changes = 0
        #: Its salt, and the key of no text that follows from it.
        self.salt, self.begin = "", first_key("")
        self._cache = cache
        # The oldest position that each kind of ring still holds.
        self._oldest = dict.fromkeys(cache.rings, 0)
        self._pages: dict[Paging, dict[int, int]] = {paging: {} for paging in cache.pools}
        # The keys of the whole chunks whose pages are settled.
        self._keys: list[bytes] = []
        # ``tokens`` as they were after so many changes.
        self._array, self._array_changes = np.empty(0, np.int32), 0

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def array(self) -> np.ndarray:
        """``tokens`` as int32 [length], made again only after a change."""
        if self._array_changes != self.changes:
            self._array, self._array_changes = np.array(self.tokens, np.int32), self.changes
        return self._array

    @property
    def keys(self) -> SequenceOf[bytes]:
        """The keys of its whole chunks whose pages are settled."""
        return self._keys

    def belong(self, salt: str) -> None:
        """Give it a salt.  What it holds is forgotten if it had another one.  No pass that stores its tokens may be in
        flight."""
        if salt != self.salt:
            self.truncate(0)
            self.salt, self.begin = salt, first_key(salt)

    def pages(self, paging: Paging) -> Mapping[int, int]:
        """The pages of one kind that it holds, by chunk."""
        return self._pages[paging]

    def claim(self, first: int, count: int) -> None:
        """Claim positions [first, first + count) for a pass that is about to store them.

        Raises ContextError if first is not ``length``, if the pass has too many rows, or if it exceeds the context, and
        NoPages if the pages of the cache are all in use.
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
        """Take pages for all positions before ``end`` that a pass after the last token reads or stores.  Raises NoPages."""
        for paging, pool in self._cache.pools.items():
            held = self._pages[paging]
            if paging.window:
                self._drop(paging, 0, paging.passed(self.length))
            first = next(reversed(held)) + 1 if held else paging.passed(self.length)
            for chunk in range(first, -(-min(end, self._cache.n_ctx) // paging.span)):
                self._hold(paging, chunk, pool.take())

    def _hold(self, paging: Paging, chunk: int, page: int) -> None:
        self._pages[paging][chunk] = page
        self._cache.pools[paging].place(self.slot, chunk, page)

    def commit(self, tokens: Iterable[int]) -> None:
        """Record that ``tokens`` are stored at the first of the positions that were claimed; the rest is free again."""
        self.tokens.extend(tokens)
        self.changes += 1

    def settle(self) -> None:
        """Note that its tokens are certain, so that others can share its whole pages."""
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
        self, tokens: SequenceOf[int] | np.ndarray, states: Container[bytes] | None = None
    ) -> tuple[int, list[bytes]]:
        """How many of the first tokens of a text all layers with pages hold for some sequence of its salt, and the keys of
        its chunks; states: the keys of texts after which the content of rings is known, None: there are no rings."""
        keys = keys_of(tokens, self.begin)
        most = CHUNK * len(keys)
        for paging, pool in self._cache.pools.items():
            if not paging.window:
                chunks = paging.span // CHUNK
                whole = range(chunks - 1, len(keys), chunks)
                found = next((n for n, at in enumerate(whole) if pool.find(keys[at]) is None), len(whole))
                most = min(most, paging.span * found)
        spans = math.lcm(*(paging.span for paging in self._cache.pools), CHUNK)
        for length in range(most // spans * spans, 0, -spans):
            known = states is None or keys[length // CHUNK - 1] in states
            if known and all(self._found(paging, keys, length) for paging in self._pages if paging.window):
                return length, keys[: length // CHUNK]
        return 0, []

    def _found(self, paging: Paging, keys: SequenceOf[bytes], length: int) -> bool:
        """Whether there are pages for a window before ``length``."""
        wanted = range(max(0, length - paging.window + 1) // CHUNK, length // CHUNK)
        return all(self._cache.pools[paging].find(keys[chunk]) is not None for chunk in wanted)

    def adopt(self, tokens: SequenceOf[int], keys: SequenceOf[bytes]) -> None:
        """Begin with tokens that other sequences have read, a whole number of chunks with these keys, all of which
        :meth:`find` has found; what it held is forgotten.  Rings are not filled."""
        self.truncate(0)
        for paging, pool in self._cache.pools.items():
            chunks, length = paging.span // CHUNK, len(tokens)
            first = max(0, length - paging.window + 1) // paging.span if paging.window else 0
            for chunk in range(first, length // paging.span):
                page = pool.find(keys[chunks * (chunk + 1) - 1])
                assert page is not None
                pool.share(page)
                self._hold(paging, chunk, page)
        self.tokens, self._keys = list(tokens), list(keys)
        self.changes += 1
        self._oldest = {ring: max(0, len(tokens) - ring.back) for ring in self._oldest}

    def _drop(self, paging: Paging, first: int, end: int | None = None) -> None:
        """Give the pages of the chunks [first, end) back; None: all from ``first`` on.  The last ones first: the text before
        them is wanted more often."""
        held = self._pages[paging]
        for chunk in [chunk for chunk in reversed(held) if chunk >= first and (end is None or chunk < end)]:
            self._cache.pools[paging].give_back(held.pop(chunk))

    def overwrite(self, end: int) -> None:
        """Record that positions before ``end`` have been or will be written: rings lose what was stored in their place."""
        for ring, oldest in self._oldest.items():
            self._oldest[ring] = max(oldest, end - ring.capacity)

    def can_truncate(self, length: int) -> bool:
        """Whether the sequence can be cut to ``length`` tokens: rings and windows must still hold what a pass there needs,
        and a page of which only a part stays must not be shared."""
        if length == 0:
            return True
        return (
            length <= self.length
            and all(length - ring.back >= oldest or oldest == 0 for ring, oldest in self._oldest.items())
            and all(self._holds(paging, length) for paging in self._pages)
        )

    def _holds(self, paging: Paging, length: int) -> bool:
        """Whether it holds what a row after ``length`` tokens reads, and may write to the page of that row."""
        held = self._pages[paging]
        first, end = max(0, length - paging.window + 1) // paging.span, -(-length // paging.span)
        if paging.window and not all(chunk in held for chunk in range(first, end)):
            return False
        return length % paging.span == 0 or not self._cache.pools[paging].shared(held[length // paging.span])

    @property
    def intact(self) -> bool:
        """Whether the next pass finds what it needs: a pass that was interrupted may have overwritten it."""
        return self.can_truncate(self.length)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position ``length`` on, and give the pages back that hold no others.  No pass that stores
        them may be in flight.  Raises ContextError if what precedes ``length`` is no longer held."""
        if not 0 <= length <= self.length:
            raise ContextError(f"a sequence of {self.length} tokens cannot be cut to {length}.")
        if not self.can_truncate(length):
            raise ContextError(f"what precedes position {length} is gone; start again from 0.")
        self._cut(length)
        for paging in self._pages:
            self._drop(paging, -(-length // paging.span))
        if length == 0:
            self._oldest = dict.fromkeys(self._oldest, 0)

    def _cut(self, length: int) -> None:
        """Forget tokens, and that pages are settled which the next ones are written to."""
        del self.tokens[length:]
        self.changes += 1
        del self._keys[length // CHUNK :]
        for paging, held in self._pages.items():
            chunk = length // paging.span
            if length % paging.span and chunk in held and not self._cache.pools[paging].shared(held[chunk]):
                self._cache.pools[paging].forget(held[chunk])

    def can_resume(self, length: int) -> bool:
        """Whether layers without a window hold the positions before ``length``, in pages that it may write to there."""
        pools = self._cache.pools
        return length <= self.length and all(
            paging.window or length % paging.span == 0 or not pools[paging].shared(held[length // paging.span])
            for paging, held in self._pages.items()
        )

    def resume(self, length: int) -> None:
        """Forget the tokens from position ``length`` on.  Rings and windows will again hold what a pass there needs, and
        nothing before it; all other layers still hold their positions."""
        if length > self.length:
            raise ContextError(f"a sequence of {self.length} tokens cannot be continued after {length}.")
        self._cut(length)
        self._oldest = {ring: max(0, length - ring.back) for ring in self._oldest}
        for paging in self._pages:
            self._drop(paging, 0 if paging.window else -(-length // paging.span))
        self.reserve(length)
