"""The replay of a receipt: one pass over its text, whose logits and choices are compared with those of the receipt."""

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.checks import MOST_SHOWN, described, shown
from engine.decode.request import ReadRow, Request, RowReader
from engine.errors import ContextError, NotFinite, NoToken, UsageError
from engine.grammar.matcher import Matcher
from engine.models.config import ModelConfig
from engine.receipts.form import problem_of
from engine.receipts.parameters import Parameters, read
from engine.receipts.record import best_of
from engine.sampling.row_digest import row_digest
from engine.sampling.sampler import Sampler
from engine.text.shown import Shown
from engine.text.tokenizer import Tokenizer

MOST_BYTES = 1 << 28
"""Bytes that a file with a receipt may have: a million tokens need half of that."""

IRRELEVANT = ("template",)
"""What of a model's description a replay does not depend on: the prompt is given as token ids."""


class ReplayingModel(Protocol):
    """The interface of a loaded model that a replay uses; ``engine.llm.LLM`` implements it."""

    tokenizer: Tokenizer
    config: ModelConfig
    n_ctx: int

    def identity(self, *, remembered: bool = True) -> dict[str, Any]:
        """The object whose hash is its fingerprint."""

    def tokens(self, request: Request) -> Any:
        """The tokens of a request."""

    def row_reader(self, sampler: Sampler, text: Sequence[int]) -> RowReader | None:
        """What reads the logits of a text on the device; None if they are copied to the host."""


@dataclass(frozen=True)
class Verification:
    """What the replay of a receipt has found, from :meth:`LLM.verify`.

    Attributes
    ----------
    same : bool
        Whether this model, asked with the parameters of the receipt, gives its tokens, from logits with its digests.
    problem : str
        A sentence that says what differs first; "" if nothing does.
    n_tokens : int
        The number of tokens of the receipt.
    token : int or None
        The index of the first token that differs, or whose logits do; None if that is not what differs.
    difference : float or None
        The largest difference among the two largest logits there, if these belong to the same tokens.
    """

    same: bool
    problem: str
    n_tokens: int
    token: int | None = None
    difference: float | None = None


def read_receipt(path: str | os.PathLike[str]) -> Any:
    """A receipt in a file, decoded but not checked.  Raises UsageError if it cannot be read."""
    shown = str(path)[:200].encode(errors="replace").decode()
    try:
        if not stat.S_ISREG((status := os.stat(path)).st_mode) or status.st_size > MOST_BYTES:
            raise UsageError(f"{shown} is not a file with a receipt.")
        with open(path, "rb") as file:
            return json.load(file)
    except OSError as error:
        raise UsageError(f"the receipt cannot be read from {shown}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{shown} is not JSON, so it is no receipt.") from None


def replay(llm: ReplayingModel, receipt: object, on_prefill: Callable[[int, int], None] | None = None) -> Verification:
    """Compare a receipt with what a model does.

    The prompt and the tokens are read like a prompt, without anything that the cache holds of them, and after each of them
    the sampler of the receipt chooses.  So this takes as long as reading a prompt of that length.

    on_prefill: called as ``on_prefill(done, total)``, in tokens.  Raises ContextError if the text does not fit into the
    context, UsageError if a parameter is not known, and errors of the model.
    """
    if problem := problem_of(receipt):
        return Verification(False, problem, 0)
    assert isinstance(receipt, Mapping)
    n_tokens = len(receipt["tokens"])
    if problem := _other_model(receipt["model"], llm.identity(remembered=False)):
        return Verification(False, problem, n_tokens)
    prompt, tokens, last = receipt["prompt"], receipt["tokens"], llm.config.n_vocab - 1
    if max([*prompt, *tokens]) > last:
        return Verification(False, f"it has a token id beyond {last}, the last one of the model.", n_tokens)
    if len(prompt) + n_tokens - 1 > llm.n_ctx:
        raise ContextError(
            f"the text of the receipt has {len(prompt) + n_tokens} tokens and the context {llm.n_ctx}; "
            "choose a larger context (n_ctx=...).",
            len(prompt) + n_tokens,
            llm.n_ctx,
        )
    parameters = read(receipt["parameters"])
    if n_tokens:
        comparison = _Comparison(llm, receipt, parameters)
        given = tokens[:-1]
        request = Request(
            prompt,
            comparison.sampler,
            0,
            on_prefill=on_prefill,
            on_logits=comparison,
            scored_from=len(prompt) - 1,
            reader=comparison.reader,
            given=given,
        )
        for _ in llm.tokens(request):
            raise AssertionError  # no token is computed
        if comparison.found is not None:
            return comparison.found
    if problem := _wrong_end(llm, receipt, parameters):
        return Verification(False, problem, n_tokens)
    return Verification(True, "", n_tokens)


