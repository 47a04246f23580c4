"""Counts of a server, for Prometheus, under vLLM's names where they mean the same."""

from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from engine.serving.answer import Answer

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.serving.models import Models

SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
"""Upper bounds of the classes of times."""

GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
"""Upper bounds of the classes of times between tokens."""

REASONS = ("stop", "length", "abort", "error")
"""How an answer ends: by itself, at its greatest length, because the client left, because of an error."""


class Metrics:
    """The counts of a server.  Only its event loop uses them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        # The memory, the times and the open files of this process, under the names of all of Prometheus's clients.
        ProcessCollector(registry=self.registry)

        def gauge(name: str, text: str, *labels: str, prefix: str = "vllm") -> Gauge:
            return Gauge(f"{prefix}:{name}", text, ["model_name", *labels], registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, ["model_name"], registry=self.registry, buckets=bounds)

        self._running = gauge("num_requests_running", "Answers that are computed.")
        self._waiting = gauge(
            "num_requests_waiting", "Answers that have no slot: they have not begun, or gave it to others."
        )
        self._paused = Gauge(
            "bitmirror:num_requests_paused",
            "Answers of the two that wait for their clients to read.",
            ["model_name"],
            registry=self.registry,
        )
        share = "Share of the pages of the cache that sequences hold, 0 to 1."
        # Each second name is the one that older dashboards and routers read.
        self._usage = [gauge(name, share) for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc")]
        self._memory = gauge("memory_bytes", "Memory by what it is for.", "kind", prefix="bitmirror")
        most = "The most memory for snapshots of recurrent states."
        self._snapshots = gauge("snapshots_limit_bytes", most, prefix="bitmirror")
        self._prompt = counter("prompt_tokens", "Tokens of prompts, with those that the cache held.")
        self._generated = counter("generation_tokens", "Tokens that were generated.")
        asked, found = "Tokens of prompts that were looked up in the cache.", "Tokens of prompts that the cache held."
        self._queries = [counter(name, asked) for name in ("prefix_cache_queries", "gpu_prefix_cache_queries")]
        self._hits = [counter(name, found) for name in ("prefix_cache_hits", "gpu_prefix_cache_hits")]
        self._ended = counter("request_success", "Answers by how they ended.", "finished_reason")
        self._first = histogram("time_to_first_token_seconds", "Seconds from a request to its first token.", SECONDS)
        self._whole = histogram(
            "e2e_request_latency_seconds", "Seconds from a request to the end of its answer.", SECONDS
        )
        self._gap = histogram(
            "inter_token_latency_seconds", "Seconds between rounds that gave an answer tokens.", GAP_SECONDS
        )

        #: A metric with its labels, which takes longer to find than to count.
        self._of = cache(lambda metric, *labels: metric.labels(*labels))

    def begin(self, model: str, answer: Answer) -> None:
        """Count the tokens of an answer when they arrive, and how it ended."""
        of, generated, gap = self._of, self._of(self._generated, model), self._of(self._gap, model)

        def on_tokens(answer: Answer, n: int, now: float) -> None:
            generated.inc(n)
            if answer.first_token:
                gap.observe(now - answer.latest_token)
            else:
                of(self._first, model).observe(now - answer.created)

        def on_end(answer: Answer) -> None:
            if answer.generation.finish_reason == "stop":
                generated.inc()  # the token that ended it, which has no text
            if answer.n_read:
                of(self._prompt, model).inc(answer.n_prompt)
                for counter in self._queries:
                    of(counter, model).inc(answer.n_prompt)
                for counter in self._hits:
                    of(counter, model).inc(answer.n_cached)
            of(self._ended, model, _reason(answer)).inc()
            of(self._whole, model).observe(answer.age)

        answer.on_tokens, answer.on_end = on_tokens, on_end

    def text(self, models: "Models") -> bytes:
        """All counts in the text format of Prometheus, with the present state of the models that are open."""
        for gauge in (self._running, self._waiting, self._paused, *self._usage, self._memory, self._snapshots):
            gauge.clear()
        for name, entry in models.entries.items():
            if entry.served is None:
                continue
            driver = entry.served.driver
            self._running.labels(name).set(driver.n_running)
            self._waiting.labels(name).set(driver.n_waiting)
            self._paused.labels(name).set(driver.n_paused)
            for gauge in self._usage:
                gauge.labels(name).set(pages_held(entry.served.llm))
            memory = entry.served.llm.memory
            for kind, n_bytes in memory.kinds.items():
                self._memory.labels(name, kind).set(n_bytes)
            self._snapshots.labels(name).set(memory.snapshots_limit)
            # A count that is there from the beginning shows its first increase.
            for counter in (self._prompt, self._generated, *self._queries, *self._hits):
                counter.labels(name)
            for reason in REASONS:
                self._ended.labels(name, reason)
        return generate_latest(self.registry)


def pages_held(llm: "LLM") -> float:
    """The share of the pages of the cache that sequences hold, 0 to 1: those of answers, and those of texts that are kept for
    the next one."""
    pools = list(llm.cache.pools.values())
    n_pages = sum(pool.n_pages for pool in pools)
    return 1 - sum(pool.n_free for pool in pools) / n_pages if n_pages else 0.0


def _reason(answer: Answer) -> str:
    if answer.error is not None:
        return "error"
    return {"": "abort", "tool_calls": "stop"}.get(answer.finish_reason, answer.finish_reason)
