"""Tiny vocabularies of ``N_VOCAB`` tokens in the files of a Hugging Face model: bytes and merges of GPT-2, of SentencePiece,
and of Gemma 4."""

import io
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast  # type: ignore[attr-defined]

from engine.synthetic.model import vocabulary
from tests.oracle.shared import N_VOCAB

TEXT = "Then he said: 3 and 14 are not in the other one!\n"
"""What is divided into tokens for a comparison."""

_GLM = ["[gMASK]", "<|user|>", "<|observation|>"]
_BOS, _EOS = "<|endoftext|>", "<|im_end|>"


def write(folder: Path, kind: str) -> list[int]:
    """Write a vocabulary of a kind ("gpt2", "llama", "gemma2", "gemma3" or "gemma4"), and return the ids of ``TEXT``."""
    if kind in ("llama", "gemma2", "gemma3"):
        return _spm(folder, space_before=kind == "llama")
    return {"gpt2": _gpt2, "gemma4": _gemma4}[kind](folder)


def _save(tokenizer: Tokenizer, folder: Path, **specials: Any) -> list[int]:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder)
    return tokenizer.encode(TEXT, add_special_tokens=False).ids


def _gpt2(folder: Path) -> list[int]:
    tokens, _, merges = vocabulary(N_VOCAB)
    normal = tokens[: 256 + len(merges)]
    del normal[-len(_GLM) :], merges[-len(_GLM) :]
    special = [_BOS, "<|im_start|>", _EOS, *_GLM]
    assert len(normal) + len(special) == N_VOCAB
    pairs = [(left, right) for left, _, right in (pair.partition(" ") for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(normal)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return _save(tokenizer, folder, bos_token=_BOS, eos_token=_EOS, add_bos_token=False)


def _spm(folder: Path, space_before: bool) -> list[int]:
    out = io.BytesIO()
    words = TEXT.split()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT.strip(), *words] * 20),
        model_writer=out,
        vocab_size=N_VOCAB,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=space_before,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()).encode(TEXT)


def _gemma4(folder: Path) -> list[int]:
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("\u2581", "t"), ("h", "e")]
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), *letters, *("".join(pair) for pair in merges)]
    assert len(tokens) == N_VOCAB
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return _save(tokenizer, folder, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>")
