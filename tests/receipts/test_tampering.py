"""Random changes of receipts and of the weights behind them: all are found, whether or not the hashes were computed again."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.hub.resolve import resolve
from engine.receipts.form import chain_of, fingerprint_of, problem_of

KINDS = ("token", "seed", "parameter", "weight", "hash", "order")
"""What is changed: a token of the answer, its seed, one of its parameters, a bit of a weight, a hash, or the order of two
tokens."""

N_TOKENS = 48
PROMPTS = ("def add(a, b):\n", "class ", "import os\n\nfor ", "x = [")

PARAMETERS: dict[str, tuple[float, float]] = {
    "temperature": (0.05, 0.5),
    "min_p": (0.3, 0.9),
    "top_p": (0.05, 0.5),
    "repeat_penalty": (1.3, 2.0),
    "presence_penalty": (0.7, 2.0),
    "frequency_penalty": (0.5, 1.5),
}
"""Other values of parameters, far enough from those in use that an answer of random tokens is not the same with them."""


class Tampering:
    """A model in a file that may be changed, its receipts, and random changes of both."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._path = folder / "model.gguf"
        self._path.write_bytes(resolve("pycoder-draft").read_bytes())
        self.llm = engine.load(self._path, n_ctx=128, device="cpu")
        more: dict[str, Any] = {"max_tokens": N_TOKENS, "temperature": 1.5, "ignore_eos": True, "receipt": True}
        self.receipts = [self.llm.complete(text, seed=i, **more).receipt() for i, text in enumerate(PROMPTS)]
        self._rng = np.random.default_rng(seed)

    def found(self, number: int) -> bool:
        """Change something, and return whether a replay finds that."""
        kind, sealed = KINDS[number % len(KINDS)], bool(number // len(KINDS) % 2)
        receipt = self.receipts[int(self._rng.integers(len(self.receipts)))]
        if kind == "weight":
            return self._found_in_weights(receipt)
        changed = copy.deepcopy(receipt)
        getattr(self, f"_change_{kind}")(changed)
        assert changed != receipt
        if sealed and kind != "hash":
            changed["chain"] = chain_of(changed)
            assert problem_of(changed) == ""
        return not self.llm.verify(changed).same

    def _found_in_weights(self, receipt: dict[str, Any]) -> bool:
        """Flip a bit of a weight in the file, hash it again, and let the model verify an honest receipt."""
        tensors = list(self.llm.model.gguf.tensors.values())
        sizes = np.array([tensor.nbytes for tensor in tensors])
        tensor = tensors[int(self._rng.choice(len(tensors), p=sizes / sizes.sum()))]
        at, bit = tensor.offset + int(self._rng.integers(tensor.nbytes)), 1 << int(self._rng.integers(8))
        self._flip(at, bit)
        self.llm._forget()
        same = self.llm.verify(receipt).same
        self._flip(at, bit)
        self.llm._forget()
        return not same

    def _flip(self, at: int, bit: int) -> None:
        with self._path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ bit]))

    def _change_token(self, receipt: dict[str, Any]) -> None:
        i, n_vocab = int(self._rng.integers(N_TOKENS)), self.llm.config.n_vocab
        receipt["tokens"][i] = (receipt["tokens"][i] + int(self._rng.integers(1, n_vocab))) % n_vocab

    def _change_seed(self, receipt: dict[str, Any]) -> None:
        receipt["parameters"]["seed"] = int(self._rng.integers(len(PROMPTS), 2**63))

    def _change_parameter(self, receipt: dict[str, Any]) -> None:
        name = str(self._rng.choice(sorted(PARAMETERS)))
        receipt["parameters"][name] = float(self._rng.uniform(*PARAMETERS[name]))

    def _change_hash(self, receipt: dict[str, Any]) -> None:
        """A bit of the chain; or one of a digest or of the hash of the weights, with all hashes that follow from it."""
        which = int(self._rng.integers(3))
        if which == 0:
            receipt["chain"] = self._changed(receipt["chain"])
            return
        if which == 1:
            i = int(self._rng.integers(N_TOKENS))
            receipt["digests"][i] = self._changed(receipt["digests"][i])
        else:
            receipt["model"]["weights"] = self._changed(receipt["model"]["weights"])
            receipt["fingerprint"] = fingerprint_of(receipt["model"])
        receipt["chain"] = chain_of(receipt)

    def _changed(self, digits: str) -> str:
        return f"{int(digits, 16) ^ 1 << int(self._rng.integers(4 * len(digits))):0{len(digits)}x}"

    def _change_order(self, receipt: dict[str, Any]) -> None:
        i, j = (int(place) for place in self._rng.choice(N_TOKENS, 2, replace=False))
        for name in ("tokens", "digests", "best"):
            receipt[name][i], receipt[name][j] = receipt[name][j], receipt[name][i]


@pytest.mark.parametrize("count", [pytest.param(36, marks=pytest.mark.first), 500])
def test_every_tampering_is_found(count: int, tmp_path: Path) -> None:
    tampering = Tampering(tmp_path, seed=count)
    with tampering.llm:
        tried, found = Counter[str](), Counter[str]()
        for number in range(count):
            kind = KINDS[number % len(KINDS)]
            tried[kind] += 1
            found[kind] += tampering.found(number)
        assert found == tried and found.total() == count
        # What was not changed is still true.
        assert all(tampering.llm.verify(receipt).same for receipt in tampering.receipts)
