"""A sequence: the tokens that a model has read, and what its memory holds of them."""

from collections.abc import Iterable

from engine.cache.kv import KVCache
from engine.errors import ContextError


class Sequence:
    """The tokens whose keys, values and states a model's memory holds: token i is stored at position i.

    It is the only place that knows how many there are.  A pass first claims the positions that it is about to store, since
    rings lose then what was stored in their place, and commits its tokens when they are stored.  What a pass that fails or
    is interrupted has claimed is claimed again by the next one.
    """

    def __init__(self, cache: KVCache) -> None:
        #: The tokens at positions 0 .. length - 1.
        self.tokens: list[int] = []
        self._cache = cache
        # The oldest position that each kind of ring still holds.
        self._oldest = dict.fromkeys(cache.rings, 0)

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def claim(self, first: int, count: int) -> None:
        """Claim positions [first, first + count) for a pass that is about to store them.

        Raises ContextError if first is not ``length``, if the pass has too many rows, or if it exceeds the context.
        """
        cache = self._cache
        if first != self.length:
            raise ContextError(f"positions must continue at {self.length}, not at {first}.")
        if count > cache.max_rows:
            raise ContextError(f"a batch holds at most {cache.max_rows} rows, not {count}.")
        if first + count > cache.n_ctx:
            raise ContextError(f"position {first + count - 1} is outside the context of {cache.n_ctx}.")
        self.overwrite(first + count)

    def commit(self, tokens: Iterable[int]) -> None:
        """Record that ``tokens`` are stored at the first of the positions that were claimed; the rest is free again."""
        self.tokens.extend(tokens)

    def overwrite(self, end: int) -> None:
        """Record that positions before ``end`` have been or will be written: rings lose what was stored in their place."""
        for ring, oldest in self._oldest.items():
            self._oldest[ring] = max(oldest, end - ring.capacity)

    def can_truncate(self, length: int) -> bool:
        """Whether the sequence can be cut to ``length`` tokens: rings must still hold what a pass there needs."""
        if length == 0:
            return True
        return length <= self.length and all(
            length - ring.back >= oldest or oldest == 0 for ring, oldest in self._oldest.items()
        )

    @property
    def intact(self) -> bool:
        """Whether the next pass finds what it needs: a pass that was interrupted may have overwritten it."""
        return self.can_truncate(self.length)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position ``length`` on.  Raises ContextError if a ring no longer holds what precedes it."""
        if not 0 <= length <= self.length:
            raise ContextError(f"a sequence of {self.length} tokens cannot be cut to {length}.")
        if not self.can_truncate(length):
            raise ContextError(f"what precedes position {length} is gone; start again from 0.")
        del self.tokens[length:]
        if length == 0:
            self._oldest = dict.fromkeys(self._oldest, 0)

    def resume(self, length: int) -> None:
        """Forget the tokens from position ``length`` on, of which the rings again hold what a pass there needs, and nothing
        before it; all other layers still hold their positions."""
        if length > self.length:
            raise ContextError(f"a sequence of {self.length} tokens cannot be continued after {length}.")
        del self.tokens[length:]
        self._oldest = {ring: max(0, length - ring.back) for ring in self._oldest}
