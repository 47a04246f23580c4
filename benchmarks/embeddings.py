"""Embeddings beside sentence-transformers on the same CPU: ``python -m benchmarks.embeddings MODEL.gguf FOLDER``.

MODEL.gguf is the file that llama.cpp's converter makes of FOLDER, a model of sentence-transformers such as all-MiniLM-L6-v2.
Both read the same texts, paragraphs of this book, in turns.  The table has the seconds of the best turn of each, their ratio
in the same turn, and how far the vectors are apart.  Needs the package sentence-transformers in the same environment.
"""

import argparse
import re
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.cli.table import print_table

BOOK = Path(__file__).resolve().parent.parent / "docs"


def texts(count: int, words: int) -> list[str]:
    """So many pieces of the book, of 3 words to twice ``words``."""
    every = re.findall(r"\S+", "\n".join(path.read_text(encoding="utf-8") for path in sorted(BOOK.glob("*.md"))))
    rng, found = np.random.default_rng(0), []
    for _ in range(count):
        n = int(rng.integers(3, 2 * words))
        first = int(rng.integers(0, len(every) - n))
        found.append(" ".join(every[first : first + n]))
    return found


def main(argv: list[str] | None = None) -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="the GGUF file")
    parser.add_argument("folder", help="the folder of sentence-transformers")
    parser.add_argument("-n", "--texts", type=int, default=1000)
    parser.add_argument("-w", "--words", type=int, default=20, help="mean length of a text")
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("-t", "--threads", type=int, default=0)
    args = parser.parse_args(argv)

    import torch  # type: ignore[import-not-found]
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    given = texts(args.texts, args.words)
    llm = engine.load(args.model, device="cpu", n_threads=args.threads)
    torch.set_num_threads(llm.n_threads)
    theirs: Any = SentenceTransformer(args.folder, device="cpu")
    theirs.max_seq_length = llm.n_ctx
    llm.compile()
    seconds: list[tuple[float, float]] = []
    for number in range(args.rounds + 1):
        begun = time.perf_counter()
        ours = llm.embed(given)
        middle = time.perf_counter()
        other = theirs.encode(given, normalize_embeddings=True)
        if number:  # the first round warms up
            seconds.append((middle - begun, time.perf_counter() - middle))
    mine, their = (min(column) for column in zip(*seconds, strict=True))
    ratio = statistics.median(b / a for a, b in seconds)
    cosine = float((ours * other).sum(axis=1).min())
    tokens = sum(len(llm.tokenizer.encode(text)) for text in given)
    titles = (
        "model",
        "texts",
        "tokens",
        "threads",
        "bitmirror, s",
        "sentence-transformers, s",
        "ratio",
        "least cosine",
    )
    sizes = [str(len(given)), str(tokens), str(llm.n_threads)]
    row = [llm.path.name, *sizes, f"{mine:.2f}", f"{their:.2f}", f"{ratio:.2f}", f"{cosine:.5f}"]
    print_table(titles, [row], right=titles[1:])


if __name__ == "__main__":
    main()
