"""The book in a browser: no page is wider than the window, and every formula is one that the browser understands."""

import json
import re
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from docs.screenshots import BROWSERS, DOCS, THEMES, build, find_browser, run_browser

WIDTHS = (1280, 390)

MEASURE = """
<!doctype html><meta charset="utf-8"><title>measure</title><pre id="result"></pre>
<script>
const names = %s, widths = %s, result = [];
const frame = document.createElement("iframe");
frame.style.border = 0;
document.body.append(frame);

// What may be wider than its box: it has its own scroll bar.
const SCROLLS = ".highlight pre, .table-wrapper, .formula, .sidebar-drawer, .toc-drawer, .skip-to-content, .visually-hidden";

function measure(name, width) {
  const page = frame.contentDocument, view = frame.contentWindow, root = page.scrollingElement;
  const wide = [...page.querySelectorAll("body *")].filter((e) =>
    !e.closest(SCROLLS) && e.getClientRects().length && e.getBoundingClientRect().right > view.innerWidth + 1
    && view.getComputedStyle(e).visibility !== "hidden");
  const formulas = [...page.querySelectorAll("math")];
  const code = [...page.querySelectorAll(".highlight pre")].map((e) => e.scrollWidth - e.clientWidth);
  result.push({
    name, width, inner: view.innerWidth, scroll: root.scrollWidth, theme: view.getComputedStyle(page.body).colorScheme,
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    background: view.getComputedStyle(page.body).backgroundColor,
    wide: wide.slice(0, 4).map((e) => `${e.tagName} ${e.className} ${(e.textContent || "").slice(0, 60)}`),
    formulas: formulas.length,
    drawn: formulas.filter((e) => e.getBoundingClientRect().width > 3).length,
    cut: code.filter((n) => n > 0).length, blocks: code.length, scripts: page.querySelectorAll("script[src^='http']").length,
  });
}

async function all() {
  for (const width of widths) {
    frame.width = width;
    frame.height = 900;
    for (const name of names) {
      await new Promise((done) => { frame.onload = done; frame.src = name; });
      measure(name, width);
    }
  }
  document.getElementById("result").textContent = JSON.stringify(result);
}
all();
</script>
"""


FORMULA = re.compile(r"^\$\$\n(.*?)^\$\$$", re.M | re.S)


def test_formulas_are_well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("latex2mathml", reason="formulas need the extra docs")
    monkeypatch.syspath_prepend(DOCS / "_ext")
    mathml = import_module("mathml").mathml
    pages = [page.read_text(encoding="utf-8") for page in DOCS.glob("*.md")]
    formulas = [formula.strip() for page in pages for formula in FORMULA.findall(page)]
    assert len(formulas) > 20
    for formula in formulas:
        element = ElementTree.fromstring(mathml(formula, "block"))
        assert str(element.get("alttext")).split() == formula.split()
    with pytest.raises(ValueError, match=r"nonsense is unknown"):
        mathml(r"a + \nonsense{b}", "inline")


@pytest.fixture(scope="module")
def browser() -> str:
    found = find_browser()
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    return found


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("sphinx", "myst_parser", "furo", "latex2mathml"):
        pytest.importorskip(package, reason="the book needs the extra docs")
    folder = tmp_path_factory.mktemp("book")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def measured(browser: str, book: Path) -> dict[str, list[dict[str, Any]]]:
    """By theme, what a browser says about every page at every width."""
    names = sorted(path.name for path in book.glob("*.html"))
    wrapper = book / "measure.html"
    wrapper.write_text(MEASURE % (json.dumps(names), json.dumps(WIDTHS)), encoding="utf-8")
    found = {}
    for theme in THEMES:
        options = ("--dump-dom", "--window-size=1400,1000", "--virtual-time-budget=120000")
        text = run_browser(browser, wrapper, *options, theme=theme)
        result = re.search(r'<pre id="result">(.*?)</pre>', text, re.S)
        assert result and result[1], text[-2000:]
        found[theme] = json.loads(unescape(result[1]))
        assert len(found[theme]) == len(names) * len(WIDTHS)
    wrapper.unlink()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", THEMES)
def test_no_page_is_wider_than_the_window(measured: dict[str, list[dict[str, Any]]], theme: str, width: int) -> None:
    for page in measured[theme]:
        if page["width"] == width:
            assert page["inner"] == width
            assert page["dark"] == (theme == "dark")
            assert page["scroll"] <= width and not page["wide"], page
    assert len({page["background"] for pages in measured.values() for page in pages}) == len(THEMES)


@pytest.mark.thorough
def test_code_fits_on_a_desktop(measured: dict[str, list[dict[str, Any]]]) -> None:
    """Lines of 120 columns do; only commands and output may be longer."""
    pages = [page for page in measured["light"] if page["width"] == 1280]
    cut, blocks = sum(page["cut"] for page in pages), sum(page["blocks"] for page in pages)
    assert blocks > 100 and cut <= blocks // 50, {page["name"]: page["cut"] for page in pages if page["cut"]}


@pytest.mark.thorough
def test_formulas_are_drawn_without_a_network(measured: dict[str, list[dict[str, Any]]]) -> None:
    pages = measured["light"]
    assert sum(page["formulas"] for page in pages) > 0
    assert all(page["drawn"] == page["formulas"] and page["scripts"] == 0 for page in pages)
