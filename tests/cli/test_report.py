"""What a run prints to stderr: few lines in a file, bars and a live line on a terminal that leave nothing behind."""

import io
import os
import sys
import time

import pytest

from engine.cli.report import Report, _speculation, peak_memory
from engine.cli.terminal import StatusLine, printable, terminal_size
from engine.compile.cache import Places
from engine.speculative.statistics import Statistics


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise io.UnsupportedOperation("not a real one")


def test_plain_lines_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    stream = io.StringIO()
    with Report(stream=stream) as report:
        for done in range(129):
            report.progress("prompt", done, 128)
            clock[0] += 0.0625
        for done in (0, 1):
            report.progress("load", done, 1)
    assert stream.getvalue().splitlines() == [
        "reading the prompt: 32 of 128 tokens, 16.0 tokens/s, 6 s left",
        "reading the prompt: 64 of 128 tokens, 16.0 tokens/s, 4 s left",
        "reading the prompt: 96 of 128 tokens, 16.0 tokens/s, 2 s left",
        "reading the prompt: 128 of 128 tokens, 16.0 tokens/s",
    ]


def test_tokens_that_were_cached_do_not_count_for_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    stream = io.StringIO()
    with Report(stream=stream) as report:
        report.progress("prompt", 1000, 20_000)
        clock[0] += 10
        report.progress("prompt", 1050, 20_000)
    assert stream.getvalue() == "reading the prompt: 1050 of 20000 tokens, 5.0 tokens/s, 63 min left\n"


def test_kernels_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.compile.cache.places", lambda part: Places([], None))
    stream = Screen()
    with Report(stream=stream) as report:
        report.progress("compile", 0, 2)
    assert "kept for the next run" not in stream.getvalue()
    assert "no folder to keep the kernels in" in stream.getvalue()


def test_bars_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Screen()
    with Report(stream=stream) as report:
        for done in range(5):
            report.progress("compile", done, 4)
        report.line("after")
        report.progress("prompt", 1, 10)
    text = stream.getvalue()
    assert "compiling (kept for the next run)" in text
    assert "4 of 4 kernels" in text
    assert text.index("compiling") < text.index("\x1b[2mafter\x1b[0m") < text.index("reading the prompt")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 2  # the cursor is shown again


def test_the_status_line_gives_the_screen_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Screen()
    status = StatusLine(stream, shared=True)
    status.draw("10 tokens")
    status.draw("20 tokens")
    status.close()
    status.close()
    assert stream.getvalue() == (
        "\x1bD\x1b[A\x1b7\x1b[1;23r\x1b8"
        "\x1b7\x1b[24;1H\x1b[2K\x1b[2m10 tokens\x1b[0m\x1b8"
        "\x1b7\x1b[24;1H\x1b[2K\x1b[2m20 tokens\x1b[0m\x1b8"
        "\x1b7\x1b[r\x1b[24;1H\x1b[2K\x1b8"
    )


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b[2J\x07\x9b\r\n\té\U0001f468‍\U0001f469") == "a�[2J��\n\té\U0001f468‍\U0001f469"


def rows(statistics: Statistics) -> dict[str, str]:
    """The lines of the end report about drafts, with 12 tokens/s."""
    return dict(_speculation(statistics, 12.0))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_a_terminal_that_does_not_know_its_size() -> None:
    """A new pseudo-terminal has no rows and no columns."""
    import pty

    _, other = pty.openpty()
    assert os.get_terminal_size(other).columns == 0
    with os.fdopen(other, "w") as stream:
        assert tuple(terminal_size(stream)) == (80, 24)
        Report(stream=stream).line("a word " * 30)


def test_what_is_said_of_drafts() -> None:
    statistics = Statistics()
    assert rows(statistics) == {"drafts": "none"}
    statistics.plain_n = 5
    assert rows(statistics) == {"drafts": "none: nothing was found to draft"}
    statistics.verified("model", drafted=1, accepted=1, seconds=0.1)
    assert rows(statistics)["drafts"] == "1 of 1 kept (100%)"
    statistics.verified("model", drafted=3, accepted=0, seconds=0.1)
    statistics.verified("lookup", drafted=2, accepted=2, seconds=0.1)
    assert rows(statistics) == {
        "drafts": "3 of 6 kept (50%; by place 67% 50% 0%), 1 of 4 by the draft model, 2 of 2 by lookup",
        "passes": "2.00 tokens per verification (3), 5 plain",
    }
    statistics.plain_s = 0.5
    assert rows(statistics)["passes"] == "2.00 tokens per verification (3), 5 plain at 10.0 tokens/s: 1.20 x that"


def test_peak_memory_is_plausible() -> None:
    peak = peak_memory()
    block = bytearray(peak + 2**20)
    for i in range(0, len(block), 4096):
        block[i] = 1
    after = peak_memory()
    assert peak < len(block) <= after < 20 * len(block)
