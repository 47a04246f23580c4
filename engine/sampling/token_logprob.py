"""A token with its log-probability."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer, or a token that could have taken its place, with its log-probability.

    Attributes
    ----------
    id : int
        Token id.
    text : str
        Text that the token adds. A part of a character is U+FFFD, and control tokens appear as the vocabulary spells
        them.
    logprob : float
        Natural logarithm of the token's probability: of the softmax over the whole vocabulary, before temperature,
        penalties, biases and filters. 0 or less; ``-inf`` if the probability is 0.
    top : tuple of TokenLogprob
        The most probable tokens at this position, most probable first, ties by lower id. Their own ``top`` is empty.

    Examples
    --------
    >>> import engine
    >>> llm = engine.load(n_ctx=256)
    >>> answer = llm.complete("def add(a, b):\\n    return", max_tokens=1, temperature=0, logprobs=2)
    >>> for likely in answer.logprobs[0].top:
    ...     print(repr(likely.text), round(likely.logprob, 2))
    ' a' -0.48
    ' b' -2.87
    """

    id: int
    text: str
    logprob: float
    top: tuple["TokenLogprob", ...] = ()
