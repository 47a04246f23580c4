"""The book in a browser: no page is wider than the window, and every formula is one that the browser understands."""

import doctest
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from html import unescape
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from docs import browser as driver
from docs.screenshots import BROWSERS, DOCS, THEMES, build, find_browser, run_browser

WIDTHS = (1280, 390)

MEASURE = """
<!doctype html><meta charset="utf-8"><title>measure</title><pre id="result"></pre>
<script>
const names = %s, width = %d, result = [];
const frame = document.createElement("iframe");
frame.style.border = 0;
document.body.append(frame);

// What may be wider than its box: it has its own scroll bar.
const SCROLLS = ".highlight pre, .table-wrapper, .formula, p:has(> img.wide), .sidebar-drawer, .toc-drawer, "
  + ".skip-to-content, .visually-hidden";

function measure(name) {
  const page = frame.contentDocument, view = frame.contentWindow, root = page.scrollingElement;
  const wide = [...page.querySelectorAll("body *")].filter((e) =>
    !e.closest(SCROLLS) && e.getClientRects().length && e.getBoundingClientRect().right > view.innerWidth + 1
    && view.getComputedStyle(e).visibility !== "hidden");
  const formulas = [...page.querySelectorAll("math")];
  const code = [...page.querySelectorAll(".highlight pre")].map((e) => e.scrollWidth - e.clientWidth);
  result.push({
    name, inner: view.innerWidth, scroll: root.scrollWidth, theme: view.getComputedStyle(page.body).colorScheme,
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches,
    background: view.getComputedStyle(page.body).backgroundColor,
    wide: wide.slice(0, 4).map((e) => `${e.tagName} ${e.className} ${(e.textContent || "").slice(0, 60)}`),
    formulas: formulas.length,
    drawn: formulas.filter((e) => e.getBoundingClientRect().width > 3).length,
    cut: code.filter((n) => n > 0).length, blocks: code.length, scripts: page.querySelectorAll("script[src^='http']").length,
  });
}

async function all() {
  frame.width = width;
  frame.height = 900;
  for (const name of names) {
    await new Promise((done) => { frame.onload = done; frame.src = name; });
    measure(name);
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


Measure = Callable[[str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def measured(browser: str, book: Path) -> Measure:
    """What a browser says about every page in a theme and at a width."""
    names = sorted(path.name for path in book.glob("*.html"))

    @cache
    def measure(theme: str, width: int) -> list[dict[str, Any]]:
        wrapper = book / "measure.html"
        wrapper.write_text(MEASURE % (json.dumps(names), width), encoding="utf-8")
        options = ("--dump-dom", "--window-size=1400,1000", "--virtual-time-budget=120000")
        text = run_browser(browser, wrapper, *options, theme=theme)
        wrapper.unlink()
        result = re.search(r'<pre id="result">(.*?)</pre>', text, re.S)
        assert result and result[1], text[-2000:]
        found: list[dict[str, Any]] = json.loads(unescape(result[1]))
        assert len(found) == len(names)
        return found

    return measure


def test_the_book_has_no_warnings(book: Path) -> None:
    assert {"index.html", "testing.html"} <= {path.name for path in book.glob("*.html")}


BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(19, 20, 22)"}
"""The color of pages by theme."""


@pytest.mark.thorough
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("theme", THEMES)
def test_no_page_is_wider_than_the_window(measured: Measure, theme: str, width: int) -> None:
    for page in measured(theme, width):
        assert page["inner"] == width
        assert page["dark"] == (theme == "dark")
        assert page["background"] == BACKGROUNDS[theme]
        assert page["scroll"] <= width and not page["wide"], page


@pytest.mark.thorough
def test_code_fits_on_a_desktop(measured: Measure) -> None:
    """Lines of 120 columns do; only commands and output may be longer."""
    pages = measured("dark", 1280)
    cut, blocks = sum(page["cut"] for page in pages), sum(page["blocks"] for page in pages)
    assert blocks > 100 and cut <= blocks // 50, {page["name"]: page["cut"] for page in pages if page["cut"]}


@pytest.mark.thorough
def test_formulas_are_drawn_without_a_network(measured: Measure) -> None:
    pages = measured("dark", 1280)
    assert sum(page["formulas"] for page in pages) > 0
    assert all(page["drawn"] == page["formulas"] and page["scripts"] == 0 for page in pages)


# --- what the script adds ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_page(browser: str) -> Iterator[driver.Page]:
    with driver.page(browser) as found:
        yield found


BLOCKS = """
[...document.querySelectorAll("div.highlight")].map((block) => {
  block.querySelector("button.copy").click();
  return [block.parentElement.className, block.querySelector("pre").textContent, window.copied];
})
"""
"""The class of each block of a page, its text, and what its button copies."""


@pytest.mark.thorough
def test_buttons_copy_what_is_typed(open_page: driver.Page, book: Path) -> None:
    """Sessions without their prompts and output, other blocks as they are."""
    kinds = set()
    for name in ("quick-start", "why-bits", "sampling", "testing"):
        open_page.open((book / f"{name}.html").as_uri())
        open_page.wait("document.querySelector('button.copy')")
        open_page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }; 0")
        for kind, text, copied in open_page.run(BLOCKS):
            language = kind.split()[0].removeprefix("highlight-")
            kinds.add(language)
            if language == "pycon":
                # doctest is another reader of such sessions.
                examples = doctest.DocTestParser().get_examples(text + "\n")
                assert copied.split() == "".join(example.source for example in examples).split()
            elif language == "console":
                lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
                assert lines and all(line in copied.splitlines() for line in lines)
                assert not any(line.startswith("$ ") for line in copied.splitlines())
                assert len(copied.splitlines()) == len(lines) + sum(line.endswith("\\") for line in copied.splitlines())
            else:
                assert copied == text.removesuffix("\n")
    assert {"pycon", "console", "text", "python"} <= kinds and not open_page.problems


NOTES = """
[...document.querySelectorAll("[role=main] .table-wrapper, [role=main] p:has(> img.wide)")].map((box) => {
  const note = box.previousElementSibling;
  return [box.scrollWidth > box.clientWidth + 1, note.className === "scrolls" && note.getClientRects().length > 0,
          box.tabIndex];
})
"""
"""Of each table and wide picture: whether a part of it is hidden, whether a line says so, and its place for keyboards."""


@pytest.mark.thorough
def test_what_scrolls_says_so(open_page: driver.Page, book: Path) -> None:
    hidden = dict.fromkeys(WIDTHS, 0)
    for width in WIDTHS:
        open_page.look(width, 900)
        for name in ("command-line", "performance", "mtp", "tensor-cores"):
            open_page.open((book / f"{name}.html").as_uri())
            boxes = open_page.run(
                f"new Promise((done) => requestAnimationFrame(() => setTimeout(() => done({NOTES}), 50)))"
            )
            assert boxes
            for is_wide, says_so, tab_index in boxes:
                assert is_wide == says_so == (tab_index == 0)
                hidden[width] += is_wide
    assert hidden[390] > hidden[1280]
