"""The form of a receipt: its fields, its fingerprint and its chain of hashes.  ``docs/receipts.md`` describes it.

This file needs nothing but Python's standard library, so it can be copied and run alone: ``python form.py FILE`` checks that
a receipt is complete and that its hashes agree with what it says.  Only a model can tell whether it is true.
"""

import hashlib
import json
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = "bitmirror-receipt"
VERSION = 1

Receipt = Mapping[str, Any]
"""A receipt, decoded from JSON."""

FIELDS: dict[str, Any] = {
    "format": str,
    "version": int,
    "engine": str,
    "fingerprint": str,
    "model": dict,
    "prompt": list,
    "parameters": dict,
    "tokens": list,
    "digests": list,
    "best": list,
    "finish_reason": (str, type(None)),
    "chain": str,
}
"""The fields of a receipt and their types; it has no others."""

HEXADECIMAL = set("0123456789abcdef")

REASONS = ("stop", "length", "tool_calls", None)
"""Why an answer ended; None: its reader ended it."""


def canonical(value: object) -> bytes:
    """A JSON value as the bytes that are hashed: keys sorted, no blanks, ASCII only, numbers as Python's ``json`` writes
    them, floats with the value of an integer as integers.  Raises ValueError for a number that is not finite."""
    return json.dumps(_whole(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _whole(value: object) -> object:
    """A JSON value whose floats are integers where they have the value of one: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {key: _whole(each) for key, each in value.items()}
    return [_whole(each) for each in value] if isinstance(value, (list, tuple)) else value


def fingerprint_of(model: Mapping[str, Any]) -> str:
    """The fingerprint of a model, from the object that describes it."""
    return "fp_" + hashlib.sha256(canonical(model)).hexdigest()[:32]


def chain_of(receipt: Receipt) -> str:
    """The chain of hashes of a receipt, as 64 hexadecimal digits.

    Link 0 is the SHA-256 of the canonical bytes of ``format``, ``version``, ``fingerprint``, ``model``, ``prompt`` and
    ``parameters``.  Link i + 1 is the SHA-256 of link i and of token i: its id, the digest of the logits that it was chosen
    from, and the two largest of these, each with its id.  The chain is the SHA-256 of the last link and of
    ``finish_reason``.
    """
    head = {name: receipt[name] for name in ("format", "version", "fingerprint", "model", "prompt", "parameters")}
    link = hashlib.sha256(canonical(head)).digest()
    for token, digest, best in zip(receipt["tokens"], receipt["digests"], receipt["best"], strict=True):
        link = hashlib.sha256(link + _packed(token, digest, best)).digest()
    return hashlib.sha256(link + canonical(receipt["finish_reason"])).hexdigest()


def _packed(token: int, digest: str, best: Sequence[Sequence[Any]]) -> bytes:
    """A token as the bytes that are hashed: little-endian int32, 16 bytes, and twice int32 and float32."""
    (first, x), (second, y) = best
    x, y = (-math.inf if value is None else value for value in (x, y))
    return struct.pack("<i", token) + bytes.fromhex(digest) + struct.pack("<ifif", first, x, second, y)


def problem_of(receipt: object) -> str:
    """Why something is no receipt, or one whose hashes do not agree with what it says, as a sentence; "" if it is sound."""
    if not isinstance(receipt, dict):
        return "a receipt is a JSON object."
    if receipt.get("format") != FORMAT:
        return f"the field format is not {FORMAT!r}: this is no receipt."
    if receipt.get("version") != VERSION:
        return f"this is a receipt of version {receipt.get('version')!r:.40}, and version {VERSION} is known here."
    if extra := sorted(receipt.keys() - FIELDS):
        return f"the field {extra[0]!r:.60} does not belong to a receipt."
    for name, kind in FIELDS.items():
        if name not in receipt:
            return f"the field {name} is missing."
        if not isinstance(receipt[name], kind) or isinstance(receipt[name], bool):
            return f"the field {name} has the wrong type."
    if problem := _problem_of_lists(receipt):
        return problem
    try:
        if fingerprint_of(receipt["model"]) != receipt["fingerprint"]:
            return "the fingerprint is not that of the model that the receipt describes."
        chain = chain_of(receipt)
    except (ValueError, RecursionError):
        return "a number is not finite, or a value is too deep."
    return "" if chain == receipt["chain"] else "the chain of hashes is not that of the receipt: something was changed."


def _problem_of_lists(receipt: Receipt) -> str:
    tokens = receipt["tokens"]
    if receipt["finish_reason"] not in REASONS:
        return "the field finish_reason is not stop, length, tool_calls or null."
    if not receipt["prompt"]:
        return "the prompt has no tokens."
    for name in ("digests", "best"):
        if len(receipt[name]) != len(tokens):
            return f"there are {len(tokens)} tokens, but the field {name} has {len(receipt[name])} entries."
    for name in ("prompt", "tokens"):
        for i, id in enumerate(receipt[name]):
            if not _is_id(id):
                return f"{name}[{i}] is no token id."
    for i, digest in enumerate(receipt["digests"]):
        if not isinstance(digest, str) or len(digest) != 32 or not set(digest) <= HEXADECIMAL:
            return f"digests[{i}] has not 32 hexadecimal digits."
    for i, best in enumerate(receipt["best"]):
        if not _is_best(best):
            return f"best[{i}] is not two pairs of a token id and a logit, the larger one first."
    return ""


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_best(best: object) -> bool:
    """Whether a value is two pairs of an id and a float32, which is null for minus infinity."""
    if not isinstance(best, list) or len(best) != 2:
        return False
    keys = []
    for pair in best:
        if not isinstance(pair, list) or len(pair) != 2 or not _is_id(pair[0]):
            return False
        value = -math.inf if pair[1] is None else pair[1]
        if pair[1] is not None and (type(value) is not float or not _is_float32(value)):
            return False
        keys.append((-value, pair[0]))
    return keys[0] < keys[1]


def _is_float32(value: float) -> bool:
    if not math.isfinite(value):
        return False
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0] == value  # type: ignore[no-any-return]
    except OverflowError:
        return False


def main(words: Sequence[str]) -> int:
    """Check a file; exit status 0 if it is a sound receipt."""
    if len(words) != 1:
        print("usage: python form.py FILE", file=sys.stderr)
        return 2
    try:
        with open(words[0], encoding="utf-8") as file:
            problem = problem_of(json.load(file))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"{words[0]} cannot be read as JSON: {error}."
    print(problem or "sound: the fields are complete and the hashes agree.")
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
