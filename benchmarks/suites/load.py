"""Loading a model: the time for the header and for the whole load, and peak memory."""

from pathlib import Path
from time import process_time

import engine.llm  # here, so that no benchmark pays for the import
from engine.gguf.file import read_gguf
from engine.hub.resolve import resolve
from engine.synthetic.model import make_model

from .commits import once

timer = process_time
repeat = (5, 100, 1.0)


class Header:
    """Reading and checking a header.  The vocabulary is most of it: the bundled model has 8192 tokens."""

    @once
    def setup(self) -> None:
        self.path = resolve("pycoder")

    def time_read(self) -> None:
        read_gguf(self.path)

    def time_read_and_check_tensors(self) -> None:
        read_gguf(self.path, check_tensors=True)


class Load:
    """The bundled model, 12 MB.

    Peak memory includes the weights as records, and the mapped pages of the file until loading gives them back, which belong
    to the system's page cache.  Commits that used the weights in the mapped file have its pages in their place.
    """

    def time_load(self) -> None:
        engine.load(None)

    def peakmem_load(self) -> None:
        engine.load(None)

    def peakmem_imports(self) -> None:
        pass


class LoadLarge:
    """A file of 390 MB with 151936 tokens: a random qwen3-0.6b."""

    def setup_cache(self) -> str:
        # asv calls this in a folder that it removes when the suite is done.
        return str(make_model(Path("model.gguf").absolute(), "qwen3-0.6b", "Q4_K_M"))

    def time_header(self, path: str) -> None:
        read_gguf(path)

    def time_load(self, path: str) -> None:
        engine.load(path, n_ctx=512)

    def peakmem_load(self, path: str) -> None:
        engine.load(path, n_ctx=512)
