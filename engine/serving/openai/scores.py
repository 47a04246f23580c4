"""The log-probabilities of texts, as ``/v1/completions`` reports them."""

from collections.abc import Iterable, Sequence
from typing import Any

from engine.sampling.token_logprob import TokenLogprob
from engine.serving.openai.shapes import finite
from engine.text.tokenizer import Tokenizer, TokenStream

NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""What is reported: a list with one entry per token each."""


class Scores:
    """The log-probabilities of one text: of a prompt if it is echoed, then of the answer, piece by piece.

    top: the number of most probable tokens to report per token.  The token itself is always among them.
    """

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._decoder = tokenizer.stream()
        self._length = 0

    def prompt(self, ids: Sequence[int], scores: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """Those of a prompt.  Its first token has none; ``scores`` are those of the others."""
        decoder = self._tokenizer.stream(begins_text=True)
        found = self._found(ids, [None, *scores], decoder)
        self._length += len(decoder.flush())
        return found

    def answer(self, tokens: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """Those of the next tokens of the answer."""
        return self._found([token.id for token in tokens], tokens, self._decoder)

    def _found(
        self, ids: Sequence[int], scores: Sequence[TokenLogprob | None], decoder: TokenStream
    ) -> dict[str, list[Any]]:
        found = joined([])
        for id, score in zip(ids, scores, strict=True):
            found["tokens"].append(token_text(self._tokenizer, id))
            found["token_logprobs"].append(None if score is None else finite(score.logprob))
            found["top_logprobs"].append(None if score is None else self._likely(score))
            found["text_offset"].append(self._length)
            self._length += len(decoder.feed(id))
        return found

    def _likely(self, token: TokenLogprob) -> dict[str, float]:
        """The most probable tokens with the token itself.  Whether it is the most probable one shows in equal numbers."""
        likely: dict[str, float] = {}
        for each in (*token.top[: self._top], token):
            # Of tokens with the same text the most probable one, which comes first, is reported.
            likely.setdefault(token_text(self._tokenizer, each.id), finite(each.logprob))
        return likely


def joined(parts: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The reports of neighbouring pieces of a text as one."""
    found: dict[str, list[Any]] = {name: [] for name in NAMES}
    for part in parts:
        for name in NAMES:
            found[name] += part[name]
    return found


def token_text(tokenizer: Tokenizer, id: int) -> str:
    r"""The text of a token; ``bytes:\xe2\x80`` if it is only a part of a character, as OpenAI writes it."""
    data = tokenizer.token_bytes(id, special=True)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
