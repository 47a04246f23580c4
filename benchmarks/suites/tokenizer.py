"""Text to token ids and back, with the bundled model's vocabulary.  Divide 64 KiB by the time for a rate."""

import argparse
from pathlib import Path
from time import process_time

from engine.gguf.file import read_gguf
from engine.hub.resolve import resolve
from engine.text.tokenizer import Tokenizer

from .commits import once

N_BYTES = 1 << 16

timer = process_time
repeat = (5, 100, 1.0)


class Encode:
    """64 KiB of Python source as one text: a module of the standard library, equal for every commit."""

    @once
    def setup(self) -> None:
        self.tokenizer = Tokenizer.from_gguf(read_gguf(resolve("pycoder")))
        source = Path(argparse.__file__).read_text(encoding="utf-8")
        self.text = (source * (N_BYTES // len(source) + 1))[:N_BYTES]
        self.ids = self.tokenizer.encode(self.text)

    def time_encode(self) -> None:
        self.tokenizer.encode(self.text)

    def time_decode(self) -> None:
        self.tokenizer.decode(self.ids)

    def time_stream(self) -> None:
        """One id at a time, as generation does."""
        stream = self.tokenizer.stream()
        for token in self.ids:
            stream.feed(token)
        stream.flush()

    def track_bytes_per_token(self) -> float:
        """Bytes of text per token."""
        return len(self.text.encode()) / len(self.ids)


class Construct:
    """Building the tokenizer from a header that has already been read."""

    @once
    def setup(self) -> None:
        self.gguf = read_gguf(resolve("pycoder"))

    def time_from_gguf(self) -> None:
        Tokenizer.from_gguf(self.gguf)
