"""The vocabulary of a model: the ``tokenizer.ggml`` metadata, checked and normalized.

Nothing here encodes or decodes: :mod:`engine.text.bpe`, :mod:`engine.text.spm`, :mod:`engine.text.wordpiece` and
:mod:`engine.text.unigram` do, and :mod:`engine.text.tokenizer` joins them. Key names and defaults are llama.cpp's
(``src/llama-vocab.cpp``).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from engine.checks import LARGEST, shown
from engine.errors import TokenizerError

PREFIX = "tokenizer.ggml."
MODELS = ("gpt2", "gemma4", "llama", "bert", "t5")


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokenizerFile(Protocol):
    """The part of a GGUF file that a tokenizer needs."""

    @property
    def path(self) -> Path: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...


# Tokens whose text defines their meaning, for files whose keys do not. All of them are control tokens, whatever type the
# file gives them.
_EOT_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
)
_KEY_TEXTS = {
    "eot": _EOT_TEXTS,
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
        "<|prefix|>",
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
        "<|suffix|>",
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_EOG_TEXTS = (
    *_EOT_TEXTS,
    *("<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<|eom_id|>", "[EOS]", "<eos>", "<turn|>"),
    *("<|tool_response>", "[e~["),
)
_DSML = ("｜DSML｜", "<think>", "</think>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
_ID_KEYS = ("bos", "eos", "unknown", "padding", *_KEY_TEXTS)
_EOG_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_BYTE_TEXT = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and rules of one model.

    ``tokens[id]`` is the text as stored (in GPT-2's byte alphabet for model ``gpt2``), ``index`` its inverse and
    ``types[id]`` its :class:`TokenType`. ``scores`` (float32 [n_vocab], models ``llama`` and ``t5`` only) rank SentencePiece
    merges, or are logarithms of probabilities, ``merges`` ("left right", best first) rank those of BPE. ``bos_id`` … are None
    where the model has no such token. ``outside``: the special ids, by their keys, that the file gives and the vocabulary
    does not have. Generation ends at any of ``eog_ids`` and never chooses one of ``suppressed_ids``. Blanks after one of
    ``stripping_ids`` are no part of a text. ``shown_ids`` are control tokens that show in a decoded text. ``pre`` is the
    pre-tokenizer's name, "" where the file gives none. ``lowercase``, ``strip_accents``: what is done to a text first, model
    ``bert`` only; ``eos_id`` is there the token between and after texts. ``sep_id``: what follows the end token between two
    texts, None for nothing. ``charsmap``, ``remove_extra_whitespaces``: the normalization of SentencePiece, model ``t5``
    only.
    """

    path: Path
    model: str
    pre: str
    tokens: list[str]
    index: dict[str, int]
    types: bytes
    scores: np.ndarray[Any, np.dtype[np.float32]] | None
    merges: list[str]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    pad_id: int | None
    eog_ids: frozenset[int]
    suppressed_ids: frozenset[int]
    stripping_ids: frozenset[int]
    shown_ids: frozenset[int]
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool
    lowercase: bool
    strip_accents: bool
    sep_id: int | None
    charsmap: bytes
    remove_extra_whitespaces: bool
    outside: Mapping[str, int]

    @classmethod
    def from_gguf(cls, gguf: TokenizerFile) -> "Vocabulary":
        """Reads and checks the metadata; raises TokenizerError naming the key that is wrong."""
        return _Reader(gguf).vocabulary()

    def refuse(self, key: str, problem: str) -> TokenizerError:
        """The error for the value of a key."""
        return TokenizerError(f"{self.path}: {PREFIX}{key} {problem}")

    def lacking(self, key: str) -> str:
        """What is wrong with the special id of a key that is in ``outside``."""
        return f"is {self.outside[key]}, outside the vocabulary of {len(self.tokens)} tokens"


