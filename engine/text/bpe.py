"""Byte-pair encoding: models ``gpt2`` (over GPT-2's byte alphabet) and ``gemma4`` (over raw UTF-8).

Text is cut into pieces by the expressions of the pre-tokenizer; in each piece the pair of symbols with the best rank
is merged until no pair is left (by the ``tokenizers`` library). The expressions below are the published ones of each
model family, under llama.cpp's names; none is ever taken from a model file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from engine.checks import shown
from engine.text.vocabulary import TokenType, Vocabulary

# Expressions that several families share. \s+(?!\S) leaves the last blank of a run to the word that follows. Those of
# tekken and gpt-4o are as published; llama.cpp's omit the combining marks (\p{M}).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)

LINEAR = {
    r"\s+$": (r"(?<!\s)\s+$", "isolated"),
    r"\d{1,3}(?=(?:\d{3})*\b)": (r"(?<!\d)\d{1,3}(?=(?:\d{3})*\b)|\G(?<=\d)\d{3}", "isolated"),
    r"(?=(\d{3})+(?!\d))": (r"(?<!\d)\d{1,2}(?=(?:\d{3})+(?!\d))\K\d{3}|\d{3}", "merged_with_next"),
}
"""Published expressions whose search takes time in proportion to the square of a run of blanks or digits, with one that cuts
at the same places and reads a run once, and what becomes of its matches.  Anybody can send a long run."""

LONG = 1 << 14
"""Characters of a text that takes a while."""

PART = 1 << 15
"""Characters of a part of a text after which it may be divided."""

# Where pre-tokenizers cut whatever else the text holds: before a comma or full stop, and before the blank between two words.
# No expression looks from there at what follows, which they do only after blanks and digits.
_AT_POINTS = re.compile("[a-z\u4e00-\u9fff](?=[,.\uff0c\u3002])")
_AT_WORDS = re.compile("[a-z\u4e00-\u9fff](?=[,.\uff0c\u3002]| [a-z])")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging: every pattern cuts the pieces that the one before it made.

    ``whole_pieces``: a piece that is itself a token becomes that token, whatever the merges say (llama.cpp's
    ``ignore_merges``). ``add_bos`` is the default if the file does not say. ``cut``: where it is certain to cut, if anywhere.
    """

    patterns: tuple[str, ...]
    whole_pieces: bool = False
    add_bos: bool = False
    cut: re.Pattern[str] | None = _AT_WORDS


