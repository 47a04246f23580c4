"""The Markdown of the server's page in a browser: beside markdown-it, and with texts that are made to do harm."""

import json
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from docs.browser import Page, page
from docs.screenshots import BROWSERS, find_browser
from engine.serving.app import app
from engine.serving.served import Spec
from tests.serving.live import live

pytestmark = [
    pytest.mark.skipif(find_browser() is None, reason=f"no browser is installed: none of {', '.join(BROWSERS)}"),
    pytest.mark.together("webui"),
]

RENDER = """import("./webui/markdown.js").then(({Markdown}) => {
  const made = new Markdown();
  for (const text of %s) made.show(text);
  return made.element.outerHTML;
})"""


def never() -> Any:
    raise AssertionError("no model is opened")


@pytest.fixture(scope="module")
def window() -> Iterator[Page]:
    with live(app([Spec("a", never)], preload=False)) as (host, port), page() as made:
        made.open(f"http://{host}:{port}/")
        yield made


def rendered(window: Page, *texts: str) -> str:
    """What the page makes of the last text, after it has shown the others."""
    return str(window.run(RENDER % json.dumps(texts)))


class Tree(HTMLParser):
    """HTML as lines: elements, the addresses of links, and texts, without what only this page, or only markdown-it, has."""

    SKIPPED = ("div", "button", "thead", "tbody", "input", "span")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._bar = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "div" and given.get("class") == "bar":
            self._bar = 1
        if tag not in self.SKIPPED:
            start = f" {given['start']}" if "start" in given else ""
            self.lines.append(f"<{tag}{start}{' ' + str(given['href']) if 'href' in given else ''}>")

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self._bar = 0
        elif tag not in (*self.SKIPPED, "br", "hr"):
            self.lines.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        text = data.strip("\n")
        if text.strip() and not self._bar:
            if self.lines and not self.lines[-1].startswith("<"):
                text = self.lines.pop() + text
            self.lines.append(text)


TEXTS = {
    "paragraphs": "One line\nand another.\n\nA second paragraph.\n\n\nA third one.",
    "emphasis": "*a* **b** ***c*** _d_ __e__ ~~f~~ **a *b* c** *a **b** c* snake_case_name 2*3*4 a * b * c",
    "unclosed emphasis": "**bold and *more\n\n*a\n\na* **",
    "code spans": "`a` ``b ` c`` ` d ` `*e*` `unclosed **f**",
    "escapes": r"\*a\* \`b\` \[c\](d) 1\. \\ \a",
    "headings": "# A\n\n## B `c`\n### C ###\n#### D\ntext\n#no heading",
    "a fence": "before\n```python\ndef f(x):\n\n    return *x*  # <b>\n```\nafter",
    "an open fence": "```\nx < 1\n",
    "tabs": "- a\n\t- b\n\n```make\nall:\n\tcc -o x\n```",
    "tildes": "~~~text\n```\n~~~\n\n````\n```\n````",
    "lists": "- a\n- b\n  more\n- c\n\n1. x\n2. y\n\n5) five\n6) six",
    "nested lists": "- a\n  - b\n    - c\n  - d\n- e\n\n1. x\n   - y\n   - z\n2. w",
    "loose lists": "- a\n\n- b\n\n  second paragraph\n\n- c",
    "code in a list": "1. First:\n   ```sh\n   ls -l\n     indented\n   ```\n2. Second:\n\n   ```\n   x\n\n   y\n   ```\n3.",
    "a list after a paragraph": "Steps:\n- one\n- two\n\nand 7. no list",
    "other markers": "* a\n* b\n\n+ c\n\n- d\n* e",
    "quotes": "> a\n> **b**\n>\n> - c\n> > d\n\nafter",
    "a lazy quote": "> a\nb\n\nc",
    "rulers": "a\n\n---\n\n***\n\n- - -\n\n_____\nb",
    "a table": "| a | b | c |\n|---|:-:|--:|\n| 1 | **2** | `3` |\n| 4 | 5 |\n| x \\| y | | z | more |\n\nafter",
    "a bare table": "a | b\n--- | ---\n1 | 2",
    "links": 'See [a](https://a.example/x_(y)?q=1) and [**b** `c`](http://b.example/d "a title") and <https://c.example/_d_>.',
    "brackets": "[a] [b](c [d]( ] ](x) a[0] [ ] [x](<https://y.example/z>) [[y]](https://z.example/)",
    "entities": "a &amp; b &lt;c&gt; &quot;d&quot;",
    "breaks": "a  \nb\\\nc\nd",
    "words of other alphabets": "**Größe** *naïve* пере_мен_ная 变量**强调**后",
}


@pytest.mark.parametrize("name", TEXTS)
def test_markdown_is_what_markdown_it_makes_of_it(window: Page, name: str) -> None:
    markdown_it = pytest.importorskip("markdown_it")
    reference = markdown_it.MarkdownIt("commonmark", {"breaks": True, "html": False})
    reference.enable(["table", "strikethrough"])
    expected = reference.render(TEXTS[name]).replace("<s>", "<del>").replace("</s>", "</del>")
    for level in (4, 3, 2, 1):  # headings are below those of the page
        expected = expected.replace(f"h{level}>", f"h{level + 2}>")
    assert Tree(rendered(window, TEXTS[name])).lines == Tree(expected).lines


