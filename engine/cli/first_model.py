"""The model of a conversation for which the user has named none."""

import sys

from engine.cli.report import Report
from engine.errors import FetchError
from engine.hub.catalog import CATALOG, is_present, model_file
from engine.hub.resolve import fetch

NAME = "smollm2-135m"
"""The smallest named model that answers questions."""


def conversation_model(report: Report) -> str | None:
    """The name of a model that holds conversations; None for the bundled model, which only continues text.

    The model is fetched if it is missing and the user agrees. The question is asked once: a refusal is remembered until the
    model is there, and without a terminal nobody is asked.
    """
    model = CATALOG[NAME]
    if is_present(model):
        return NAME
    size = f"{model.n_bytes / 1e6:.0f} MB"
    refused = model_file(model).with_suffix(".refused")
    if sys.stdin.isatty() and report.stream.isatty() and not refused.exists():
        report.line(
            f"The bundled model continues Python source. For a conversation there is {NAME} ({size}), in English."
        )
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
            refused.parent.mkdir(parents=True, exist_ok=True)
            refused.touch()
        except OSError:
            pass  # then the next conversation asks again
    report.line(
        f"note: the bundled model continues text; `bitmirror chat -m {NAME}` downloads one that answers ({size})"
    )
    return None
