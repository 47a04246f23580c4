"""Screenshots of the book: ``python -m docs.screenshots FOLDER`` in the root of the repository.

Builds the book and writes one image of each page in ``PAGES``, in the light and the dark theme, as wide as a desktop and as a
phone.  Needs Chromium or Chrome, and the extra ``docs``.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parent

PAGES = (
    *("index", "quick-start", "why-bits", "law", "attention"),
    *("sampling", "batching", "delta-rule", "tensor-cores", "command-line"),
)

SIZES = {"desktop": (1280, 1600), "phone": (390, 1600)}
"""Width and height of the images in pixels."""

THEMES = {"light": 1, "dark": 0}
"""What Chromium calls the colour schemes that a page can prefer."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """The path of a browser that can run without a screen, or None if there is none."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def build(folder: Path) -> None:
    """Build the book in a folder.  Raises CalledProcessError if Sphinx has warnings."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", str(DOCS), str(folder)]
    subprocess.run(command, check=True)


def run_browser(browser: str, page: Path, *options: str, theme: str = "light", seconds: int = 120) -> str:
    """Load a page without a screen and return what the browser prints.  Raises CalledProcessError if it fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        command += ["--allow-file-access-from-files", f"--user-data-dir={profile}"]
        command += [f"--blink-settings=preferredColorScheme={THEMES[theme]}", *options, page.as_uri()]
        done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=seconds)
        return done.stdout


def shoot(browser: str, page: Path, size: tuple[int, int], theme: str, image: Path) -> None:
    """Write a screenshot of a page."""
    width, height = size
    # A window has a least width, which is more than that of a phone; a frame has none.
    frame = f'<iframe src="{page.as_uri()}" width="{width}" height="{height}" style="border: 0"></iframe>'
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder) / "wrapper.html"
        wrapper.write_text(f'<!doctype html><body style="margin: 0">{frame}</body>', encoding="utf-8")
        options = (f"--window-size={width},{height}", f"--screenshot={image.absolute()}", "--virtual-time-budget=5000")
        run_browser(browser, wrapper, *options, theme=theme)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    browser = find_browser()
    if len(words) != 1 or browser is None:
        needed = "usage: python -m docs.screenshots FOLDER" if browser else f"install one of {', '.join(BROWSERS)}"
        print(needed, file=sys.stderr)
        return 2
    images = Path(words[0])
    images.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        for name in PAGES:
            for theme in THEMES:
                for kind, size in SIZES.items():
                    image = images / f"{name}-{theme}-{kind}.png"
                    shoot(browser, Path(folder) / f"{name}.html", size, theme, image)
                    print(image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
