"""Thoughts in the form in which clients carry them to the next request without reading them."""

import base64

SEAL = "bitmirror:"
"""Begins a thought that this server has written.  Other services encrypt theirs."""


def sealed(thought: str) -> str:
    """A thought as ``encrypted_content``."""
    return SEAL + base64.b64encode(thought.encode("utf-8", "replace")).decode()


def opened(content: str) -> str:
    """The thought in ``encrypted_content``, "" if this server did not write it."""
    if not content.startswith(SEAL):
        return ""
    try:
        return base64.b64decode(content.removeprefix(SEAL), validate=True).decode()
    except ValueError:
        return ""
