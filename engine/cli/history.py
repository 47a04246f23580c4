"""The messages of earlier chats, in a file that only its owner can read."""

import os
from pathlib import Path

from platformdirs import user_state_dir
from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from engine.cli.report import Report
from engine.machine import trust

MOST_BYTES = 1 << 20
"""The older half of a longer file is removed."""


class KeptHistory(FileHistory):
    """Messages in a file; if it can no longer be written, they are kept for this run."""

    def store_string(self, string: str) -> None:
        """Appends one message to the file."""
        try:
            super().store_string(string)
        except OSError:
            pass  # the list in memory has it


def open_history(report: Report) -> History:
    """The history in the user's state folder. If there can be no file, the history of this run only, after a note."""
    try:
        folder = Path(user_state_dir("bitmirror", appauthor=False))
        if not folder.is_absolute():
            raise OSError("there is no home folder")
        trust.make(folder)
        path = folder / "history"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        path.chmod(0o600)
        shorten(path)
        return KeptHistory(path)
    except OSError as error:
        report.line(f"note: messages are kept only for this session ({error.strerror or error})")
        return InMemoryHistory()


def shorten(path: Path) -> None:
    """Removes the older half of a long file; raises OSError."""
    if path.stat().st_size <= MOST_BYTES:
        return
    data = path.read_bytes()
    start = data.find(b"\n# ", len(data) - MOST_BYTES // 2)  # each message begins with the time, as a comment
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data[start:] if start >= 0 else b"")
    os.replace(new, path)
