"""What a process does when it has been forked.

A forked process has one thread, the one that called ``fork``, and a copy of everything else: locks that its parent's other
threads held are never released in it, and what these threads were doing never goes on.  Objects that depend on other threads
are renewed, before anything else runs in the process.
"""

import os
import weakref
from typing import Protocol


class Renewed(Protocol):
    """An object that depends on other threads."""

    def renew(self) -> None:
        """Forget the threads that do not exist in this process, which has just been forked."""


_renewed: "weakref.WeakSet[Renewed]" = weakref.WeakSet()


def renew_in_children(one: Renewed) -> None:
    """Let an object be renewed in forked processes, as long as it exists."""
    _renewed.add(one)


def _renew() -> None:
    for one in list(_renewed):
        one.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
