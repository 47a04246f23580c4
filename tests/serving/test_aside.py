"""Where the prompt of a request is made."""

import asyncio
import threading

import pytest

from engine.serving.aside import SMALL, aside


@pytest.mark.parametrize("size", [0, SMALL, SMALL + 1])
def test_only_what_is_long_is_done_in_a_thread(size: int) -> None:
    done_by = asyncio.run(aside(size, threading.current_thread))
    assert (done_by is threading.main_thread()) == (size <= SMALL)


@pytest.mark.parametrize("size", [0, SMALL + 1])
def test_its_error_is_raised(size: int) -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(aside(size, lambda: 1 // 0))
