"""A verification of drafts with the bits of the engine: python examples/law_drafts.py

A draft is a guess of a token that comes next.  One pass of the model reads the last certain token and all drafts, and has
the logits after each of them.  A draft is accepted if it is the token that the model itself chooses there.  The choice after
the last accepted draft is the next certain token, so a pass gives at least one token, and at most one more than drafts.

The text is the one without drafts, for every temperature and seed: the noise of a choice is a function of seed, position and
token, so the model would have made the same choice.  What drafts decide is the number of passes.

This file computes a pass one token at a time, as ``examples/law.py`` does.  Rows of a pass have the bits that they have
alone, which is why the engine may compute them together.
"""

from pathlib import Path
from typing import Any

from law import Array, Model, choose

from engine.gguf.file import read_gguf


def lookup(ids: list[int], n: int) -> list[int]:
    """Up to n drafts: what followed the last occurrence of the longest run of tokens, of at most 3, that ends the text."""
    for length in range(min(3, len(ids) - 1), 0, -1):
        for start in range(len(ids) - length - 1, -1, -1):
            if ids[start : start + length] == ids[-length:]:
                return ids[start + length : start + length + n]
    return []


def rewind(model: Model, position: int) -> None:
    """Forget what the model has read from this position on."""
    model.position = position
    for layer in model.layers:
        layer.keys, layer.values = layer.keys[:, :position], layer.values[:, :position]


def verify(model: Model, certain: int, drafts: list[int], temperature: float = 0.0, seed: int = 0) -> list[int]:
    """One pass: the accepted drafts, and the model's choice after them."""
    first = model.position
    rows: list[Array] = [model.step(token) for token in (certain, *drafts)]  # all of them, before anything is chosen
    tokens: list[int] = []
    for i, logits in enumerate(rows):
        tokens.append(choose(logits, first + i + 1, temperature, seed))
        if i < len(drafts) and drafts[i] != tokens[-1]:
            break  # what the rows after this one have read is not the text
    rewind(model, first + len(tokens))
    return tokens


def answer(
    model: Model, ids: list[int], count: int, n_drafts: int, temperature: float = 0.0, seed: int = 0
) -> tuple[list[int], int]:
    """The ``count`` tokens that follow a prompt which is the first text of the model, and the number of passes."""
    ids, end, passes = list(ids), len(ids) + count, 0
    for token in ids[:-1]:
        model.step(token)
    while len(ids) < end:
        ids += verify(model, ids[-1], lookup(ids, min(n_drafts, end - len(ids) - 1)), temperature, seed)
        passes += 1
    return ids[-count:], passes


def main() -> None:
    """Print what the bundled model writes, with drafts and without."""
    file = read_gguf(Path(__file__).parents[1] / "engine" / "data" / "pycoder-dense-Q4_K_M.gguf")
    tokens: Any = file.metadata["tokenizer.ggml.tokens"]
    prompt = [tokens.index(token) for token in ("def", "Ġadd", "(a", ",", "Ġb", "):")]
    for n_drafts in (0, 3):
        ids, passes = answer(Model(file), prompt, 24, n_drafts)
        text = "".join(tokens[i] for i in ids).replace("Ġ", " ").replace("Ċ", "\n")
        print(f"{text!r}: {passes} passes with up to {n_drafts} drafts")


if __name__ == "__main__":
    main()
