"""The model of a conversation, or of a server, for which the user has named none."""

import sys

from engine.cli.report import Report
from engine.errors import FetchError
from engine.hub.catalog import CATALOG, is_present, model_file
from engine.hub.resolve import fetch
from engine.machine import trust

NAME = "smollm2-135m"
"""The smallest named model that answers questions."""


def conversation_model(report: Report, command: str = "chat") -> str | None:
    """The name of a model that can chat; None for the bundled model, which only continues text.

    command: the command whose model is wanted, which a note names.

    If the model is missing, it is downloaded if the user agrees. The question is asked only once: a refusal is remembered
    until the model has been downloaded. Without a terminal the question is not asked.
    """
    model = CATALOG[NAME]
    if is_present(model):
        return NAME
    size = f"{model.n_bytes / 1e6:.0f} MB"
    refused = model_file(model).with_suffix(".refused")
    if sys.stdin.isatty() and report.stream.isatty() and not refused.exists():
        report.line(f"The bundled model only continues Python source. {NAME} ({size}) can chat in English.")
        report.stream.write("Download it now? [Y/n] ")
        report.stream.flush()
        typed = sys.stdin.readline().lower()
        if typed in ("\n", "y\n", "yes\n"):
            try:
                fetch(model, report.progress)
                return NAME
            except FetchError as error:
                report.line(f"note: {error}")
                return None
        if not typed:
            report.line()
            return None  # the end of input is no refusal
        try:
            trust.make(refused.parent)
            refused.touch()
        except OSError:
            pass  # then the next conversation asks again
    report.line(
        f"note: the bundled model only continues text; `bitmirror {command} -m {NAME}` downloads one that can chat ({size})"
    )
    return None
