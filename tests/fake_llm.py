"""A fake of a loaded model, so that the command line is tested separately and in milliseconds.

``python -m tests.fake_llm FLAGS`` is ``python -m engine.run FLAGS`` with it. It answers with the prompt in capitals, one
letter a token, and then goes on counting; the environment sets how: FAKE_DELAY (seconds per token), FAKE_TEXT, FAKE_ERROR;
FAKE_BEGUN is a file that is there from the first token on.
With a draft model or lookup it says that drafts came in threes and that two of each were kept.
"""

import builtins
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine
from engine import errors
from engine.errors import ContextError
from engine.gguf.file import read_gguf
from engine.memory import Memory
from engine.models.traffic import weight_bytes_per_token
from engine.ops.device import DeviceMemory
from engine.sampling.defaults import sampling_defaults
from engine.sampling.token_logprob import TokenLogprob
from engine.speculative.params import SpeculationParams
from engine.speculative.statistics import Statistics

N_CTX = 64

MEMORY = Memory(500, 0, 0, 10**6, 0, 0, 2 * 10**6, 0)


@dataclass
class Timings:
    load_s: float = 0.25
    compile_s: float = 0.5
    prompt_n: int = 0
    dropped_n: int = 0
    cache_n: int = 0
    prompt_s: float = 0.125
    predicted_n: int = 0
    predicted_s: float = 0.0
    first_token_s: float = 0.0

    @property
    def prompt_per_second(self) -> float:
        return self.prompt_n / self.prompt_s

    @property
    def predicted_per_second(self) -> float:
        return self.predicted_n / self.predicted_s if self.predicted_s else float("inf")


class FakeTemplate:
    """Renders one line per message."""

    def render(self, messages: Sequence[dict[str, str]], **extra: Any) -> str:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "

    def encode(self, messages: Sequence[dict[str, str]], **extra: Any) -> list[int]:
        return [ord(c) for c in self.render(messages)]


