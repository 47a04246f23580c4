"""SentencePiece-style BPE, model ``llama``: the adjacent pair whose union has the best score is merged first.

The vocabulary is passed to the ``sentencepiece`` library as the model file that training would have produced, written
here field by field from the GGUF arrays (``sentencepiece_model.proto``), with every normalization switched off.
"""

from engine.text.vocabulary import TokenType, Vocabulary

SPACE = "\u2581"

# ModelProto.SentencePiece.Type; user-defined tokens are extracted from the text beforehand, so here they are ordinary
# results of merging, as in llama.cpp.
_PIECE_TYPES = {
    TokenType.UNDEFINED: 1,
    TokenType.NORMAL: 1,
    TokenType.UNKNOWN: 3,
    TokenType.CONTROL: 3,
    TokenType.USER_DEFINED: 1,
    TokenType.UNUSED: 5,
    TokenType.BYTE: 6,
}
_UNKNOWN = 2


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _message(field: int, body: bytes) -> bytes:
    """A length-delimited field of a protocol buffer."""
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


class SPM:
    """The encoder of one vocabulary; :meth:`encode` takes text whose special tokens have already been extracted.

    Unlike in llama.cpp, text can never merge into a control token or spell out a byte token (SentencePiece's rule).
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        from sentencepiece import SentencePieceProcessor

        self.n_vocab = len(vocabulary.tokens)
        self.unk_id = vocabulary.unk_id
        self.processor = SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(_model_proto(vocabulary))
        except RuntimeError as error:
            raise vocabulary.refuse("tokens", f"is not a vocabulary that SentencePiece accepts ({error})") from None

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``; if the vocabulary lacks byte tokens, an unknown character becomes the unknown token."""
        ids: list[int] = self.processor.encode(text.replace(" ", SPACE))
        if self.n_vocab in ids:
            known = [self.unk_id] if self.unk_id is not None else []
            return [each for id in ids for each in (known if id == self.n_vocab else [id])]
        return ids

    def working_bytes(self, text: str) -> int:
        """About the most memory that :meth:`encode` takes meanwhile."""
        return 64 * len(text.encode())  # measured


def _model_proto(vocabulary: Vocabulary) -> bytes:
    """The vocabulary as a serialized ``ModelProto``, plus the unknown piece that SentencePiece requires."""
    assert vocabulary.scores is not None
    scores = vocabulary.scores.astype("<f4").tobytes()
    types = [b"\x18" + bytes([_PIECE_TYPES[TokenType(kind)]]) if kind != TokenType.NORMAL else b"" for kind in range(7)]
    # One SentencePiece message: piece (field 1), score (field 2, float), type (field 3).
    heads = [b"\x0a" + _varint(n) for n in range(128)]
    parts: list[bytes] = []
    for id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        piece = text.encode("utf-8")
        n = len(piece)
        body = (
            (heads[n] if n < 128 else b"\x0a" + _varint(n))
            + piece
            + b"\x15"
            + scores[4 * id : 4 * id + 4]
            + types[kind]
        )
        n = len(body)
        parts.append((heads[n] if n < 128 else b"\x0a" + _varint(n)) + body)
    unknown = max(vocabulary.tokens, key=len) + "?"
    parts.append(_message(1, _message(1, unknown.encode("utf-8")) + _number(3, _UNKNOWN)))
    n_bytes = vocabulary.types.count(TokenType.BYTE)
    # TrainerSpec: model_type BPE (3), byte_fallback (35), no bos, eos, pad of its own (41..43), unk_piece (45).
    trainer = _number(3, 2) + _number(35, int(n_bytes == 256)) + _message(45, unknown.encode("utf-8"))
    # NormalizerSpec: identity, no dummy prefix (3), keep blanks (4), blanks are escaped already (5).
    normalizer = _message(1, b"identity") + _number(3, 0) + _number(4, 0) + _number(5, 0)
    return b"".join([*parts, _message(2, trainer), _message(3, normalizer)])