class _Reader:
    def __init__(self, gguf: TokenizerFile) -> None:
        self.path = gguf.path
        self.metadata = gguf.metadata
        self.outside: dict[str, int] = {}

    def refuse(self, key: str, problem: str) -> TokenizerError:
        return TokenizerError(f"{self.path}: {PREFIX}{key} {problem}")

    def scalar(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(PREFIX + key, default)
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self.refuse(key, f"must be of type {kind.__name__}, not {type(value).__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self.metadata.get(PREFIX + key)
        if value is None:
            raise self.refuse(key, "is missing, so text cannot be tokenized; convert the model again")
        if not isinstance(value, list) or not all(map(str.__instancecheck__, value)):
            raise self.refuse(key, "must be an array of strings")
        return value

    def numbers(self, key: str, kinds: str, n: int | None = None) -> np.ndarray[Any, Any] | None:
        value = self.metadata.get(PREFIX + key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds:
            wanted = "integers" if kinds == "iu" else "numbers"
            raise self.refuse(key, f"must be an array of {wanted}")
        if n is not None and len(value) != n:
            raise self.refuse(key, f"has {len(value)} elements where {PREFIX}tokens has {n}")
        return value

    def vocabulary(self) -> Vocabulary:
        model = self.scalar("model", str)
        if model is None:
            raise self.refuse("model", "is missing: the file has no tokenizer, use a complete model file")
        if model not in MODELS:
            raise self.refuse(
                "model", f"is '{shown(model)}', which this engine does not know; it knows {', '.join(MODELS)}"
            )
        tokens = self.strings("tokens")
        if not tokens:
            raise self.refuse("tokens", "is empty")
        if "" in tokens:
            tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(tokens)]
        index = {text: id for id, text in enumerate(tokens)}
        if len(index) != len(tokens):
            twice = next(id for id, text in enumerate(tokens) if index[text] != id)
            raise self.refuse("tokens", f"has the text of token {twice} twice, again as token {index[tokens[twice]]}")
        types = self.types(tokens)
        ids = self.ids(model, index, types)
        eog_ids = self.eog(index, types, ids)
        scores = self.numbers("scores", "fi", len(tokens))
        if model in ("llama", "t5"):
            if scores is None:
                raise self.refuse("scores", "is missing: without it SentencePiece cannot choose pieces")
            if not (np.abs(scores) <= LARGEST).all():
                raise self.refuse(
                    "scores", "has values that are not finite numbers of 32 bits; convert the model again"
                )
        return Vocabulary(
            path=self.path,
            model=model,
            pre="gemma4" if model == "gemma4" else self.scalar("pre", str, ""),
            tokens=tokens,
            index=index,
            types=bytes(types),
            scores=scores.astype(np.float32) if scores is not None and model in ("llama", "t5") else None,
            merges=self.strings("merges") if model not in ("llama", "bert", "t5") else [],
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            unk_id=ids["unknown"],
            pad_id=ids["padding"],
            eog_ids=eog_ids,
            suppressed_ids=self.suppressed(len(tokens)),
            stripping_ids=self.stripping(model, tokens, types),
            shown_ids=self.shown(index, types),
            # llama.cpp adds both to every text that BERT reads, whatever the file says.
            add_bos=model == "bert" or self.scalar("add_bos_token", bool, True if model == "llama" else None),
            add_eos=model == "bert" or self.scalar("add_eos_token", bool, model == "t5"),
            add_space_prefix=self.scalar("add_space_prefix", bool, model in ("llama", "bert")),
            lowercase=(lowercase := self.scalar("normalizer.lowercase", bool, True)),
            strip_accents=self.scalar("normalizer.strip_accents", bool, lowercase),
            sep_id=self.between(model, len(tokens)),
            charsmap=self.charsmap(),
            remove_extra_whitespaces=self.scalar("remove_extra_whitespaces", bool, False),
            outside=self.outside,
        )

    def types(self, tokens: list[str]) -> bytearray:
        values = self.numbers("token_type", "iu", len(tokens))
        if values is None:
            return bytearray([TokenType.NORMAL]) * len(tokens)
        if values.min() < 0 or values.max() > max(TokenType):
            raise self.refuse("token_type", f"has values outside 0..{max(TokenType).value}")
        for id in np.flatnonzero(values == TokenType.BYTE):
            if _BYTE_TEXT.fullmatch(tokens[id]) is None:
                raise self.refuse("token_type", f"calls token {id} a byte, but its text is not like <0x41>")
        return bytearray(values.astype(np.uint8).tobytes())

    def ids(self, model: str, index: dict[str, int], types: bytearray) -> dict[str, int | None]:
        """The special ids by the name of their key; tokens found by their text also become control tokens.

        Ids that the vocabulary does not have go to ``outside``, and the file counts as one without them: converters copy ids
        of padding and the like, which no text contains, from models with longer vocabularies.
        """
        n = len(index)
        # The defaults of the first SentencePiece models; llama.cpp's default of 11 for gpt2 has no meaning.
        ids: dict[str, int | None] = {}
        if model == "llama" and n > 2:
            ids = {"bos": 1, "eos": 2, "unknown": 0}
        if model == "t5" and n > 2:
            ids = {"eos": 1, "unknown": 2, "padding": 0}
        if model == "bert" and n > 102:  # those of the first models
            ids = {"bos": 101, "eos": 102, "unknown": 100, "padding": 0}
        for name in _ID_KEYS:
            key = f"{name}_token_id"
            value = self.scalar(key, int)
            if value is not None and not 0 <= value < n:
                self.outside[key] = value
                if name in ("bos", "eos"):
                    # Nobody knows which token the file means: that of the first SentencePiece models would be a guess.
                    ids.pop(name, None)
                value = None
            ids[name] = value if value is not None else ids.get(name)
        if model == "bert":
            separator = self.scalar("seperator_token_id", int)  # the key of the format is spelled so
            if separator is not None and 0 <= separator < n:
                ids["eos"] = separator
        for name, texts in _KEY_TEXTS.items():
            found = next((index[text] for text in texts if text in index), None)
            if ids[name] is None and found is not None:
                ids[name] = found
                types[found] = TokenType.CONTROL
        return ids

    def between(self, model: str, n: int) -> int | None:
        """The token that follows the end token between two texts; None if there is none.

        Files of XLM-RoBERTa that say nothing are older than the key: its models were trained with two tokens.
        """
        id = self.scalar("seperator_token_id", int)
        used = model != "bert" and self.scalar("add_sep_token", bool, model == "t5")
        return id if used and id is not None and 0 <= id < n else None

    def charsmap(self) -> bytes:
        """The bytes of a map of characters; b"" if the file has none."""
        values = self.numbers("precompiled_charsmap", "iu")
        if values is None:
            return b""
        if values.size and not -128 <= values.min() <= values.max() <= 255:
            raise self.refuse("precompiled_charsmap", "must be an array of bytes")
        return (values & 0xFF).astype(np.uint8).tobytes()

    def eog(self, index: dict[str, int], types: bytearray, ids: dict[str, int | None]) -> frozenset[int]:
        """The tokens that end generation: those the keys name and those whose text says so.

        ``</s>`` counts only where the file calls it a control token: for Gemma it is HTML (strike-through).
        """
        by_text = [index[text] for text in _EOG_TEXTS if text in index]
        for id in by_text:
            types[id] = TokenType.CONTROL
        if types[index.get("</s>", 0)] == TokenType.CONTROL and "</s>" in index:
            by_text.append(index["</s>"])
        by_key = [ids[name] for name in _EOG_KEYS]
        if "eos_token_id" in self.outside and not by_text and ids["eot"] is None and ids["eom"] is None:
            problem = f"is {self.outside['eos_token_id']}, outside the vocabulary of {len(index)} tokens"
            raise self.refuse("eos_token_id", f"{problem}, and no other token ends an answer; convert the model again")
        eog = {*by_text, *(id for id in by_key if id is not None)}
        texts = {text for text in ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>") if text in index}
        # In these formats <|end|> closes a part of an answer, not the answer.
        if {"<|return|>", "<|call|>"} <= texts or (texts & {"<|call|>", "<|calls|>"} and "<|flush|>" in texts):
            eog.discard(index.get("<|end|>", -1))
        return frozenset(eog)

    def suppressed(self, n: int) -> frozenset[int]:
        """Tokens that a model never chooses, such as those that stand for parts of an image."""
        values = self.numbers("suppress_tokens", "iu")
        ids = frozenset() if values is None else frozenset(values.tolist())
        if outside := [id for id in sorted(ids) if not 0 <= id < n]:
            raise self.refuse("suppress_tokens", f"has {outside[0]}, outside the vocabulary of {n} tokens")
        if len(set(ids)) == n:
            raise self.refuse("suppress_tokens", f"has every one of the {n} tokens, so that none can follow")
        return ids

    def shown(self, index: dict[str, int], types: bytearray) -> frozenset[int]:
        """The tokens between the parts of an answer of gpt-oss or DeepSeek-V4, without which nobody can tell its thoughts and
        calls from its text.

        llama.cpp makes them user-defined.  Here they stay control tokens, which no text of a user can become.
        """
        marks: tuple[str, ...] = ()
        if {"<|return|>", "<|call|>", *_HARMONY} <= index.keys():
            marks = _HARMONY
        elif set(_DSML) <= index.keys():
            marks = _DSML
        return frozenset(id for text in marks if types[id := index[text]] == TokenType.CONTROL)

    def stripping(self, model: str, tokens: list[str], types: bytearray) -> frozenset[int]:
        """The tokens after which Phi-3 was trained to see no blanks, although its chat template writes them.

        No key says so; llama.cpp goes by the name of the model, which misses Phi-3.5.
        """
        if model != "llama" or self.metadata.get("general.architecture") != "phi3":
            return frozenset()
        special = np.isin(np.frombuffer(types, np.uint8), (TokenType.CONTROL, TokenType.USER_DEFINED))
        return frozenset(id for id in np.flatnonzero(special).tolist() if tokens[id] not in ("<s>", "<|endoftext|>"))


def byte_value(text: str) -> int:
    """The byte that a byte token such as ``<0x0A>`` stands for."""
    return int(text[3:5], 16)
