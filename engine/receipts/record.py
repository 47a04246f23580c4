"""What a receipt needs of an answer, recorded token by token."""

import math
from collections.abc import Mapping
from typing import Any

from engine.receipts.form import FORMAT, VERSION, chain_of, fingerprint_of
from engine.receipts.parameters import Parameters
from engine.sampling.row_digest import PackedDigest, RowDigest, unpacked
from engine.version import __version__


class Record:
    """The tokens of an answer so far, each with the digest of the logits that it was chosen from."""

    def __init__(self, prompt: list[int], parameters: Parameters) -> None:
        self.parameters = parameters
        self._prompt = prompt
        self._tokens: list[int] = []
        self._rows: list[RowDigest | PackedDigest] = []

    def add(self, token: int, row: RowDigest | PackedDigest) -> None:
        """Record the next token."""
        self._tokens.append(token)
        self._rows.append(row)

    def receipt(
        self,
        identity: Mapping[str, Any],
        finish_reason: str | None,
        n_tokens: int | None = None,
        parameters: Parameters | None = None,
    ) -> dict[str, Any]:
        """The receipt, as an object for JSON: ``engine/receipts/form.py`` describes it.

        identity: what describes the model; n_tokens: how many tokens count, if further ones were computed; parameters: those
        of the answer, if they are not those that were given.
        """
        tokens = self._tokens[:n_tokens]
        # Only now, because a device has computed the next tokens meanwhile.
        rows = [row if isinstance(row, RowDigest) else unpacked(row) for row in self._rows[:n_tokens]]
        found: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "engine": __version__,
            "fingerprint": fingerprint_of(identity),
            "model": dict(identity),
            "prompt": list(self._prompt),
            "parameters": (parameters or self.parameters).written(),
            "tokens": tokens,
            "digests": [row.digest for row in rows],
            "best": [best_of(row) for row in rows],
            "finish_reason": finish_reason,
        }
        return found | {"chain": chain_of(found)}


def best_of(row: RowDigest) -> list[list[Any]]:
    """The two largest logits as a receipt holds them, with null for minus infinity, which JSON lacks."""
    return [
        [token, value if math.isfinite(value) else None] for token, value in zip(row.tokens, row.values, strict=True)
    ]
