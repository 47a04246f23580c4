"""Which tokens an answer may consist of: ``min_tokens``, ``stop_token_ids`` and ``allowed_token_ids``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.checks import described
from engine.serving.errors import Refusal
from engine.serving.fields import Fields, is_token_id

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.sampling.params import LogitsProcessor


@dataclass(frozen=True)
class Permitted:
    """The tokens that an answer may consist of.

    least: tokens before which none ends the answer; ends: tokens that end it besides the model's own; allowed: the tokens
    that may be chosen, None: all.
    """

    least: int = 0
    ends: frozenset[int] = frozenset()
    allowed: frozenset[int] | None = None

    def processors(self, llm: "LLM", n_prompt: int) -> list["LogitsProcessor"]:
        """What changes the logits of an answer to a prompt of ``n_prompt`` tokens."""
        made: list[LogitsProcessor] = []
        if self.allowed is not None:
            banned = np.ones(llm.config.n_vocab, bool)
            banned[list(self.allowed)] = False
            made.append(lambda ids, logits: _ban(logits, banned))
        if self.least:
            ends, first = list(llm.tokenizer.eog_ids | self.ends), n_prompt + self.least
            made.append(lambda ids, logits: _ban(logits, ends) if len(ids) < first else None)
        return made

    def check(self, stop: Sequence[str], grammar: object) -> None:
        """Raise Refusal if stop texts or a grammar could keep the answer from being as it should."""
        if self.least and stop:
            raise Refusal("min_tokens cannot be kept with stop texts: leave one of them out.", param="min_tokens")
        for name, given in (("min_tokens", self.least), ("allowed_token_ids", self.allowed)):
            if given and grammar is not None:
                problem = (
                    "cannot be kept where a grammar, a schema or a function says what comes: leave one of them out"
                )
                raise Refusal(f"{name} {problem}.", param=name)


def read_permitted(fields: Fields, llm: "LLM") -> Permitted:
    """What a request says about the tokens of its answer."""
    allowed = _read_ids(fields, "allowed_token_ids", llm)
    if allowed is not None and not allowed:
        raise fields.refuse("allowed_token_ids", "is empty: give at least one token id, or leave it out")
    ends = _read_ids(fields, "stop_token_ids", llm) or frozenset()
    return Permitted(fields.whole("min_tokens", 0, 0, llm.n_ctx), ends, allowed)


def _read_ids(fields: Fields, name: str, llm: "LLM") -> frozenset[int] | None:
    """A list of token ids, None if it is missing."""
    n_vocab = llm.config.n_vocab
    ids = fields.items(name, n_vocab, "the tokens of the model")
    for i, id in enumerate(ids):
        if not is_token_id(id, n_vocab):
            problem = f"must be a token id of this model, 0 to {n_vocab - 1}, not {described(id)}"
            raise fields.refuse(f"{name}[{i}]", problem)
    return frozenset(ids) if name in fields else None


def _ban(logits: npt.NDArray[np.float32], tokens: npt.NDArray[np.bool_] | list[int]) -> None:
    logits[tokens] = -np.inf
