"""Text to token ids and back: special tokens, the model's encoder, and decoding that never splits a character."""

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from engine.checks import described
from engine.errors import TokenizerError
from engine.text.bound import LONG, AtLeast, Bound
from engine.text.bpe import BPE, byte_alphabet, pre_tokenizer
from engine.text.prefixes import Ids, Prefixes
from engine.text.spm import SPACE, SPM
from engine.text.unigram import Unigram, UnigramBound
from engine.text.vocabulary import PREFIX, TokenizerFile, TokenType, Vocabulary, byte_value
from engine.text.wordpiece import WordBound, WordPiece

__all__ = ["TokenStream", "TokenType", "Tokenizer"]

_SURROGATES = re.compile("[\ud800-\udfff]")
_BLANKS = " \t\n\v\f\r"
_TYPES = list(TokenType)  # every token is looked up, and TokenType(value) takes longer


class Tokenizer:
    """The tokenizer of one model.

    ``n_vocab`` token ids 0..n_vocab-1; ``bos_id`` and ``eos_id`` are None if the model has none. ``add_bos`` and
    ``add_eos`` say whether :meth:`encode` adds them to a text. Generation ends at any id of ``eog_ids`` and never
    chooses one of ``suppressed_ids``. ``warnings``: what is odd about the vocabulary and does no harm, a sentence each.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.n_vocab = len(vocabulary.tokens)
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.eog_ids, self.suppressed_ids = vocabulary.eog_ids, vocabulary.suppressed_ids
        self.add_eos = vocabulary.add_eos
        self.add_bos = bool(vocabulary.add_bos)
        self._model: BPE | SPM | WordPiece | Unigram
        if vocabulary.model == "llama":
            self._model = SPM(vocabulary)
        elif vocabulary.model == "bert":
            self._model = WordPiece(vocabulary)
        elif vocabulary.model == "t5":
            self._model = Unigram(vocabulary)
        else:
            pre = pre_tokenizer(vocabulary)
            # Without it Gemma 4 produces nonsense, and files exist that forbid it; llama.cpp also insists.
            self.add_bos = (
                pre.add_bos if vocabulary.add_bos is None else vocabulary.add_bos or vocabulary.pre == "gemma4"
            )
            self._model = BPE(vocabulary)
        for wanted, id, name in ((self.add_bos, self.bos_id, "bos"), (self.add_eos, self.eos_id, "eos")):
            key = f"{name}_token_id"
            if wanted and id is None:
                problem = vocabulary.lacking(key) if key in vocabulary.outside else "is missing"
                raise vocabulary.refuse(key, f"{problem}, but add_{name}_token asks for it; convert the model again")
        self.warnings = [f"{PREFIX}{key} {vocabulary.lacking(key)}: it is ignored." for key in vocabulary.outside]
        if vocabulary.model == "gpt2" and vocabulary.pre in ("", "default"):
            said = "is missing" if not vocabulary.pre else "is 'default'"
            self.warnings.append(
                f"{PREFIX}pre {said}, so text is cut into tokens by a rule that may not be the model's and answers may be "
                "worse; convert the model again."
            )
        self._special = _SpecialTokens(vocabulary)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, gguf: TokenizerFile) -> "Tokenizer":
        """The tokenizer of an opened GGUF file (anything with ``path`` and ``metadata``); raises TokenizerError."""
        return cls(Vocabulary.from_gguf(gguf))

    def agrees(self, other: "Tokenizer") -> bool:
        """Whether token ids mean the same to another tokenizer."""
        ours, theirs = self.vocabulary, other.vocabulary
        return self is other or (ours.tokens, ours.types) == (theirs.tokens, theirs.types)

    # --- text to ids -------------------------------------------------------------------------------------------

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, at_least: AtLeast | None = None
    ) -> list[int]:
        """The ids of ``text``.

        ``add_special`` adds the model's begin and end tokens, if the model uses them. With ``parse_special`` the text
        of a control token becomes that token: never use it for text you did not write. If the text is long, ``at_least``
        is called first with a number of ids that it has at least, so that it can raise an error before they are made.
        """
        return self._encode(text, None if parse_special else b"", add_special, at_least)

    def encode_marked(
        self,
        text: str,
        trusted: bytes,
        *,
        add_special: bool = True,
        continued: bool = False,
        at_least: AtLeast | None = None,
    ) -> list[int]:
        """The ids of ``text``, where a control token is recognized only if each of its characters is trusted.

        ``trusted`` has one byte per character of ``text``, 1 if it may be part of a control token, else 0;
        ``add_special`` adds the model's begin and end tokens, if the model uses them; ``continued``: ordinary text
        precedes it. If the text is long, ``at_least`` is called first with a number of ids that it has at least, so that it
        can raise an error before they are made. Raises ValueError if the lengths of ``text`` and ``trusted`` differ.
        """
        if len(trusted) != len(text):
            raise ValueError(f"{len(trusted)} marks for {len(text)} characters")
        return self._encode(text, trusted, add_special, at_least, continued)

    def _encode(
        self,
        text: str,
        trusted: bytes | None,
        add_special: bool,
        at_least: AtLeast | None,
        continued: bool = False,
    ) -> list[int]:
        # A lone surrogate (from undecodable bytes of a command line) is not a character: UTF-8 cannot express it.
        text = _SURROGATES.sub("\ufffd", text)
        if at_least is not None and len(text) >= LONG:
            at_least(self._bound.least(text))
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        # A unigram model itself puts a blank before what it is given.
        prefix = self.vocabulary.add_space_prefix and self.vocabulary.model != "t5"
        after_special = not continued
        strips = False
        for part in self._special.split(text, trusted):
            if isinstance(part, int):
                ids.append(part)
                after_special = True
                strips = part in self.vocabulary.stripping_ids
            elif part := part.lstrip(_BLANKS) if strips else part:
                ids += self._model.encode(" " + part if prefix and after_special else part)
                after_special = False
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def pair(self, first: str, second: str) -> list[int]:
        """The ids of two texts, one after the other, with the begin and end tokens that the model uses for each, and the one
        between them."""
        ids = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        end = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        between = [] if self.vocabulary.sep_id is None else [self.vocabulary.sep_id]
        a, b = (self.encode(text, add_special=False) for text in (first, second))
        return [*ids, *a, *end, *between, *b, *end]

    def cut(self, ids: list[int], most: int) -> list[int]:
        """The first ``most`` ids of a text, of which the last one is the end token if the model uses it."""
        end = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        return [*ids[: most - len(end)], *end]

    def working_bytes(self, text: str) -> int:
        """About the most memory, in bytes, that :meth:`encode` takes for ``text``, its ids included."""
        text = _SURROGATES.sub("\ufffd", text)
        return self._model.working_bytes(text) + 40 * len(text.encode())

    @cached_property
    def _bound(self) -> Bound | WordBound | UnigramBound:
        if isinstance(self._model, Unigram):
            return UnigramBound(self._model.by_word)
        return WordBound() if self.vocabulary.model == "bert" else Bound(self.vocabulary)

    # --- ids to text -------------------------------------------------------------------------------------------

    def token_bytes(self, id: int, *, special: bool = False) -> bytes:
        """The bytes that token ``id`` adds to a text, possibly only part of a character.

        Control, unknown and unused tokens add nothing unless ``special``, but for the marks between the parts of an answer of
        gpt-oss. Raises TokenizerError outside the vocabulary.
        """
        kind = self.token_type(id)
        text = self.vocabulary.tokens[id]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED):
            return text.encode("utf-8") if special or id in self.vocabulary.shown_ids else b""
        data = self._bytes.get(id)
        if data is None:
            data = self._bytes[id] = self._text_bytes(text, kind)
        return data

    def _text_bytes(self, text: str, kind: TokenType) -> bytes:
        if kind == TokenType.BYTE:
            return bytes([byte_value(text)])
        if kind == TokenType.USER_DEFINED:
            return text.encode("utf-8")
        if self.vocabulary.model != "gpt2":
            return text.replace(SPACE, " ").encode("utf-8")
        try:
            return bytes([self._byte_values[symbol] for symbol in text])
        except KeyError:
            return text.encode("utf-8")  # not written in the byte alphabet: a padding token that calls itself normal

    @cached_property
    def _byte_values(self) -> dict[str, int]:
        return {symbol: byte for byte, symbol in byte_alphabet().items()}

    def beginning_with(self, text: str) -> Ids:
        """The ids, ascending, int64, of the tokens, other than control tokens, whose :meth:`token_bytes` begin with the bytes
        of ``text``.

        ``text`` must not be empty. The first call prepares an index.
        """
        return self._prefixes.ids(text)

    @cached_property
    def _prefixes(self) -> Prefixes:
        return Prefixes(self.vocabulary)

    def token_type(self, id: int) -> TokenType:
        """The type of token ``id``; raises TokenizerError for an id outside the vocabulary."""
        if not 0 <= id < self.n_vocab:
            raise TokenizerError(f"token id {described(id)} is outside the vocabulary of {self.n_vocab} tokens")
        return _TYPES[self.vocabulary.types[id]]

    def token_id(self, text: str) -> int | None:
        """The id of the token stored as ``text`` (``"<|im_end|>"``), None if there is none."""
        return self.vocabulary.index.get(text)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of ``ids``; bytes that form no character become U+FFFD, control tokens add nothing unless ``special``.

        The blank that :meth:`encode` puts before a text (models with ``add_space_prefix``) is removed again.
        """
        stream = self.stream(special=special, begins_text=True)
        return "".join([*map(stream.feed, ids), stream.flush()])

    def stream(self, *, special: bool = False, begins_text: bool = False) -> "TokenStream":
        """A decoder that takes one id at a time.

        ``begins_text``: the ids are those of a whole text, so the blank that :meth:`encode` put before it is left out.
        An answer, which continues a prompt, keeps it.
        """
        return TokenStream(self, special, begins_text and self.vocabulary.add_space_prefix)