def test_a_text_that_grows_has_the_elements_of_the_whole(window: Page) -> None:
    for text in TEXTS.values():
        assert rendered(window, *(text[:end] for end in range(len(text) + 1))) == rendered(window, text)


def test_blocks_that_stay_keep_their_elements(window: Page) -> None:
    script = """import("./webui/markdown.js").then(({Markdown}) => {
      const made = new Markdown();
      made.show("```\\nx\\n```\\n\\na");
      const before = [...made.element.children];
      made.show("```\\nx\\n```\\n\\na b");
      return [...made.element.children].map((each, i) => each === before[i]);
    })"""
    assert window.run(script) == [True, False]


HARMFUL = (
    "<img src=x onerror=alert(1)> <script>alert(1)</script> <b>b</b> <a href='javascript:alert(1)'>a</a>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d](vbscript:x) [e](file:///etc/passwd)",
    "[a](//evil.example) [b](/v1/models) [c](\tjavascript:alert(1)) [d](java\nscript:alert(1)) [e](&#106;avascript:alert(1))",
    "![pixel](https://evil.example/pixel.png) ![x](javascript:alert(1)) <javascript:alert(1)> <data:text/html,x>",
    '[a](https://a.example/"onclick="alert(1)) [b](https://b.example/ "t\\" onmouseover=alert(1)")',
    '```html"onload=alert(1)\n<script>alert(1)</script>\n```\n\n| <svg onload=alert(1)> | b |\n|---|---|\n| `<i>` | </td> |',
    "# <iframe src=//evil.example>\n\n> <object>\n\n- <style>*{}</style>\n\n__proto__ constructor [__proto__](https://x.example)",
)

ELEMENTS = {
    *(
        "DIV",
        "P",
        "BR",
        "CODE",
        "PRE",
        "A",
        "EM",
        "STRONG",
        "DEL",
        "UL",
        "OL",
        "LI",
        "BLOCKQUOTE",
        "HR",
        "SPAN",
        "BUTTON",
    ),
    *("TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "H3", "H4", "H5", "H6"),
}
ATTRIBUTES = {"class", "href", "rel", "target", "type", "tabindex", "role", "aria-label", "scope", "start"}


@pytest.mark.parametrize("text", HARMFUL)
def test_no_text_becomes_an_element_a_script_or_an_address(window: Page, text: str) -> None:
    script = f"""import("./webui/markdown.js").then(({{Markdown}}) => {{
      const made = new Markdown();
      made.show({json.dumps(text)});
      document.body.append(made.element);
      const all = [...made.element.querySelectorAll("*")];
      const found = [
        [...new Set(all.map((each) => each.tagName))],
        [...new Set(all.flatMap((each) => each.getAttributeNames()))],
        all.filter((each) => each.href).map((each) => [each.protocol, each.rel, each.target]),
      ];
      made.element.remove();
      return found;
    }})"""
    tags, attributes, links = window.run(script)
    assert set(tags) <= ELEMENTS and set(attributes) <= ATTRIBUTES
    for protocol, rel, target in links:
        assert protocol in ("http:", "https:") and "noopener" in rel.split() and target == "_blank"
    assert not window.problems


SLOW = {
    "stars": "*a " * 70_000,
    "closing stars": "a* " * 70_000,
    "both": "*a **b " * 15_000 + "c* d** " * 15_000,
    "runs": "*" * 200_000 + "a" + "*" * 200_000,
    "brackets": "[" * 200_000,
    "links": "[a](" * 50_000,
    "closed brackets": "[" * 50_000 + "](x" * 50_000,
    "backticks": " ".join("`" * n for n in range(1, 600)),
    "quotes": ">" * 100_000,
    "quotes with spaces": "> " * 50_000,
    "bullets": "- " * 100_000,
    "deep lists": "\n".join("  " * n + "- a" for n in range(400)),
    "rulers": "- - " * 50_000 + "a",
    "bars": "|" * 200_000 + "\n" + "|-" * 100_000,
    "a wide table": "a|" * 3000 + "b\n" + "-|" * 3000 + "-\n" + "c|d\n" * 20,
    "spaces": " " * 200_000 + "a",
    "hashes": "# " + "#" * 200_000,
    "addresses": "https://" * 30_000,
    "entities": "&amp" * 50_000,
    "exclamation marks": "![" * 100_000,
    "escapes": "\\" * 200_000,
    "lines": "a\n" * 50_000,
    "fences": "```\n" * 20_000,
    "titles": '[a](b "' * 30_000,
}


@pytest.mark.parametrize("name", SLOW)
def test_no_text_takes_long(window: Page, name: str) -> None:
    begun = time.monotonic()
    script = f"""import("./webui/markdown.js").then(({{Markdown}}) => {{
      const made = new Markdown(), begun = performance.now();
      made.show({json.dumps(SLOW[name])});
      let deepest = 0;
      for (let each = made.element; each; each = each.lastElementChild) deepest += 1;
      return [performance.now() - begun, deepest];
    }})"""
    milliseconds, deepest = window.run(script)
    assert milliseconds < 2000, f"{milliseconds} ms of {time.monotonic() - begun} s"
    assert deepest < 150
