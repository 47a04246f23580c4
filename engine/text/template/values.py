"""Further values for a chat template, as programs give them."""

from collections.abc import Mapping
from typing import Any

from engine.checks import described
from engine.errors import UsageError


def template_values(values: object) -> dict[str, Any]:
    """Further values for a chat template.  Raises UsageError unless they are a mapping of names that are free."""
    if not isinstance(values, Mapping):
        raise UsageError(f"chat_template_kwargs must map names to values, not {described(values)}.")
    for name in values:
        if not isinstance(name, str):
            raise UsageError(f"a name in chat_template_kwargs must be a text, not {described(name)}.")
    for name in ("self", "messages", "known", "at_least"):
        if name in values:
            raise UsageError(f"chat_template_kwargs must not set {name}; give messages as the first argument.")
    return dict(values)
