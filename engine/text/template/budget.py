"""Limits on rendering a chat template: steps, time, and the size of every value it makes."""

import time
from itertools import chain
from typing import Any

from engine.errors import TemplateError

MAX_STEPS, STEPS_PER_VALUE = 200_000, 2_000  # for a template alone, and in addition for every value in the messages
MAX_SIZE, SIZE_PER_CHARACTER = 1 << 18, 16  # of one value: characters of text plus number of values
MAX_TOTAL = 16  # times MAX_SIZE, for all values that a rendering makes
MAX_SECONDS = 10.0  # a safety net for costs that the counts above miss

VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


class BudgetError(TemplateError):
    """A rendering that exceeds its limits."""


class Budget:
    """The limits of one rendering, which grow with the messages: ``n_values`` in them, ``n_characters`` of text."""

    def __init__(self, n_values: int = 0, n_characters: int = 0) -> None:
        self.steps = MAX_STEPS + STEPS_PER_VALUE * n_values
        self.max_size = MAX_SIZE + SIZE_PER_CHARACTER * (n_characters + n_values)
        self.total = MAX_TOTAL * self.max_size
        self.deadline = time.monotonic() + MAX_SECONDS
        self.sizes: dict[int, tuple[Any, int]] = {}

    def tick(self) -> None:
        """Counts one step."""
        self.steps -= 1
        if self.steps < 0 or time.monotonic() > self.deadline:
            raise BudgetError("the chat template takes far too many steps: it is broken or hostile")

    def refuse_over(self, size: int) -> None:
        """Raises BudgetError if a value of ``size`` would be too large."""
        if size > self.max_size:
            raise BudgetError("the chat template makes or compares far too much text: it is broken or hostile")

    def size(self, value: Any) -> int:
        """Characters and values in ``value``; a shared part counts as often as it would be printed."""
        if isinstance(value, str):
            return 1 + len(value)
        if not isinstance(value, (list, tuple, dict, *VIEWS)):
            return 1
        known = self.sizes.get(id(value))
        if known is not None:
            return known[1]
        parts: Any = chain.from_iterable(value.items()) if isinstance(value, dict) else value
        size = 1
        for part in parts:
            size += self.size(part)
            self.refuse_over(size)
        if not isinstance(value, VIEWS):
            self.sizes[id(value)] = (value, size)  # keeps the value alive, so that its id stays its own
        return size

    def made(self, value: Any) -> Any:
        """Counts a new value and returns it."""
        size = self.size(value)
        self.refuse_over(size)
        self.total -= size
        if self.total < 0:
            self.refuse_over(self.max_size + 1)
        return value
