"""Random answers that a grammar of calls permits, and what the parser of the format finds in them."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

import jsonschema
import numpy as np

from engine.grammar.grammar import Grammar
from engine.grammar.matcher import Matcher
from engine.grammar.tokens import tokens_of
from engine.text.shown import Shown
from engine.text.tokenizer import Tokenizer, TokenType
from engine.tools.calls.function import Function
from engine.tools.calls.select import calls_source
from engine.tools.calls.tagged import NONE, OPEN
from engine.tools.formats.select import FORMATS, parser
from tests.tools.formats.answers import TOKENS, Answer, collected
from tests.vocabularies import CONTROL, bpe_metadata, made

MERGES = ["a b", "< /", "' :", '{ "', "Ċ <", '" :', "Ċ Ċ", "p a", "} }", "1 2"]


class Model(NamedTuple):
    """A vocabulary of a format; tags: whether its tags are tokens."""

    format: str
    tags: bool

    @property
    def tokenizer(self) -> Tokenizer:
        return _tokenizer(self)

    def token(self, text: str) -> int | None:
        id = self.tokenizer.token_id(text)
        return id if id is not None and self.tokenizer.token_type(id) == TokenType.CONTROL else None

    def grammar(self, functions: Sequence[Function], **choice: Any) -> Grammar:
        tokens = tokens_of(self.tokenizer)
        options = {"forced": True, "several": True} | choice
        source = calls_source(
            self.format, functions, token=self.token, ends=tokens.ends, special=tokens.special, **options
        )
        return Grammar.lark(source)

    def read(self, ids: Sequence[int], functions: Sequence[Function], thought: str = NONE) -> Answer:
        """What the parser finds in an answer."""
        tools = [{"type": "function", "function": {"name": f.name, "parameters": f.given}} for f in functions]
        reader = parser(
            self.format, tools, single=lambda tag: self.token(tag) is not None, reasoning_open=thought == OPEN
        )
        shown = Shown(self.tokenizer, [], control=True)
        pieces = [piece for id in ids for piece in shown.feed(id)] + shown.flush()
        events = [event for text, special in pieces for event in reader.feed(text, special)]
        return collected([*events, *reader.finish()])


@cache
def _tokenizer(model: Model) -> Tokenizer:
    special = {"<|eos|>": CONTROL} | {tag: CONTROL for tag in TOKENS[model.format] if model.tags}
    return made(bpe_metadata(MERGES, special, eos_token_id=256 + len(MERGES)))


MODELS = [
    Model(name, tags)
    for name in TOKENS
    if FORMATS[name].OPENS or name in ("llama3", "gpt_oss")
    for tags in (True, False)
]


def walk(
    model: Model, grammar: Grammar, seed: int, n: int = 600, weight: Callable[[str], float] = lambda text: 1
) -> list[int] | None:
    """Random tokens that a grammar permits up to the end of the answer; None if ``n`` are not enough.

    What ends something is more likely than other tokens, and most bytes that are no ASCII are unlikely; weight: times this.
    """
    tk, random, ids = model.tokenizer, Random(seed), list[int]()
    texts = [tk.token_bytes(id, special=True) for id in range(tk.n_vocab)]
    weights = []
    for id, text in enumerate(texts):
        if tk.token_type(id) == CONTROL:
            weights.append(30 * weight(text.decode()))
        else:
            likely = 30 if text[:1] in (b"<", b'"', b"}", b"]", b"\n") else 0.02 if max(text) > 126 else 1
            weights.append(likely * weight(text.decode("latin-1")))
    matcher = Matcher(grammar, tk, 0)
    for _ in range(n):
        bits = np.unpackbits(matcher.mask(ids).view(np.uint8), bitorder="little")[: tk.n_vocab]
        choices = np.flatnonzero(bits).tolist()
        others = [id for id in choices if id not in tk.eog_ids]
        if len(others) < len(choices) and (not others or random.random() < 0.2):
            return ids
        ids += random.choices(others, [weights[id] for id in others])
    return None


def follows(model: Model, grammar: Grammar, text: str) -> bool:
    """Whether a grammar permits an answer, in which tags are tokens if the vocabulary has them."""
    ids = model.tokenizer.encode(text, add_special=False, parse_special=True)
    matcher = Matcher(grammar, model.tokenizer, 0)
    if matcher.ahead.permitted([], ids) < len(ids):
        return False
    mask = np.unpackbits(matcher.mask(ids).view(np.uint8), bitorder="little")
    return bool(mask[min(model.tokenizer.eog_ids)])


def validate(answer: Answer, functions: Sequence[Function]) -> None:
    """Check the arguments of every call."""
    schemas = {function.name: function.schema for function in functions}
    for name, arguments in answer.calls:
        jsonschema.validate(json.loads(json.dumps(arguments)), schemas[name])
