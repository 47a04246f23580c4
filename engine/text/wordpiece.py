"""WordPiece, model ``bert``: each word is spelled with the longest pieces of the vocabulary (Schuster and Nakajima 2012).

A text is cleaned of control characters, lower-cased and freed of accents if the file says so, and cut into words at blanks,
at punctuation and around Chinese characters.  The library ``tokenizers`` does this.  Files store a piece that begins a word
with ▁ before it, and one that continues a word as it is.
"""

import re

from engine.text.spm import SPACE
from engine.text.vocabulary import TokenType, Vocabulary

LONGEST = 100
"""Characters of a word; longer ones become the token for unknown words, as in ``transformers``."""

PART = 1 << 16
"""Characters of a text that are encoded at once, and then up to a blank: the library needs hundreds of bytes for each."""

_WORDS = re.compile("[A-Za-z0-9][^ \t\n\r]*")


class WordPiece:
    """The encoder of one vocabulary; :meth:`encode` takes text whose special tokens have already been extracted."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        if vocabulary.unk_id is None:
            raise vocabulary.refuse("unknown_token_id", "is missing, and WordPiece needs it; convert the model again")
        # Text must never become a control token, so the encoder contains none but that for unknown words.
        unknown = vocabulary.tokens[vocabulary.unk_id]
        pieces = {unknown: vocabulary.unk_id}
        for id, text in enumerate(vocabulary.tokens):
            if vocabulary.types[id] not in (TokenType.CONTROL, TokenType.UNKNOWN) and id != vocabulary.unk_id:
                pieces[text[1:] if text.startswith(SPACE) else "##" + text] = id
        self.tokenizer = Tokenizer(models.WordPiece(pieces, unk_token=unknown, max_input_chars_per_word=LONGEST))
        lowercase, strip = vocabulary.lowercase, vocabulary.strip_accents
        self.tokenizer.normalizer = normalizers.BertNormalizer(True, True, strip, lowercase)
        self.tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            end = text.find(" ", at + PART) if len(text) - at > PART else -1
            end = len(text) if end < 0 else end
            ids += self.tokenizer.encode(text[at:end], add_special_tokens=False).ids
            at = end
        return ids

    def working_bytes(self, text: str) -> int:
        """About the most memory that :meth:`encode` takes meanwhile."""
        return 400 * min(len(text.encode()), 8 * PART)


class WordBound:
    """How few tokens a text can have: a run of characters between blanks has at least one, if it contains a letter or a digit
    of ASCII, which are never removed."""

    def least(self, text: str) -> int:
        """A number of tokens that ``text`` has at least."""
        return sum(1 for _ in _WORDS.finditer(text))
