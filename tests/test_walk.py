"""The walk of one token through the code: the files that a step on the CPU without drafts enters before the first kernel."""

import re
import sys
from types import FrameType
from typing import Any

import engine
from engine.decode.generation import request_of
from tests.conftest import REPOSITORY

MOST_FILES = 13
KERNELS = "engine/cpu/runtime/walk.py"
"""The compiled walk over the kernels of a pass."""


def walk(llm: engine.LLM) -> list[str]:
    """The files of a step, in the order in which they are first entered."""
    request = request_of(llm.generate([5, 6, 7], max_tokens=8, temperature=0, ignore_eos=True))
    llm.core.submit(request)
    while len(request.items) < 3:
        llm.core.step()
    files: dict[str, None] = {}

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and KERNELS not in files:
            file = frame.f_code.co_filename
            if file.startswith(f"{REPOSITORY}/engine/"):
                files[file.removeprefix(f"{REPOSITORY}/")] = None

    with llm.lock:
        sys.setprofile(entered)
        try:
            llm.core.scheduler.step()
        finally:
            sys.setprofile(None)
    assert len(request.items) == 4
    llm.core.close(request)
    return list(files)


def test_the_book_shows_it() -> None:
    with engine.load(n_ctx=64, device="cpu", n_threads=1) as llm:
        files = walk(llm)
    assert files.pop() == KERNELS
    assert len(files) <= MOST_FILES
    text = (REPOSITORY / "docs/structure.md").read_text(encoding="utf-8")
    listed = re.search(r"\*A token on the CPU\*(.*?)\n\n", text, re.DOTALL)
    assert listed is not None
    assert re.findall(r"`(engine/[\w/]+\.py)`", listed[1]) == [*files, KERNELS]
