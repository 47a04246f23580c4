"""Texts that are read and not continued: how probable a model finds their tokens."""

from typing import Any, overload

from engine.answers import Answers
from engine.checks import require, token_ids, whole
from engine.decode.generation import Generation, request_of
from engine.decode.scores import PromptScores
from engine.options import Prompt, Prompts
from engine.sampling.token_logprob import TokenLogprob
from engine.several import each, finish, is_several


class ScoringModel(Answers):
    """A model that scores texts."""

    @overload
    def score(self, texts: Prompt, *, logprobs: int = 0, cache_salt: str = "") -> list[TokenLogprob]: ...
    @overload
    def score(self, texts: Prompts, *, logprobs: int = 0, cache_salt: str = "") -> list[list[TokenLogprob]]: ...
    def score(self, texts: Any, *, logprobs: int = 0, cache_salt: str = "") -> Any:
        """The log-probabilities of the tokens of a text, or of each of several.

        Each text is read once, like a prompt, and several are read together, ``parallel`` of :func:`engine.load` at a time.
        The numbers are those that ``logprobs`` of :meth:`generate` reports for the same tokens, bit for bit, and do not
        depend on the other texts.

        Parameters
        ----------
        texts : str, sequence of int, or list of them
            Text or token ids, or a list of them.
        logprobs : int
            How many of the most probable tokens to record per token.
        cache_salt : str
            As in :meth:`generate`.

        Returns
        -------
        list of TokenLogprob, or list of list
            One entry per token from the second one on, since nothing comes before the first. For a list of texts, one list
            for each.

        Raises
        ------
        UsageError
            If an argument is out of range or of a wrong type, or if the model is closed.
        ContextError
            If a text does not fit into the context.

        Examples
        --------
        >>> import engine
        >>> llm = engine.load(n_ctx=256)
        >>> good, bad = llm.score(["def add(a, b):", "def add(a, b;"])
        >>> good[-1].text, round(good[-1].logprob, 2)
        ('):', -3.2)
        >>> sum(token.logprob for token in good) > sum(token.logprob for token in bad)
        True
        """
        self.check_open()
        n_vocab = self.config.n_vocab
        require(0 <= whole("logprobs", logprobs) <= n_vocab, "logprobs", f"between 0 and {n_vocab}", logprobs)
        collected: list[PromptScores] = []

        def make(text: Prompt) -> Generation:
            ids = self.tokenize(text) if isinstance(text, str) else token_ids(text)
            self.check_ids(ids)
            answer = self.generate(ids, max_tokens=0, cache_salt=cache_salt)
            request_of(answer).on_logits = scores = PromptScores(self.tokenizer, ids, logprobs)
            collected.append(scores)
            return answer

        several = is_several(texts)
        with self.answering():
            finish(each("text", texts, make) if several else [make(texts)], len(self.slots))
        found = [scores.found for scores in collected]
        return found if several else found[0]
