"""Numbers of layers as text: ``"0-2,4"`` for 0, 1, 2 and 4."""

from collections.abc import Sequence


def layers_of(text: str) -> list[int]:
    """The numbers that a text stands for."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def text_of(layers: Sequence[int]) -> str:
    """The text for some rising numbers."""
    parts: list[list[int]] = []
    for il in layers:
        if parts and il == parts[-1][1] + 1:
            parts[-1][1] = il
        else:
            parts.append([il, il])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
