"""An audit of the page's accessibility by axe-core: that of the package axe-core-python, or of another version whose
``axe.min.js`` is named by ``BITMIRROR_AXE``."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from docs.browser import Page, page
from docs.screenshots import BROWSERS, find_browser
from engine.serving.app import app
from engine.serving.served import Spec
from tests.serving.bundled import bundled
from tests.serving.live import live
from tests.serving.test_webui import IDLE, PHONE, say, settings


def axe() -> Path | None:
    """The path of axe-core, if there is one."""
    if named := os.environ.get("BITMIRROR_AXE"):
        return Path(named)
    found = importlib.util.find_spec("axe_core_python")
    return Path(found.origin).with_name("axe.min.js") if found and found.origin else None


AXE = axe()

pytestmark = [
    pytest.mark.skipif(find_browser() is None, reason=f"no browser is installed: none of {', '.join(BROWSERS)}"),
    pytest.mark.skipif(AXE is None, reason="axe-core-python is not installed, and BITMIRROR_AXE names no axe.min.js"),
    pytest.mark.together("webui"),
]

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]

ANSWER = "# A\n\n- a\n- b\n\n> q\n\n```py\nx\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n[l](https://x.example) `c`"


@pytest.fixture(scope="module")
def window() -> Iterator[Page]:
    with live(app([Spec("pycoder", lambda: bundled(1, 512))])) as (host, port), page() as made:
        made.open(f"http://{host}:{port}/")
        yield made


def audit(web: Page) -> None:
    assert AXE is not None
    web.command("Runtime.evaluate", expression=AXE.read_text(encoding="utf-8"))
    found = web.run(
        f"""axe.run(document, {{runOnly: {RULES}}}).then((result) => [result.passes.length,
          result.violations.map((each) => [each.id, each.help, each.nodes.map((node) => node.html.slice(0, 200))])])"""
    )
    passes, violations = found
    assert passes > 10 and violations == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, (1280, 900)], ids=["phone", "desktop"])
def test_nothing_is_against_the_guidelines(window: Page, theme: str, size: tuple[int, int]) -> None:
    web = window
    web.look(*size, theme)
    web.run("localStorage.clear()")
    web.command("Page.reload")
    web.wait("document.querySelector('#state')?.textContent.includes('context')")
    audit(web)
    settings(web, max_tokens="12", seed="7")
    say(web)
    web.run(f"""import("./webui/markdown.js").then(({{Markdown}}) => {{
      const made = new Markdown();
      made.show({json.dumps(ANSWER)});
      document.querySelector("article.answer .main").append(made.element);
    }})""")
    audit(web)
    web.click("button", "Same seed")
    web.wait(IDLE)
    web.click("button", "Tokens")
    web.wait("document.querySelector('.tokens')")
    web.run("document.querySelector('.tokens .token').focus()")
    web.press("Enter")
    web.wait("document.querySelector('.traced table')")
    web.run("document.querySelector('.traced details').open = true")
    audit(web)
    web.click("article.user button", "Edit")
    audit(web)
    web.press("Escape")
    settings(web, temperature="9")
    say(web, "x")
    audit(web)
    web.click("#settings-toggle")
    audit(web)
    web.click("#settings-close")
    if size == PHONE:
        web.click("#list-toggle")
        audit(web)
    web.click("#rename")
    audit(web)
    web.press("Escape")
