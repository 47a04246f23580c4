"""Embeddings: texts as vectors, and documents as scores for a query."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.cache.pages import NoPages
from engine.checks import described, require, token_ids, whole
from engine.conversations import Conversations
from engine.decode.slot import Slot
from engine.errors import ContextError, ModelError, UsageError
from engine.models.config import JOINED
from engine.models.pooling import PooledText, normalized, softmax
from engine.text.rerank import RerankPrompt

_POOLING = f'pooling="{JOINED[0]}" or pooling="{JOINED[-1]}"'

Texts = Sequence[str | Sequence[int]]
"""Texts, or the token ids of texts."""


class _Part(NamedTuple):
    """A text that waits: its number, and its token ids."""

    number: int
    ids: list[int]


class Embeddings(Conversations):
    """A model that turns texts into vectors, or scores documents for a query."""

    #: The prompt of a query with a document; None: the model is no reranker.
    rerank_prompt: RerankPrompt | None = None

    def embed(
        self, texts: Texts, *, normalize: bool = True, dimensions: int = 0, truncate: bool | int = False
    ) -> np.ndarray:
        """The vectors of texts.

        The outputs of a text's tokens are joined as the file of the model says: their mean, that of the first token or that
        of the last one. For a model that is not made for embeddings, ``pooling`` of :func:`engine.load` says so. Several
        texts are read in one pass. A vector has the same bits whatever the other texts are, on every device.

        Parameters
        ----------
        texts : sequence of str or sequence of sequence of int
            Texts, or their token ids. The tokens that the model expects around a text are added, but not to token ids.
            Control tokens are not recognized in a text.
        normalize : bool
            Divide each vector by its length.
        dimensions : int
            Keep the first elements of each vector only, for models that are trained for this; 0: keep all.
        truncate : bool or int
            Cut texts that are too long, instead of raising ContextError: True to the length of the context, or to a number
            of tokens. The tokens that the model expects around a text are kept.

        Returns
        -------
        ndarray
            float32 [len(texts), n_embd], or [len(texts), dimensions].

        Raises
        ------
        UsageError
            If the model is not made for embeddings and opened without ``pooling``, if ``texts`` are neither texts nor token
            ids of this model, if a text has no tokens, or if the model is closed.
        ContextError
            If a text does not fit into the context.
        ModelError
            If a vector is not finite.

        Examples
        --------
        >>> import engine
        >>> with engine.load(n_ctx=256, pooling="mean") as llm:
        ...     a, b, c = llm.embed(["def add(a, b):", "def sum(x, y):", "# London"])
        >>> a.shape
        (256,)
        >>> bool(a @ b > a @ c)
        True
        """
        ids = self.embedding_ids(_listed("texts", texts), truncate)
        self.check_dimensions(dimensions)
        return finished(self.pooled(ids), normalize, dimensions)

    def rank(self, query: str, documents: Sequence[str], *, truncate: bool | int = False) -> np.ndarray:
        """How relevant documents are for a query, by a reranker.

        Parameters
        ----------
        query : str
            What is searched for.
        documents : sequence of str
            Texts.
        truncate : bool or int
            Cut documents that are too long, instead of raising ContextError: True to the length of the context, or query
            and document together to a number of tokens.

        Returns
        -------
        ndarray
            A score for each document, float32 [len(documents)]; larger is more relevant. The range depends on the model: it
            is 0 to 1 for Qwen3-Reranker.

        Raises
        ------
        UsageError
            If the model is no reranker, if ``query`` or ``documents`` are not texts, or if the model is closed.
        ContextError
            If a document does not fit into the context together with the query.
        ModelError
            If a score is not finite.
        """
        return self.scores(self.pooled(self.rank_ids(query, _listed("documents", documents), truncate)))

    # --- texts -----------------------------------------------------------------------------------------------------

    def embedding_ids(self, texts: Sequence[object], truncate: bool | int = False) -> list[list[int]]:
        """The token ids of texts for :meth:`embed`, whose errors it raises."""
        self.check_open()
        if problem := self.why_no_vectors:
            raise UsageError(problem)
        most = self._most(truncate)
        return [self._checked_text(f"text {i}", self._ids(text, most)) for i, text in enumerate(texts)]

    def rank_ids(self, query: object, documents: Sequence[object], truncate: bool | int = False) -> list[list[int]]:
        """The token ids of a query with each document for :meth:`rank`, whose errors it raises."""
        self.check_open()
        prompt, most = self.rerank_prompt, self._most(truncate)
        if prompt is None:
            raise UsageError(self.why_no_scores)
        if not isinstance(query, str):
            raise UsageError(f"the query must be a text, not {described(query)}.")
        found = []
        for i, text in enumerate(documents):
            if not isinstance(text, str):
                raise UsageError(f"document {i} must be a text, not {described(text)}.")
            found.append(self._checked_text(f"document {i} with its query", prompt.ids(query, text, most)))
        return found

    @property
    def why_no_vectors(self) -> str:
        """Why the model gives texts no vectors, and what to do, as a sentence; "" if it does."""
        kind, name = self.config.pooling, self.model.gguf.path.name
        if kind == "rank":
            return f"{name} is a reranker, which scores documents: use a model that is made for embeddings."
        return "" if kind else f"{name} is not made for embeddings: use a model that is, or open it with {_POOLING}."

    @property
    def why_no_scores(self) -> str:
        """Why the model scores no documents, and what to do, as a sentence; "" if it does."""
        advice = "use a model that is made for this, such as Qwen3-Reranker or bge-reranker."
        name = self.model.gguf.path.name
        return "" if self.rerank_prompt is not None else f"{name} is no reranker, which scores documents: {advice}"

    def check_dimensions(self, dimensions: int) -> None:
        """Raise UsageError unless vectors of this model can have so many elements; 0: all."""
        width = self.config.n_embd
        require(0 <= whole("dimensions", dimensions) <= width, "dimensions", f"1 to {width}, or 0 for all", dimensions)

    def _ids(self, text: object, most: int) -> list[int]:
        """The token ids of a text, or a copy of its ids; most: the number of tokens to which it is cut, 0: it is not."""
        if not isinstance(text, str):
            ids = token_ids(text, "texts must be a list of texts, or of lists of token ids")
            return ids[:most] if most else ids
        ids = self.tokenizer.encode(text)
        return self.tokenizer.cut(ids, most) if 0 < most < len(ids) else ids

    def _checked_text(self, what: str, ids: list[int]) -> list[int]:
        """``ids``, if they can be read; what: the text that they stand for."""
        if not ids:
            raise UsageError(f"{what} has no tokens; give some text.")
        if len(ids) > self.n_ctx:
            raise ContextError(
                f"{what} has {len(ids)} tokens and the context {self.n_ctx}; shorten it, let it be cut (truncate=True), "
                "or choose a larger context (n_ctx=...).",
                len(ids),
                self.n_ctx,
            )
        self.check_vocabulary(ids)
        return ids

    def _most(self, truncate: bool | int) -> int:
        """The number of tokens to which texts are cut; 0: they are not."""
        if isinstance(truncate, bool):
            return self.n_ctx if truncate else 0
        require(whole("truncate", truncate) > 0, "truncate", "True, False or a number of tokens", truncate)
        return min(truncate, self.n_ctx)

    def scores(self, pooled: np.ndarray) -> np.ndarray:
        """The scores of documents, float32 [n], computed from the result of :meth:`pooled`."""
        if self.config.causal and pooled.shape[1] > 1:
            return np.array([softmax(row)[0] for row in pooled], np.float32)
        return pooled[:, 0].copy()

    # --- passes ----------------------------------------------------------------------------------------------------

    def pooled(self, texts: Sequence[list[int]]) -> np.ndarray:
        """The pooled outputs of texts, float32 [n, n_embd], or the scores of a reranker, float32 [n, labels].

        texts: the token ids of each, from :meth:`embedding_ids` or :meth:`rank_ids`.

        The longest texts come first, and shorter ones fill their passes.  The lock is held for one pass, or one text of
        several passes, at a time.  Raises ModelError if a result is not finite.
        """
        if self.model.stages:
            raise UsageError(
                "embeddings of a model that is divided between devices are not supported: keep it on one, with "
                'device="cpu" or a smaller context.'
            )
        found: list[np.ndarray] = [np.empty(0)] * len(texts)
        waiting = [_Part(number, ids) for number, ids in enumerate(texts)]
        waiting.sort(key=lambda part: len(part.ids))
        while waiting:
            with self.lock:
                self.check_open()
                self.check_free()
                slots = self._idle_slots()
                taken = self._company(waiting, len(slots))
                parts = [waiting.pop(i) for i in taken]
                with self.core.guarded():
                    done = self._read_parts(parts, slots)
            for part, vector in zip(parts, done, strict=False):
                if not np.isfinite(vector).all():
                    raise ModelError(
                        f"the vector of text {part.number} is not finite: the file may be damaged; fetch it again."
                    )
                found[part.number] = vector
            # Where pages were short, the others come again.
            waiting += parts[len(done) :]
            waiting.sort(key=lambda part: len(part.ids))
        width = self.model.output_width
        return np.stack(found) if found else np.empty((0, width), np.float32)

    def _idle_slots(self) -> list[Slot]:
        """The slots that no answer has, at least one; those that were used least recently come first."""
        idle = [slot for slot in self.slots if slot.owner is None]
        if not idle:
            self.core.interrupt()
            idle = [slot for slot in self.slots if slot.owner is None]
        return sorted(idle, key=lambda slot: slot.used)

    def _company(self, waiting: Sequence[_Part], most: int) -> list[int]:
        """The indices of the texts of the next pass, in descending order: the longest, and then the longest ones for which
        there is still room.  waiting: at least one text, the shortest first; most: the number of slots."""
        taken, lengths = [len(waiting) - 1], [len(part.ids) for part in waiting]
        room, end = self.model.company_rows - lengths[-1], len(waiting) - 1
        while len(taken) < most and (at := bisect_right(lengths, room, 0, end)) > 0:
            taken.append(at - 1)
            room, end = room - lengths[at - 1], at - 1
        return taken

    def _read_parts(self, parts: Sequence[_Part], slots: Sequence[Slot]) -> list[np.ndarray]:
        """The pooled outputs of the first of these texts, at least one: of all, unless pages run out.  What the slots
        contained is lost."""
        self.slots.use(slots[0])
        while True:
            used = slots[: len(parts)]
            for slot in used:
                slot.clear()
            try:
                if len(parts) > 1:
                    rows = self.model.read_texts([(s.sequence, p.ids) for s, p in zip(used, parts, strict=True)])
                    return [self._pooled_rows(each) for each in rows]
                return [self._long(parts[0].ids, used[0])]
            except NoPages:
                if len(parts) > 1:
                    parts = parts[: len(parts) // 2]
                elif not self.slots.free_pages(besides=used[0]):
                    raise
            finally:
                for slot in used:
                    slot.clear()

    def _long(self, ids: list[int], slot: Slot) -> np.ndarray:
        """The pooled outputs of one text, which may need several passes."""
        pool, first, model = PooledText(self._kind), 0, self.model
        while first < len(ids):
            most = model.company_rows if model.companies else model.next_rows(len(ids) - first)
            part = ids[first : first + most]
            pool.add(model.read_texts([(slot.sequence, part)])[0])
            slot.sequence.commit(part)
            first += len(part)
        return pool.vector

    def _pooled_rows(self, rows: np.ndarray) -> np.ndarray:
        pool = PooledText(self._kind)
        pool.add(rows)
        return pool.vector

    @property
    def _kind(self) -> str:
        """How outputs are joined: those of a reranker are scores after each token, of which one counts."""
        kind = self.config.pooling
        return ("last" if self.config.causal else "cls") if kind == "rank" else kind


def finished(pooled: np.ndarray, normalize: bool, dimensions: int) -> np.ndarray:
    """The vectors of pooled outputs, float32 [n, n_embd]: their first ``dimensions`` elements, 0: all, divided by their
    length if ``normalize``."""
    vectors = pooled[:, : dimensions or pooled.shape[1]].copy()
    if normalize:
        for vector in vectors:
            vector[:] = normalized(vector)
    return vectors


def _listed(name: str, texts: object) -> list[object]:
    """A sequence of texts as a list.  Raises UsageError for a single text."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, (Sequence, np.ndarray)):
        raise UsageError(f"{name} must be a list of texts, not {described(texts)}.")
    return list(texts)
