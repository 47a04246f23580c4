"""``bitmirror bench -np 16``: many users at once, in the manner of llama-batched-bench."""

import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from engine.decode.request import Request
    from engine.grammar.grammar import Grammar
    from engine.llm import LLM


@dataclass(frozen=True)
class Users:
    """What ``n_users`` users saw who asked at the same time, each with a prompt of ``n_prompt`` tokens of their own and an
    answer of ``n_gen``.  Times in seconds.

    prompt_s: until the last of them had its first token; answer_s: from then until the last token; total_s: both.
    first_s, first_99_s: time to the first token, median and 99th percentile; next_s, next_99_s: time from one token to the
    next.  drafted, accepted: drafts that were verified and kept.
    """

    model: str
    device: str
    n_users: int
    n_prompt: int
    n_gen: int
    prompt_s: float
    answer_s: float
    first_s: float
    first_99_s: float
    next_s: float
    next_99_s: float
    drafted: int = 0
    accepted: int = 0

    @property
    def total_s(self) -> float:
        """Seconds from the first request to the last token."""
        return self.prompt_s + self.answer_s

    @property
    def prompt_per_second(self) -> float:
        """Tokens of prompts read per second, until the last user had a first token."""
        return self.n_users * self.n_prompt / self.prompt_s

    @property
    def answer_per_second(self) -> float:
        """Tokens of answers per second of all users, once all prompts had been read."""
        return self.n_users * (self.n_gen - 1) / self.answer_s

    @property
    def per_second(self) -> float:
        """Tokens of prompts and answers per second, over the whole time."""
        return self.n_users * (self.n_prompt + self.n_gen) / self.total_s

    def fields(self) -> dict[str, Any]:
        """The fields, with rates per second."""
        rates = ("prompt_per_second", "answer_per_second", "per_second", "total_s")
        return asdict(self) | {name: round(getattr(self, name), 6) for name in rates}


def measure(
    llm: "LLM",
    name: str,
    n_users: int,
    n_prompt: int,
    n_gen: int,
    drafts: bool = False,
    grammars: Sequence["Grammar | None"] = (),
) -> Users:
    """Let ``n_users`` users ask at the same time, with random prompts; the answers are the likeliest tokens.  All prompts are
    read before the answers go on after their first tokens, as in llama-batched-bench.  grammars: of the answers of the first
    users, which end only where nothing else is permitted."""
    from engine.decode.request import Request
    from engine.grammar.matcher import Matcher
    from engine.sampling.sampler import Sampler, SamplerParams
    from engine.speculative.params import SpeculationParams
    from engine.speculative.speculation import Speculation

    rng, n_vocab = np.random.default_rng(n_users), llm.config.n_vocab
    llm.reset()

    def sampler(i: int) -> Sampler:
        grammar = grammars[i] if i < len(grammars) else None
        matcher = None if grammar is None else Matcher(grammar, llm.tokenizer, n_prompt, ends_late=True)
        return Sampler(SamplerParams(temperature=0.0, seed=0), n_vocab, matcher)

    samplers = [sampler(i) for i in range(n_users)]

    def request(greedy: Sampler, ids: list[int], count: int, begun: bool) -> Request:
        source = Speculation(SpeculationParams(), greedy, llm.draft, llm.n_bytes_read) if drafts and begun else None
        return Request(ids, greedy, count, source, begun=begun)

    prompts = [rng.integers(0, n_vocab, n_prompt, dtype=np.int32).tolist() for _ in range(n_users)]
    asked = [request(own, ids, 1, False) for own, ids in zip(samplers, prompts, strict=True)]
    begun = time.perf_counter()
    firsts = [own[0] - begun for own in _times(llm, asked)]
    prompt_s = time.perf_counter() - begun
    given = zip(samplers, prompts, asked, strict=True)
    answers = [request(own, [*ids, first.items[0][0]], n_gen - 1, True) for own, ids, first in given]
    begun = time.perf_counter()
    times = _times(llm, answers)
    answer_s = time.perf_counter() - begun
    between = np.concatenate([np.diff([begun, *own]) for own in times])
    counts = [r.speculation.statistics for r in answers if r.speculation is not None]
    return Users(
        name,
        llm.model.ops.label,
        n_users,
        n_prompt,
        n_gen,
        prompt_s,
        answer_s,
        float(np.median(firsts)),
        float(np.percentile(firsts, 99)),
        float(np.median(between)),
        float(np.percentile(between, 99)),
        sum(count.drafted for count in counts),
        sum(count.accepted for count in counts),
    )


def _times(llm: "LLM", requests: Sequence["Request"]) -> list[list[float]]:
    """When each token of each request was there."""
    times: list[list[float]] = [[] for _ in requests]
    for request in requests:
        llm.core.submit(request)
    while llm.core.step():
        now = time.perf_counter()
        for request, own in zip(requests, times, strict=True):
            own += [now] * (len(request.items) - len(own))
    return times


# Heading, format (alignment and width) and text of each column.
_COLUMNS: tuple[tuple[str, str, Callable[[Users], str]], ...] = (
    ("model", "<30", lambda u: u.model),
    ("users", ">5", lambda u: str(u.n_users)),
    ("prompt", ">6", lambda u: str(u.n_prompt)),
    ("answer", ">6", lambda u: str(u.n_gen)),
    ("prompt t/s", ">10", lambda u: f"{u.prompt_per_second:.1f}"),
    ("answer t/s", ">10", lambda u: f"{u.answer_per_second:.1f}"),
    ("t/s", ">9", lambda u: f"{u.per_second:.1f}"),
    ("first ms (99 %)", ">17", lambda u: f"{1e3 * u.first_s:.1f} ({1e3 * u.first_99_s:.1f})"),
    ("next ms (99 %)", ">15", lambda u: f"{1e3 * u.next_s:.2f} ({1e3 * u.next_99_s:.2f})"),
)


def markdown(results: Iterable[Users]) -> Iterator[str]:
    """A table, each row as soon as it is measured, and an explanation."""
    for i, result in enumerate(results):
        if i == 0:
            yield _row(format(name, spec) for name, spec, _ in _COLUMNS)
            yield _row("-" * (int(spec[1:]) - 1) + (":" if spec[0] == ">" else "-") for _, spec, _ in _COLUMNS)
        yield _row(format(text(result), spec) for _, spec, text in _COLUMNS)
    yield ""
    yield "prompt t/s: until the last user has a first token; answer t/s: of all users, from then on; first, next: until a"
    yield "user's first token, and from one to the next: the median, and what 99 % do not exceed."


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def comma_separated(results: Iterable[Users]) -> Iterator[str]:
    """A line of names, then one line per number of users as soon as it is measured."""
    for i, result in enumerate(results):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(result.fields()), quoting=csv.QUOTE_ALL, lineterminator="")
        if i == 0:
            writer.writeheader()
            text.write("\n")
        writer.writerow(result.fields())
        yield text.getvalue()


def as_json(results: Iterable[Users]) -> Iterator[str]:
    """One array with an object per number of users."""
    yield json.dumps([result.fields() for result in results], indent=2)


def json_lines(results: Iterable[Users]) -> Iterator[str]:
    """One line with an object per number of users, as soon as it is measured."""
    for result in results:
        yield json.dumps(result.fields())


OUTPUTS = {"csv": comma_separated, "json": as_json, "jsonl": json_lines, "md": markdown}
"""The formats of results."""
