"""Processes that are forked from one that has computed: they work, or one sentence says why they cannot."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from numba.core.compiler_lock import global_compiler_lock

import engine
from engine.cached_model import ON_GPU
from engine.decode.generation import request_of
from engine.errors import UsageError
from engine.grammar import tokens
from engine.llm import LLM
from engine.locking import IN_USE, Lock
from engine.synthetic.model import make_model

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

SECONDS = 120
"""A forked process that takes longer hangs."""

Use = Callable[[LLM], Any]


def forked(call: Callable[[], Any]) -> str:
    """What a forked process gets from a call, as text: its result, or its error."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            text = str(call())
        except BaseException as error:
            text = str(error) if isinstance(error, UsageError) else repr(error)
        os.write(into, text.encode())
        os._exit(0)
    os.close(into)
    with open(out) as file:
        text = file.read()
    assert os.waitpid(child, 0)[1] == 0, "the forked process hangs or has crashed"
    return text


@contextmanager
def elsewhere(context: Any) -> Iterator[None]:
    """Another thread is in a context in the meantime."""
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with context:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait()
    try:
        yield
    finally:
        leave.set()
        thread.join()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = make_model(tmp_path_factory.mktemp("models") / "a.gguf", "tiny-qwen3", "Q8_0")
    with engine.load(path, device="cpu", n_ctx=64, n_threads=2, parallel=2) as opened:
        yield opened


def text(llm: LLM) -> str:
    return llm.complete([1, 2, 3], max_tokens=4, temperature=0, ignore_eos=True).text


def close(llm: LLM) -> str:
    llm.close()
    return "closed"


def stream(llm: LLM) -> str:
    async def whole() -> str:
        return "".join([piece async for piece in llm.stream([1, 2, 3], max_tokens=4, temperature=0, ignore_eos=True)])

    return asyncio.run(whole())


@pytest.mark.parametrize("use", [text, stream, close])
def test_a_model_that_nobody_uses_at_the_time(use: Use, llm: LLM) -> None:
    """Also after answers that have left threads."""
    expected = stream(llm)
    assert forked(lambda: use(llm)) == ("closed" if use is close else expected)
    assert text(llm) == expected


@pytest.mark.parametrize("use", [text, stream, close])
def test_a_model_that_another_thread_uses(use: Use, llm: LLM) -> None:
    expected = text(llm)
    with elsewhere(llm.lock):
        assert forked(lambda: use(llm)) == IN_USE
    assert text(llm) == expected


def test_an_answer_that_another_thread_waits_for(llm: LLM) -> None:
    """Between two rounds nobody has the model, but the answer has a slot and its thread is gone."""
    answer = llm.generate([1, 2, 3], max_tokens=9, temperature=0, ignore_eos=True)
    next(answer)
    request = request_of(answer)
    request.asking, request.thread = True, -1
    assert forked(lambda: text(llm)) == IN_USE
    request.asking = False
    answer.close()


def test_closing_while_another_thread_begins_an_answer(llm: LLM) -> None:
    with elsewhere(llm.answering()):
        assert forked(lambda: close(llm)) == "closed"


def test_an_answer_in_progress(llm: LLM) -> None:
    """It goes on in both processes, unless another thread computes its next piece at the time."""
    answer = llm.generate([1, 2, 3], max_tokens=6, temperature=0, ignore_eos=True)
    first = next(answer)
    rest = forked(lambda: "".join(answer))
    with elsewhere(answer._turn):
        assert forked(lambda: next(answer)) == IN_USE
    assert rest == "".join(answer) and first


def test_a_model_on_a_gpu(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.model.ops, "n_threads", 0)
    assert forked(lambda: text(llm)) == ON_GPU


def test_a_lock_that_another_thread_has() -> None:
    lock = Lock()
    with elsewhere(lock):
        assert forked(lambda: lock.acquire(blocking=False)) == "False"
        assert forked(lambda: lock.acquire()) == IN_USE
    with lock:  # this thread goes on in the forked process
        assert forked(lambda: (lock.acquire(), lock.nested)) == "(True, True)"
    assert forked(lock.acquire) == "True"


def test_other_locks(llm: LLM) -> None:
    template = llm.chat_template or engine.ChatTemplate("{{ messages[0].content }}", llm.tokenizer)
    expected = template.render([{"role": "user", "content": "a"}])
    with elsewhere(template._lock):
        assert forked(lambda: template.render([{"role": "user", "content": "a"}])) == expected
    with elsewhere(tokens._LOCK):
        assert forked(lambda: tokens._LOCK.acquire(timeout=1)) == "True"


def test_a_fork_waits_while_another_thread_compiles() -> None:
    """A process that was forked in the middle of that could never compile."""
    entered = threading.Event()

    def stay() -> None:
        with global_compiler_lock:
            entered.set()
            for _ in range(10):
                threading.Event().wait(0.01)

    @njit
    def twice(x):
        return x + x

    thread = threading.Thread(target=stay)
    thread.start()
    entered.wait()
    assert forked(lambda: twice(np.int64(3))) == "6"
    thread.join()
    assert twice(np.int64(4)) == 8