_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_WORDS % r"\p{N}{1,3}",), whole_pieces=True, add_bos=True)
_TRIPLE_DIGITS = PreTokenizer((_WORDS % r"\p{N}{1,3}",))
_QWEN2 = PreTokenizer((_WORDS % r"\p{N}",))
_QWEN35 = PreTokenizer(
    (
        rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    )
)
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))
_TEKKEN = PreTokenizer((_CASED % ("", "", r"\p{N}"),), whole_pieces=True, add_bos=True)
_GPT4O = PreTokenizer((_CASED % (f"(?:{_CONTRACTION})?", f"(?:{_CONTRACTION})?", r"\p{N}{1,3}"),))
_TINY_AYA = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.patterns))
_SEED_CODER = PreTokenizer(
    (rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
)
_EXAONE_MOE = PreTokenizer(
    (
        rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    cut=_AT_POINTS,
)
_MINICPM5 = PreTokenizer((r"\p{N}{1,3}", _WORDS % r"\p{N}+"), whole_pieces=True)
_UPPER_NOT_HAN, _LOWER_NOT_HAN = rf"(?:(?!\p{{Han}}){_UPPER})", rf"(?:(?!\p{{Han}}){_LOWER})"
_KIMI_K2 = PreTokenizer(
    (
        rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+(?:{_CONTRACTION})?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*(?:{_CONTRACTION})?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
    )
)
# Published as these ranges: letters of alphabets with two cases, of Armenian and Georgian only some.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-Ⴥ"
    "Ꭰ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = PreTokenizer(
    (
        r"[\r\n]",
        rf"\s?[{_DEEPSEEK_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        r"\p{N}",
    )
)
_VIKING = PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"))
_SUPERBPE = PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"), cut=None)
_NEWLINES = PreTokenizer((), add_bos=True, cut=None)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre
    for pre, names in (
        (_DEFAULT, "default"),
        (PreTokenizer((_GPT2,)), "gpt-2 phi-2 mpt olmo jais exaone4 trillion granite-docling mellum a.x-4.0 gigachat"),
        (_SINGLE_DIGITS, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
        (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
        (_TRIPLE_DIGITS, "dbrx smaug-bpe chatglm-bpe"),
        (PreTokenizer(_TRIPLE_DIGITS.patterns, whole_pieces=True), "glm4 glm5"),
        (
            _QWEN2,
            "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open grok-2 megrez kormo f2llmv2"
            " bailingmoe bailingmoe2 llada-moe",
        ),
        (_QWEN35, "qwen35"),
        (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
        (_DEEPSEEK_CODER, "deepseek-coder"),
        (_DEEPSEEK_LLM, "deepseek-llm"),
        (_FALCON, "falcon"),
        (_TEKKEN, "tekken"),
        (_GPT4O, "gpt-4o llama4 kanana2 minimax-m2 talkie"),
        (_TINY_AYA, "tiny_aya cohere2moe"),
        (_KIMI_K2, "kimi-k2"),
        (_SEED_CODER, "seed-coder"),
        (_EXAONE_MOE, "exaone-moe"),
        (_MINICPM5, "minicpm5"),
        (_SUPERBPE, "superbpe"),
        (_VIKING, "viking"),
        (_NEWLINES, "gemma4"),
    )
    for name in names.split()
}


def pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    """The pre-tokenizer that the file names; raises TokenizerError for an unknown one."""
    try:
        return PRE_TOKENIZERS[vocabulary.pre or "default"]
    except KeyError:
        known = ", ".join(PRE_TOKENIZERS)
        problem = f"is '{shown(vocabulary.pre)}', a pre-tokenizer this engine does not know; it knows {known}"
        raise vocabulary.refuse("pre", problem) from None


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable substitute for every byte: itself if printable, else a character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


class BPE:
    """The encoder of one vocabulary; :meth:`encode` takes text whose special tokens have already been extracted."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers

        pre = pre_tokenizer(vocabulary)
        self.raw = vocabulary.pre == "gemma4"
        self.index = vocabulary.index
        self._cut = pre.cut
        self.n_vocab = len(vocabulary.tokens)
        # Text must never merge into a control token, so the encoder does not contain them.
        vocab = dict(vocabulary.index)
        kinds = np.frombuffer(vocabulary.types, np.uint8)
        for id in np.flatnonzero(np.isin(kinds, (TokenType.CONTROL, TokenType.UNKNOWN))):
            del vocab[vocabulary.tokens[id]]
        alphabet = () if self.raw else tuple(byte_alphabet().values())
        # A byte without a token still separates its neighbours, as in llama.cpp: it gets an id that is dropped later.
        for symbol in alphabet:
            vocab.setdefault(symbol, self.n_vocab + ord(symbol))
        self.complete = all(vocab[symbol] < self.n_vocab for symbol in alphabet)
        merges = _merges(vocabulary, vocab)
        bpe = models.BPE(vocab, merges, ignore_merges=pre.whole_pieces, byte_fallback=self.raw)
        self.tokenizer = Tokenizer(bpe)
        if not self.raw:
            linear = (LINEAR.get(pattern, (pattern, "isolated")) for pattern in pre.patterns)
            cuts = [pre_tokenizers.Split(Regex(pattern), matches) for pattern, matches in linear]
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; bytes that the vocabulary cannot express at all are left out."""
        if self.raw:
            return self._encode_raw(text)
        ids: list[int] = []
        for part in self.parts(text):
            ids += self._ids(part)
        return ids if self.complete else [id for id in ids if id < self.n_vocab]

    def parts(self, text: str) -> Iterator[str]:
        """A long text in parts whose ids, one after another, are its ids: the library needs hundreds of bytes per character
        of a part.  A text without words and commas is one part."""
        at = 0
        while self._cut is not None and len(text) - at > 2 * PART and (cut := self._cut.search(text, at + PART)):
            yield text[at : cut.end()]
            at = cut.end()
        yield text[at:] if at else text

    def working_bytes(self, text: str) -> int:
        """About the most memory that :meth:`encode` takes meanwhile."""
        # Measured: 400 bytes for each byte of text that expressions cut into characters, 160 where there are none.
        return (160 if self.raw else 400) * max(len(part.encode()) for part in self.parts(text))

    def _encode_raw(self, text: str) -> list[int]:
        """Runs of newlines are separate pieces, and single tokens if the vocabulary has them."""
        ids: list[int] = []
        for piece in re.findall("\n+|[^\n]+", text.replace(" ", "\u2581")):
            if piece[0] == "\n" and piece in self.index:
                ids.append(self.index[piece])
            else:
                ids += self._ids(piece)
        return ids

    def _ids(self, text: str) -> list[int]:
        if len(text) < LONG:
            return self.tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]
        # The other method stops all threads of the program meanwhile.
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return found.ids  # type: ignore[no-any-return]


def _merges(vocabulary: Vocabulary, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merge rules as pairs, best first; raises TokenizerError if one names a token that does not exist.

    ``vocab`` lacks the control tokens, and rules for them are left out. Of equal rules, the first one counts.
    """
    rules = vocabulary.merges
    if len(set(rules)) != len(rules):
        rules = list(dict.fromkeys(rules))
    pairs: list[Any] = [tuple(rule.split(" ", 1)) for rule in rules]
    # There may be half a million rules: they are checked one by one only if one of them is wrong.
    texts = chain(map(itemgetter(0), pairs), map(itemgetter(-1), pairs), map("".join, pairs))
    if set(map(len, pairs)) <= {2} and all(map(vocab.__contains__, texts)):
        return pairs
    control = vocabulary.index.keys() - vocab.keys()
    pairs = []
    for rank, rule in enumerate(rules):
        # The blank that divides a rule is the first after index 0: the left part may itself begin with one.
        at = rule.find(" ", 1)
        left, right = (rule[:at], rule[at + 1 :]) if at > 0 else (rule, "")
        if left in vocab and right in vocab and left + right in vocab:
            pairs.append((left, right))
        elif not control & {left, right, left + right}:
            missing = next(text for text in (left, right, left + right) if text not in vocab)
            raise vocabulary.refuse("merges", f"has a rule, number {rank}, for '{shown(missing)}', which is no token")
    return pairs