class Generation:
    def __init__(self, llm: "FakeLLM", prompt_ids: list[int], options: dict[str, Any]) -> None:
        self.prompt_ids, self.text = prompt_ids, ""
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.timings = Timings(prompt_n=len(prompt_ids))
        self.closed = False
        self.speculation = drafts(llm, options["speculation"])
        self._pieces = self._run(llm, **options)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        self.closed = True
        self._pieces.close()

    def _run(
        self,
        llm: "FakeLLM",
        max_tokens: int,
        logprobs: int,
        on_prefill: Callable[[int, int], None],
        **options: Any,
    ) -> Generator[str, None, None]:
        n = len(self.prompt_ids)
        for done in range(0, n + 1, max(n // 4, 1)):
            time.sleep(llm.delay)
            on_prefill(done, n)
        on_prefill(n, n)
        source = llm.text or "".join(map(chr, self.prompt_ids)).upper()
        room = llm.n_ctx - n if max_tokens < 0 else min(max_tokens, llm.n_ctx - n)
        started = time.perf_counter()
        for i in range(room):
            if i == len(source):
                self.finish_reason = "stop"
                return
            time.sleep(llm.delay)
            self.ids.append(ord(source[i]))
            self.text += source[i]
            self.timings.predicted_n += 1
            self.timings.predicted_s = time.perf_counter() - started
            if logprobs:
                top = (TokenLogprob(ord(source[i]), source[i], -0.5), TokenLogprob(0, "\0", -float("inf")))
                self.logprobs.append(TokenLogprob(ord(source[i]), source[i], -0.5, top[:logprobs]))
            if i == 0 and (begun := os.environ.get("FAKE_BEGUN")):
                Path(begun).touch()
            yield source[i]
        self.finish_reason = "length"


def drafts(llm: "FakeLLM", params: SpeculationParams) -> Statistics | None:
    """The statistics of drafts; None if there is no source of them."""
    if not params.enabled or (llm.draft is None and not params.lookup):
        return None
    statistics = Statistics(plain_n=4, plain_s=0.5)
    for source in ["lookup"] * params.lookup + ["model"] * (llm.draft is not None):
        for _ in range(2):
            statistics.verified(source, drafted=3, accepted=2, seconds=0.25)
    return statistics


def ops(device: str) -> Any:
    """The backend, of which only names and sizes are used."""
    if not device.startswith("cuda"):
        names = {"name": "cpu", "label": "cpu", "gpu_name": ""}
        return SimpleNamespace(**names, n_threads=2, device_memory=lambda: None, bandwidth=lambda: bandwidth("cpu"))
    names = {"name": "cuda", "label": "cuda:0 Abacus X1", "gpu_name": "Abacus X1"}
    memory = DeviceMemory(2_500_000, 500_000, 7_000_000_000)
    return SimpleNamespace(**names, n_threads=0, device_memory=lambda: memory, bandwidth=lambda: bandwidth("cuda"))


def bandwidth(name: str) -> float:
    """Bytes per second that a device reads."""
    return {"cpu": 20e9, "cuda": 4e12}[name]


class FakeLLM:
    """Tokens are characters; records what it was asked."""

    def __init__(self, path: Path, n_ctx: int = 0, **options: Any) -> None:
        self.path = path
        self.options = options | {"n_ctx": n_ctx}
        self.config = SimpleNamespace(
            name="fake \x1b[31mmodel", architecture="fake", n_ctx_train=4096, n_layer=0, layers=()
        )
        self.chat_template: FakeTemplate | None = FakeTemplate() if os.environ.get("FAKE_TEMPLATE") else None
        # Each file has tokens of its own.
        self.tokenizer = SimpleNamespace(vocabulary=SimpleNamespace(tokens=[path.name]))
        self.closed = False
        self.n_ctx, self.n_threads, self.n_params, self.n_bytes, self.cache_bytes = n_ctx or N_CTX, 2, 1000, 500, 10**6
        own = ops(options["device"])
        self.model = SimpleNamespace(
            ops=own, devices=(own,), gguf=read_gguf(path), stages=[], streaming=None, stage_seconds=dict
        )
        self.model.cache = SimpleNamespace(memory_bytes=lambda ops: self.cache_bytes)
        self.n_threads = self.model.ops.n_threads
        self.cache = SimpleNamespace(layers=[])
        self.sampling, self.warnings = sampling_defaults(self.model.gguf)
        self.draft: Any = None
        self.recurrent_bytes, self.snapshot_bytes, self.reread = 0, 0, None
        self.memory = MEMORY
        self.cache_types = "f16", "f16"
        self.n_bytes_read = weight_bytes_per_token(self.model.gguf)
        if options["draft_model"] is not None:
            device = options["device_draft"] or options["device"]
            self.draft = SimpleNamespace(
                name="model", llm=FakeLLM(options["draft_model"], n_ctx, **NO_DRAFT | {"device": device})
            )
        self.delay = float(os.environ.get("FAKE_DELAY", "0"))
        self.text = os.environ.get("FAKE_TEXT", "")
        self.compiled = False
        self.asked: list[dict[str, Any]] = []

    def compile(self, progress: Callable[[str, int, int], None] | None = None) -> float:
        for i in range(5):
            time.sleep(self.delay)
            if progress:
                progress("compile", i, 4)
        self.compiled = True
        return 0.5

    def close(self) -> None:
        self.closed = True

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        ids = [ord(c) for c in prompt] if isinstance(prompt, str) else list(prompt)
        self.asked.append({"prompt": self.detokenize(ids)} | options)
        if name := os.environ.get("FAKE_ERROR"):
            raise (getattr(errors, name, None) or getattr(builtins, name))("it failed")
        if len(ids) >= self.n_ctx:
            raise ContextError(f"the prompt has {len(ids)} tokens and the context {self.n_ctx}: give a larger -c")
        return Generation(self, ids, options)


NO_DRAFT: dict[str, Any] = {
    "gpu_memory": None,
    "n_gpu_layers": None,
    "n_cpu_moe": 0,
    "override_tensor": "",
    "split_mode": "layer",
    "tensor_split": "",
    "mtp": True,
    "draft_max": 0,
    "snapshot_bytes": None,
    "ds4_rounding": False,
    "draft_model": None,
    "device_draft": None,
}

loaded: list[FakeLLM] = []


def load(path: Path, *, progress: Callable[[str, int, int], None] | None = None, **options: Any) -> FakeLLM:
    """Replaces ``engine.load``; every loaded model is recorded in ``loaded``."""
    if progress:
        for done in (0, 250, 500):
            progress("load", done, 500)
    loaded.append(FakeLLM(path, **options))
    return loaded[-1]


if __name__ == "__main__":
    from engine.cli.entry import program
    from engine.run import main

    vars(engine)["load"] = load
    program(main)
