"""Screenshots of the server's page: ``python -m docs.webui [FOLDER]`` in the root of the repository.

Serves ``smollm2-135m``, drives the page, and writes the images of the book.  The answers are the same each time.  Needs
Chromium or Chrome, the model, and the extras ``docs`` and ``serve``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

import engine
from docs.browser import CTRL, Page, page
from docs.screenshots import DOCS
from engine.serving.app import app
from engine.serving.served import Spec
from tests.serving.live import live

MODEL = "smollm2-135m"

COLOURS = 48
"""Colours of an image: a quarter of the bytes, and no difference that is seen."""

IDLE = (
    "document.querySelector('#stop').hidden && document.querySelector('article.answer:last-of-type .stats').textContent"
)


def ask(web: Page, text: str) -> None:
    """Send a message and wait for the answer."""
    web.click("#message")
    web.type(text)
    web.press("Enter", CTRL)
    web.wait(IDLE, 300)


def settings(web: Page, **values: str) -> None:
    """Type values into the settings."""
    for name, value in values.items():
        script = "field.dispatchEvent(new Event('input', {bubbles: true}))"
        web.run(f"{{ const field = document.querySelector('#{name}'); field.value = {value!r}; {script} }}")


def shoot(web: Page, image: Path) -> None:
    """Write what the window shows as a PNG with few colours."""
    web.screenshot(image)
    with Image.open(image) as full:
        full.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(image, optimize=True)
    print(image, image.stat().st_size)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    images = Path(words[0]) if words else DOCS / "images"
    images.mkdir(parents=True, exist_ok=True)
    spec = Spec(MODEL, lambda: engine.load(MODEL, device="cpu", n_ctx=4096, parallel=2))
    with live(app([spec])) as (host, port), page() as web:
        web.look(1120, 700)
        web.open(f"http://{host}:{port}/")
        web.wait("document.querySelector('#state').textContent.includes('context')", 300)
        settings(web, system="You are a helpful assistant. Answer briefly.", temperature="1", seed="3", max_tokens="48")
        ask(web, "Why is the sky blue?")
        web.click("#new")
        settings(web, temperature="0", max_tokens="160")
        ask(web, "Write a Python function that returns the sum of a list.")
        web.run("document.querySelector('#messages').scrollTop = 0")
        shoot(web, images / "webui-light.png")
        web.look(390, 700)
        web.run("document.querySelector('#list').hidden || document.querySelector('#list-close').click()")
        web.run("document.activeElement.blur()")
        web.run("document.querySelector('#messages').scrollTop = 0")
        shoot(web, images / "webui-phone.png")
        web.look(1120, 700, "dark")
        web.click("#conversations button", "Why is the sky blue?")
        web.click("article.answer button", "Tokens")
        web.wait("document.querySelector('.tokens')", 300)
        web.click("#settings-toggle")
        # The least probable token.
        web.run("document.querySelector('.tokens .p5').focus()")
        shoot(web, images / "webui-dark.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
