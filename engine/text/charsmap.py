"""The normalization of SentencePiece: a map of texts, compiled into a file as a double array (Aoe 1989; Yata et al. 2007).

The bytes of ``precompiled_charsmap`` are a uint32, the size of the array in bytes; the array, a trie of UTF-8, uint32 each;
and texts that end with a zero byte, to which the values of the trie point.  From left to right, the longest key that a text
continues with is replaced by its value.  In a unit, bits 0..7 and 31 are the byte that leads to it, bit 8 says that a value
follows, and bits 9..31 where its children begin.

The map of Unicode's NFKC has 225 000 keys, most of them syllables of Hangul in parts, so it is not unfolded.
"""

import re
from array import array

HEAD = 4
"""Bytes before the array."""

_ASCII = re.compile("[\x00-\x7f]+")
_KEPT = 1 << 16
"""Characters and pairs that are remembered."""


class Charsmap:
    """The map of a file; b"": nothing is replaced.  Raises ValueError if the bytes are no map.

    A key whose value lies outside of the bytes counts as none.
    """

    def __init__(self, data: bytes) -> None:
        size = int.from_bytes(data[:HEAD], "little")
        if data and (size % 4 or not 4 <= size < len(data) - HEAD):
            raise ValueError(f"has {len(data)} bytes, of which {size} are its array")
        self._units = memoryview(array("I", [0] if not data else _numbers(data[HEAD : HEAD + size])))
        self._texts = data[HEAD + size :]
        self._first = self._children(0, 0)
        self._alone: dict[str, tuple[str, int]] = {}
        self._together: dict[str, bool] = {}
        self._ascii = {code: text for code in range(1, 128) if (text := self._one(chr(code))[0]) != chr(code)}
        nodes = [node for code in range(1, 128) if (node := self._one(chr(code))[1]) >= 0]
        #: Whether no key has several characters of ASCII, so that texts of these need no search.
        self._simple = all(self._walk(node, chr(code))[0] < 0 for node in nodes for code in range(1, 128))

    def apply(self, text: str) -> str:
        """``text`` with its longest keys replaced."""
        if self._simple and text.isascii():
            return text.translate(self._ascii)
        parts, at, end = [], 0, len(text)
        while at < end:
            if self._simple and (run := _ASCII.match(text, at)) is not None:
                # The last character may belong to a key with those after it.
                stop = run.end() if run.end() == end else run.end() - 1
                parts.append(text[at:stop].translate(self._ascii))
                at = stop
                if at == end:
                    break
            replaced, node = self._one(text[at])
            taken = 1
            if node >= 0 and at + 1 < end and self._continues(text[at : at + 2], node):
                taken, replaced = self._longest(text, at, replaced, node)
            parts.append(replaced)
            at += taken
        return "".join(parts)

    def _one(self, character: str) -> tuple[str, int]:
        """What replaces a character by itself, and where the children of its node begin; -1: no longer key begins with it."""
        found = self._alone.get(character)
        if found is None:
            node, text = self._walk(self._first, character)
            if len(self._alone) >= _KEPT:
                self._alone.clear()
            found = self._alone[character] = (character if text is None else text, node)
        return found

    def _continues(self, pair: str, node: int) -> bool:
        """Whether a key begins with two characters, of which the first leads to a node."""
        found = self._together.get(pair)
        if found is None:
            if len(self._together) >= _KEPT:
                self._together.clear()
            next_node, text = self._walk(node, pair[1])
            found = self._together[pair] = next_node >= 0 or text is not None
        return found

    def _longest(self, text: str, at: int, replaced: str, node: int) -> tuple[int, str]:
        """The number of characters of the longest key at a place, and its value, of which those of the first character are
        given; 1 and its value if there is no longer key."""
        taken, i = 1, at + 1
        while node >= 0 and i < len(text):
            node, value = self._walk(node, text[i])
            i += 1
            if value is not None:
                taken, replaced = i - at, value
        return taken, replaced

    def _walk(self, node: int, character: str) -> tuple[int, str | None]:
        """Follow the bytes of a character from where the children of a node begin: where those of the last one begin, -1 if
        there is none, and the value of the key that ends there, or None."""
        units = self._units
        at = -1
        for byte in character.encode("utf-8"):
            at = node ^ byte
            if not byte or at >= len(units) or units[at] & 0x800000FF != byte:
                return -1, None
            node = self._children(at, at)
        value = None
        if units[at] >> 8 & 1 and node < len(units):
            start = units[node] & 0x7FFFFFFF
            stop = self._texts.find(b"\0", start)
            value = self._texts[start:stop].decode("utf-8", "replace") if stop >= 0 else None
        return node, value

    def _children(self, at: int, node: int) -> int:
        """Where the children of a unit begin, from the place of its node."""
        unit = self._units[at]
        return node ^ (unit >> 10 << ((unit & 1 << 9) >> 6))


def _numbers(data: bytes) -> "array[int]":
    """uint32 in the order of bytes of files."""
    import sys

    found = array("I")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found