class _Comparison:
    """Compares rows of logits with a receipt, in their order; ``found`` is the first difference."""

    def __init__(self, llm: ReplayingModel, receipt: Mapping[str, Any], parameters: Parameters) -> None:
        tokenizer, prompt = llm.tokenizer, receipt["prompt"]
        matcher = None
        if parameters.grammar is not None:
            matcher = Matcher(parameters.grammar, tokenizer, len(prompt), ends_late=parameters.ignore_eos)
        self.sampler = Sampler(parameters.sampler, llm.config.n_vocab, matcher)
        begins_with = parameters.begins_with
        self._allowed = tokenizer.beginning_with(begins_with) if begins_with else None
        #: What reads the logits on the device; None: they are copied to the host.
        self.reader = None if begins_with else llm.row_reader(self.sampler, [*prompt, *receipt["tokens"]])
        self._tokenizer = tokenizer
        self._receipt = receipt
        self._prompt = prompt
        self._known = [*prompt, *receipt["tokens"]]
        #: The number of tokens that were compared.
        self._done = 0
        self.found: Verification | None = None

    def __call__(self, first: int, logits: np.ndarray) -> None:
        at = first - (len(self._prompt) - 1)
        for i, row in enumerate(logits if self.reader is None else self.reader.rows(logits), at):
            # A text is read again if it gave way to others.
            if i == self._done and self.found is None:
                self._compare(i, row if isinstance(row, ReadRow) else self._read(i, row))
                self._done += 1

    def _read(self, i: int, row: np.ndarray) -> ReadRow:
        """The digest of a row of logits, float32 [n_vocab], and the choice of a token from it."""
        if i == 0 and self._allowed is not None:
            allowed = np.full_like(row, -np.inf)
            allowed[self._allowed] = row[self._allowed]
            row = allowed
        history = self._known[: len(self._prompt) + i]
        return ReadRow(row_digest(row), lambda: self.sampler.sample(row, len(history), history))

    def _compare(self, i: int, row: ReadRow) -> None:
        receipt, own = self._receipt, row.digest
        best, claimed, wanted = best_of(own), receipt["best"][i], receipt["tokens"][i]
        try:
            chosen = row.choose()
        except (NoToken, NotFinite) as error:
            self._differ(i, f"the receipt has {self._shown(wanted)}, and here none can be chosen: {error}.")
            return
        if own.digest != receipt["digests"][i] or best != claimed:
            difference = None
            if [token for token, _ in best] == [token for token, _ in claimed]:
                difference = max(abs(_number(x) - _number(y)) for (_, x), (_, y) in zip(best, claimed, strict=True))
            how = f"the two largest are {self._pairs(claimed)} in the receipt and {self._pairs(best)} here"
            then = "" if chosen == wanted else f", and {self._shown(chosen)} is chosen instead of {self._shown(wanted)}"
            self._differ(i, f"its logits differ{then}: {how}.", difference)
        elif chosen != wanted:
            self._differ(i, f"the receipt has {self._shown(wanted)}, and {self._shown(chosen)} is chosen here.")

    def _differ(self, i: int, how: str, difference: float | None = None) -> None:
        n = len(self._receipt["tokens"])
        self.found = Verification(False, f"token {i} of {n} differs: {how}", n, i, difference)

    def _shown(self, token: int) -> str:
        text = self._tokenizer.token_bytes(token, special=True).decode("utf-8", "replace")
        return f"{token} ({text[:40]!r})"

    def _pairs(self, best: Sequence[Sequence[Any]]) -> str:
        return " and ".join(f"{_number(value):.9g} for {token}" for token, value in best)


def _number(value: float | None) -> float:
    return -np.inf if value is None else value


def _other_model(claimed: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """How the model of a receipt differs from this one, as a sentence; "" if the difference does not matter."""
    names = sorted(
        name
        for name in (claimed.keys() | own.keys()) - set(IRRELEVANT)
        if name not in claimed or name not in own or claimed[name] != own[name]
    )
    if not names:
        return ""
    differences = [f"{name} {_brief(claimed.get(name))} instead of {_brief(own.get(name))}" for name in names]
    return f"it is the receipt of another model, or of another cache: {', '.join(differences)}."


def _brief(value: object) -> str:
    """A part of a model's description: of a hash, the first characters."""
    if isinstance(value, Mapping):
        return shown(" ".join(f"{name}={part}" for name, part in value.items()))
    if isinstance(value, str) and len(value) > MOST_SHOWN:
        return shown(value, 12)
    return described(value)


def _wrong_end(llm: ReplayingModel, receipt: Mapping[str, Any], parameters: Parameters) -> str:
    """Why an answer cannot have ended where it does, as a sentence; "" if it can."""
    tokens, reason = receipt["tokens"], receipt["finish_reason"]
    endless = parameters.ignore_eos and parameters.grammar is None
    ends = {*parameters.stop_token_ids, *(() if endless else llm.tokenizer.eog_ids)}
    early = next((i for i, token in enumerate(tokens[:-1]) if token in ends), None)
    if early is not None:
        return f"token {early} ends an answer, but others follow it."
    if reason in ("stop", "tool_calls"):
        if (tokens and tokens[-1] in ends) or _stops(llm.tokenizer, tokens, parameters):
            return ""
        return f"it says {reason!r}, but neither its last token nor a stop text ends the answer."
    if reason == "length" and len(tokens) != parameters.max_tokens:
        return f"it says 'length', but has {len(tokens)} of at most {parameters.max_tokens} tokens."
    if len(tokens) > parameters.max_tokens:
        return f"it has {len(tokens)} tokens, more than the {parameters.max_tokens} that were allowed."
    return ""


def _stops(tokenizer: Tokenizer, tokens: Sequence[int], parameters: Parameters) -> bool:
    """Whether a stop text ends the answer with its last token.  A server finds stop texts also in control tokens."""
    for control in (False, True):
        shown = Shown(tokenizer, parameters.stop, control=control, begins_with=parameters.begins_with)
        for i, token in enumerate(tokens):
            shown.feed(token)
            if shown.stopped:
                if i == len(tokens) - 1:
                    return True
                break
        else:
            shown.flush()
            if shown.stopped:
                return True
    return False