class TokenStream:
    """Turns ids into text as they arrive; an incomplete character waits for the ids that complete it.

    The pieces of :meth:`feed` and :meth:`flush` joined are ``data.decode("utf-8", errors="replace")`` of all bytes.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool, drop_blank: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._drop_blank = drop_blank
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """The text that is certain once ``id`` has arrived; raises TokenizerError for an id outside the vocabulary."""
        data = self._tokenizer.token_bytes(id, special=self._special)
        if self._drop_blank and data and self._tokenizer.token_type(id) != TokenType.CONTROL:
            self._drop_blank = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The rest at the end: U+FFFD for a character that was never completed. The stream can be used again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _SpecialTokens:
    """Finds special tokens in text: control and unknown tokens where they are trusted, user-defined ones anywhere."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        kinds = np.frombuffer(vocabulary.types, np.uint8)
        special = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        ids = [int(id) for id in np.flatnonzero(np.isin(kinds, special))]
        # Longest first, in bytes: the order in which llama.cpp searches for them.
        ids.sort(key=lambda id: -len(vocabulary.tokens[id].encode("utf-8")))
        self.ids = {vocabulary.tokens[id]: id for id in ids}
        self.anywhere = {text for text, id in self.ids.items() if kinds[id] == TokenType.USER_DEFINED}
        # Lengths of the tokens by their first two characters, so that a text is searched in one pass.
        self.lengths: dict[str, Counter[int]] = {}
        for text in self.ids:
            self.lengths.setdefault(text[:2], Counter())[len(text)] += 1
        firsts = {text[0] for text in self.ids}
        self.firsts = re.compile("[" + "".join(map(re.escape, sorted(firsts))) + "]") if firsts else None

    def present(self, text: str) -> list[str]:
        """The special tokens whose text occurs in ``text``, longest first."""
        if self.firsts is None:
            return []
        found: set[str] = set()
        wanted = dict(self.lengths)
        for match in self.firsts.finditer(text):
            at = match.start()
            for head in (text[at : at + 2], text[at]):
                lengths = wanted.get(head)
                if not lengths:
                    continue
                new = {token for n in lengths if (token := text[at : at + n]) in self.ids} - found
                if new:
                    found |= new
                    # A token that has been found is not searched for again: long runs of blanks stay cheap.
                    wanted[head] = lengths - Counter(map(len, new))
        return [token for token in self.ids if token in found] if found else []

    def split(self, text: str, trusted: bytes | None) -> Sequence[str | int]:
        """``text`` as fragments and the ids of the special tokens between them.

        Each token, the longest first, takes all its occurrences from left to right in what the earlier ones have left.
        ``trusted`` marks the characters that control tokens may consist of: None for all, empty for none.
        """
        spans: list[tuple[int, int, int | None]] = [(0, len(text), None)] if text else []
        for token in self.present(text):
            marks = None if token in self.anywhere else trusted
            if marks == b"":
                continue
            pieces: list[tuple[int, int, int | None]] = []
            for start, end, id in spans:
                if id is None:
                    pieces += self._cut(text, token, start, end, marks)
                else:
                    pieces.append((start, end, id))
            spans = pieces
        return [text[start:end] if id is None else id for start, end, id in spans]

    def _cut(
        self, text: str, token: str, start: int, end: int, marks: bytes | None
    ) -> list[tuple[int, int, int | None]]:
        pieces: list[tuple[int, int, int | None]] = []
        search = start
        while (at := text.find(token, search, end)) >= 0:
            search = at + len(token)
            if marks is not None and 0 in marks[at:search]:
                search = at + 1
                continue
            if at > start:
                pieces.append((start, at, None))
            pieces.append((at, search, self.ids[token]))
            start = search
        if start < end:
            pieces.append((start, end, None))
        return pieces
