"""A browser without a screen, driven over the DevTools protocol: for tests of pages, and for screenshots of them.

Chromium reads commands from descriptor 3 and writes results to descriptor 4 (``--remote-debugging-pipe``), so no package is
needed.
"""

import base64
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from docs.screenshots import find_browser

SECONDS = 60.0
"""The most time that anything may take."""

KEYS = {"Enter": 13, "Escape": 27, "Home": 36, "End": 35, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}
"""Key codes."""

CTRL, SHIFT = 2, 8
"""Bits of modifiers."""


class Page:
    """A page in a browser.

    Attributes
    ----------
    problems : list of str
        Errors of scripts, and violations of the page's policy, so far.
    """

    def __init__(self, writer: int, reader: int) -> None:
        self.problems: list[str] = []
        self._writer = writer
        self._reader = reader
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command.  Raises RuntimeError if it fails."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._writer, data) :]
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._reader, 1 << 16)
            if not data:
                raise RuntimeError("the browser has ended")
            self._rest += data
        found, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(found))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif event.get("method") == "Log.entryAdded":
            entry = params["entry"]
            # An answer with status 400 is an error of the network to a browser, which is up to the page.
            if entry["level"] == "error" and entry["source"] != "network":
                self.problems.append(entry["text"])

    def open(self, url: str) -> None:
        """Load a page, and wait until its scripts have run."""
        self.command("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression of the page, or what its promise gives.  Raises RuntimeError if it throws."""
        found = self.command(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", script))
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = SECONDS) -> Any:
        """The value of an expression as soon as it is true.  Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while (value := self.run(script)) in (None, False, 0, ""):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {script}\n{self.problems}\n{self.run('document.body.innerText')}")
            time.sleep(0.02)
        return value

    def click(self, selector: str, text: str = "") -> None:
        """Click, as with a mouse, on the last element of a selector that is visible, and has a text."""
        script = f"""(() => {{
          const found = [...document.querySelectorAll({json.dumps(selector)})].filter((each) =>
            each.getClientRects().length && (!{json.dumps(text)} || each.textContent === {json.dumps(text)})).at(-1);
          if (!found) return null;
          found.scrollIntoView({{block: "nearest"}});
          const box = found.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        x, y = self.wait(script)
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type a text into what has the focus."""
        self.command("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key."""
        given: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
        if key == "Enter" and not modifiers:
            given["text"] = "\r"
        self.command("Input.dispatchKeyEvent", type="keyDown", **given)
        self.command("Input.dispatchKeyEvent", type="keyUp", **given)

    def look(self, width: int, height: int, theme: str = "light") -> None:
        """Set the size of the window in pixels, and the colours that the user prefers: "light" or "dark"."""
        phone = width < 500
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.command("Emulation.setEmulatedMedia", features=features)
        # A page learns of it when it is drawn next.
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def page(browser: str | None = None) -> Iterator[Page]:
    """A page in a browser of its own, which ends with the context; browser: its path."""
    browser = browser or find_browser()
    assert browser is not None
    into, out = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        words += ["--remote-debugging-pipe", f"--user-data-dir={profile}"]
        # The descriptors of the child are 3 and 4, whatever ours are.
        shell = f'exec "$0" "$@" 3<&{into[0]} 4>&{out[1]}'
        process = subprocess.Popen(
            ["bash", "-c", shell, *words],
            pass_fds=(into[0], out[1]),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(into[0])
        os.close(out[1])
        try:
            yield Page(into[1], out[0])
        finally:
            os.close(into[1])  # which ends the browser
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(out[0])
