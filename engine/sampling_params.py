"""The parameters of an answer that programs pass around: how its tokens are chosen, and where it ends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, TypeVar

from engine.checks import described, require, whole
from engine.errors import UsageError
from engine.sampling import params
from engine.sampling.defaults import filled
from engine.sampling.params import LogitsProcessor
from engine.text.breakers import BREAKERS

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of an answer are chosen, and where the answer ends.

    Pass it to :meth:`LLM.generate`, :meth:`LLM.complete`, :meth:`LLM.chat` or :meth:`LLM.stream` as ``sampling_params``. A
    keyword argument of these methods takes precedence over the field of the same name. Where a field is None, the value that
    the file of the model recommends is used (``LLM.sampling``), or else the default in parentheses, which is llama.cpp's.

    Parameters
    ----------
    temperature : float, optional
        Divides the logits before the draw (0.8); 0 or less takes the most probable token (greedy) and ignores top_k,
        typical_p, top_p, min_p and XTC.
    top_k : int, optional
        Keep the k most probable tokens (40); 0 or less keeps all.
    top_p : float, optional
        Keep the most probable tokens whose probabilities add up to this (0.95); 1 or more: off.
    min_p : float, optional
        Keep tokens at least this fraction as probable as the most probable one (0.05); 0 or less: off.
    typical_p : float
        Keep the tokens whose information content is closest to the entropy and whose probabilities add up to this; 1 or
        more: off.
    repeat_penalty : float, optional
        Positive logits of recent tokens are divided by this, the others are multiplied by it (1); at least 1e-6, 1: off.
    repeat_last_n : int, optional
        Number of most recent tokens that the three penalties consider (64); 0: none, -1: all.
    presence_penalty : float
        Subtracted from the logit of each recent token; 0: off.
    frequency_penalty : float
        Subtracted once for each occurrence of the token among the recent ones; 0: off.
    logit_bias : mapping of int to float, optional
        Token id -> value added to its logit; ``-inf`` bans the token.
    dry_multiplier : float
        DRY: the penalty on a token that would continue the shortest penalized repetition; 0: off.
    dry_base : float
        Factor of the penalty for each further token of the repetition; at least 1.
    dry_allowed_length : int
        Length of the shortest repetition whose continuation is penalized.
    dry_penalty_last_n : int
        Number of most recent tokens that are searched for repetitions; 0: none, -1: all.
    dry_sequence_breakers : sequence of str
        Texts beyond which a repetition does not extend back.
    xtc_probability : float, optional
        XTC: how often tokens are excluded, 0 (never, the default) to 1 (at every position).
    xtc_threshold : float, optional
        Of the tokens with at least this probability, all but the least probable are excluded (0.1); above 0.5: off.
    logits_processors : sequence of callable
        Functions that change the logits before anything else; see :meth:`LLM.generate`.
    seed : int
        0 to 2**64 - 1, or -1 for a random one. The same seed gives the same text.
    max_tokens : int
        Maximum number of tokens to generate; -1: until the model stops or the context is full.
    stop : str or sequence of str
        Texts that end the answer. They are not part of it.
    ignore_eos : bool
        Never choose end-of-generation tokens.
    logprobs : int
        How many of the most probable tokens to record per token; 0 records nothing.

    Raises
    ------
    UsageError
        If a value is outside its range.

    Examples
    --------
    >>> import engine
    >>> llm = engine.load(n_ctx=256)
    >>> params = engine.SamplingParams(temperature=0, max_tokens=20, stop="\\n")
    >>> llm.complete("def add(a, b):\\n    return", sampling_params=params).text
    ' a + b'
    >>> llm.complete("def add(a, b):\\n    return", sampling_params=params, max_tokens=2).text
    ' a +'
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float = 1.0
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = BREAKERS
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int = -1
    max_tokens: int = field(default=-1, kw_only=True)
    stop: str | Sequence[str] = field(default=(), kw_only=True)
    ignore_eos: bool = field(default=False, kw_only=True)
    logprobs: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        chosen = {f.name: getattr(self, f.name) for f in fields(params.SamplerParams) if hasattr(self, f.name)}
        params.SamplerParams(**filled(chosen | {"logit_bias": chosen["logit_bias"] or {}}, {}))
        require(whole("max_tokens", self.max_tokens) >= -1, "max_tokens", "-1 (no limit) or more", self.max_tokens)
        require(whole("logprobs", self.logprobs) >= 0, "logprobs", "0 or more", self.logprobs)
        stop_texts(self.stop)


def stop_texts(stop: object) -> list[str]:
    """One text or several as a list.  Raises UsageError for anything else."""
    if isinstance(stop, str):
        return [stop]
    if isinstance(stop, Sequence) and all(isinstance(text, str) for text in stop):
        return list(stop)
    raise UsageError(f"stop must be a text or a sequence of texts, not {described(stop)}.")


def merged(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of an answer with the fields of ``sampling_params`` in place of those that are not given."""
    given = dict(options)
    sampling = given.pop("sampling_params", None)
    if not isinstance(sampling, SamplingParams | None):
        raise UsageError(f"sampling_params must be SamplingParams, not {described(sampling)}.")
    return given if sampling is None else {f.name: getattr(sampling, f.name) for f in fields(sampling)} | given


def with_sampling_params(method: Method) -> Method:
    """A method with the keyword arguments of an answer, which also takes ``sampling_params``."""

    @wraps(method)
    def called(self: Any, prompt: Any, **options: Any) -> Any:
        return method(self, prompt, **merged(options))

    return called  # type: ignore[return-value]
