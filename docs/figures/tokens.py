"""A text as tokens: what the bundled model's tokenizer makes of it, and how its last token is taken back."""

from typing import TYPE_CHECKING, Any

from docs.figures import bundled

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "A text, its tokens and their ids, and the last one taken back"
SIZE = (480, 420)
TEXT = "def add(a, b):"


def facts() -> dict[str, Any]:
    """The tokens of the text, with and without its last characters, and the token that an answer begins with."""
    llm = bundled.model()

    def pieces(ids: list[int]) -> list[list[Any]]:
        return [[bundled.piece(i), i] for i in ids]

    ids = llm.tokenize(TEXT)
    healed = llm.complete(TEXT, heal=True, max_tokens=1, temperature=0)
    plain = llm.complete(TEXT, max_tokens=1, temperature=0)
    assert llm.tokenizer.decode(ids) == TEXT
    return {
        "text": TEXT,
        "vocabulary": llm.config.n_vocab,
        "pieces": pieces(ids),
        "kept": len(healed.prompt_ids),
        "healed": pieces(healed.ids),
        "plain": pieces(plain.ids),
    }


LEFT, CELL = 24, 25.5
COLORS = ("blue", "green", "purple", "orange")


def pieces(page: "Page", y: float, found: list[list[Any]], shades: list[tuple[str, float]], x: float = LEFT) -> float:
    """Tokens in a row with their ids below; returns where the row ends."""
    for (text, token), (color, shade) in zip(found, shades, strict=True):
        width = CELL * len(text)
        page.box(x + 1.5, y, width - 3, 32, color, shade, 1.2, radius=4)
        for i, letter in enumerate(text):
            page.text(x + CELL * (i + 0.5), y + 21, letter, "text" if shade else "muted", 16, "middle", mono=True)
        page.text(x + width / 2, y + 49, str(token), color, 13, "middle")
        x += width
    return x


def draw(facts: dict[str, Any], page: "Page") -> None:
    """The text, its tokens, and what healing changes."""
    shades = [(COLORS[i % len(COLORS)], 0.2) for i in range(len(facts["pieces"]))]
    page.text(LEFT, 22, "The text", bold=True)
    for i, letter in enumerate(facts["text"]):
        page.text(LEFT + CELL * (i + 0.5), 52, letter, "text", 16, "middle", mono=True)
        if letter == " ":
            page.box(LEFT + CELL * i + 5, 55, CELL - 10, 1, "muted", 0.5, 0)
    page.text(LEFT, 92, "Its tokens", bold=True)
    page.text(LEFT + 84, 92, f"pieces of bytes, and their ids among {facts['vocabulary']}", "muted", 12.5)
    pieces(page, 104, facts["pieces"], shades)

    last, _ = facts["pieces"][-1]
    kept = facts["pieces"][: facts["kept"]]
    page.text(LEFT, 198, "Without healing", bold=True)
    page.text(LEFT + 128, 198, "the answer has to continue after a closed token", "muted", 12.5)
    end = pieces(page, 210, facts["pieces"], [("muted", 0.08)] * len(facts["pieces"]))
    pieces(page, 210, facts["plain"], [("red", 0.25)], end + 10)

    page.text(LEFT, 304, "Healed", bold=True)
    page.text(LEFT + 62, 304, f"“{last}” is taken back; the answer must begin with it", "muted", 12.5)
    end = pieces(page, 316, kept, [("muted", 0.08)] * len(kept))
    pieces(page, 316, facts["healed"], [("green", 0.25)], end + 10)
    page.text(LEFT, 396, "␣ is a space and ⏎ a line break: bytes of a token like any other", "muted", 12.5)
