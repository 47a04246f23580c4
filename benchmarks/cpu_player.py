"""One engine in a process of its own, which computes only when it is asked to.

    python cpu_player.py '{"engine": "ours", "path": "MODEL.gguf", "n_threads": 2, "n_prompt": 256, "n_answer": 64}'

``engine`` is "ours" or "llama.cpp" (with "flash_attn": true or false). Each line of standard input names one
measurement, "prompt", "answer" or "facts", and is answered by one line of JSON; the process ends with its input.
This file is also run by an interpreter that has llama-cpp-python and not this package, so both are imported where they
are used.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np

BEGINNING = 8
"""Tokens of the prompt that an answer follows."""

LIMIT = 10.0
"""Seconds after which an answer ends early: on a busy machine a token may take a second."""


def prompt_ids(n_vocab: int, n: int) -> list[int]:
    """Random tokens, the same for each engine, without the special tokens that are first and last in many vocabularies."""
    ids: list[int] = np.random.default_rng(0).integers(5, n_vocab - 5, n).tolist()
    return ids


class Ours:
    """This engine."""

    def __init__(self, path: str, n_threads: int, n_prompt: int, n_answer: int) -> None:
        import engine

        self.n_answer = n_answer
        # No drafts: only plain steps are compared.
        n_ctx = context(n_prompt, n_answer)
        self.llm = engine.load(path, device="cpu", n_threads=n_threads, n_ctx=n_ctx, mtp=False)
        self.llm.compile()
        self.ids = prompt_ids(self.llm.config.n_vocab, n_prompt)
        self.beginning = prompt_ids(self.llm.config.n_vocab, BEGINNING)

    def prompt(self) -> dict[str, float]:
        """Seconds until the logits after the prompt are known."""
        self.llm.reset()
        begun = time.perf_counter()
        self.llm.prefill(self.ids)
        return {"seconds": time.perf_counter() - begun, "tokens": len(self.ids)}

    def answer(self) -> dict[str, float]:
        """Seconds of a greedy answer, from the first token, which the prompt has decided, to the last."""
        from engine.sampling.sampler import Sampler, SamplerParams

        self.llm.reset()
        logits, _ = self.llm.prefill(self.beginning)
        greedy = Sampler(SamplerParams(temperature=0.0, seed=0), self.llm.config.n_vocab)
        ids = [*self.beginning, greedy.sample(logits, BEGINNING, self.beginning)]
        steps = self.llm.decode(ids, greedy, self.n_answer)
        begun = now = time.perf_counter()
        count = 0
        for _ in steps:
            now = time.perf_counter()
            count += 1
            if now - begun > LIMIT:
                break
        steps.close()
        return {"seconds": now - begun, "tokens": count}

    def facts(self) -> dict[str, Any]:
        """The bytes that a token of the answer reads, and what a plain read of memory reaches, in bytes per second."""
        from engine.models import traffic

        cached = traffic.cache_bytes_per_token(traffic.memories(self.llm), BEGINNING, self.n_answer)
        return {
            "bytes_per_token": self.llm.n_bytes_read + cached,
            "bandwidth": self.llm.model.ops.bandwidth(),
        }


class LlamaCpp:
    """llama.cpp, called without the sampler of its Python package, which would be measured too."""

    def __init__(self, path: str, n_threads: int, n_prompt: int, n_answer: int, flash_attn: bool) -> None:
        import llama_cpp

        self.n_answer = n_answer
        self.api = llama_cpp
        self.llama = llama_cpp.Llama(
            path,
            n_ctx=context(n_prompt, n_answer),
            n_batch=max(n_prompt, BEGINNING),
            n_threads=n_threads,
            n_threads_batch=n_threads,
            flash_attn=flash_attn,
            verbose=False,
        )
        self.n_vocab = self.llama.n_vocab()
        self.ids = prompt_ids(self.n_vocab, n_prompt)
        self.beginning = prompt_ids(self.n_vocab, BEGINNING)

    def clear(self) -> None:
        """Empty the cache."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.llama.ctx), False)

    def read(self, ids: list[int]) -> int:
        """Append tokens to the cache; returns the likeliest next token."""
        tokens = (self.api.llama_token * len(ids))(*ids)
        status = self.api.llama_decode(self.llama.ctx, self.api.llama_batch_get_one(tokens, len(ids)))
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        logits = np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.llama.ctx, -1), shape=(self.n_vocab,))
        return int(np.argmax(logits))

    def prompt(self) -> dict[str, float]:
        """Seconds until the logits after the prompt are known."""
        self.clear()
        begun = time.perf_counter()
        self.read(self.ids)
        return {"seconds": time.perf_counter() - begun, "tokens": len(self.ids)}

    def answer(self) -> dict[str, float]:
        """Seconds of a greedy answer, from the first token, which the prompt has decided, to the last."""
        self.clear()
        token = self.read(self.beginning)
        begun = now = time.perf_counter()
        count = 0
        while count < self.n_answer and now - begun <= LIMIT:
            token = self.read([token])
            now = time.perf_counter()
            count += 1
        return {"seconds": now - begun, "tokens": count}

    def facts(self) -> dict[str, Any]:
        """The version, and what the library was compiled for."""
        built = self.api.llama_print_system_info().decode().strip(" |")
        return {"version": self.api.__version__, "built": built}


def context(n_prompt: int, n_answer: int) -> int:
    """Positions of the context: enough for either measurement, a multiple of 256 as llama.cpp rounds it."""
    return -(-max(n_prompt, BEGINNING + n_answer + 1) // 256) * 256


def play(task: dict[str, Any]) -> None:
    """Load the model, do each measurement once to warm up, report that it is ready, and answer every line."""
    # What libraries print must not be taken for an answer.
    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    kinds: dict[str, type[Ours | LlamaCpp]] = {"ours": Ours, "llama.cpp": LlamaCpp}
    player = kinds[task.pop("engine")](**task)
    player.prompt()
    player.answer()
    print(json.dumps("ready"), file=replies)
    for line in sys.stdin:
        measure = {"prompt": player.prompt, "answer": player.answer, "facts": player.facts}[line.strip()]
        print(json.dumps(measure()), file=replies)


if __name__ == "__main__":
    play(json.loads(sys.argv[1]))
