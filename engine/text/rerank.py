"""The prompt of a reranker: a query with a document."""

import re
from collections.abc import Sequence

from engine.text.template.named import RERANK, text_of
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import TokenizerFile

_PLACES = re.compile(r"\{(query|document)\}")


class RerankPrompt:
    """Turns a query and a document into the token ids that a reranker reads.

    template: the text of the file with {query} and {document} in it; "": the two texts follow one another, with the tokens
        around and between them that the tokenizer adds.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer, self._template = tokenizer, template

    @classmethod
    def from_gguf(cls, gguf: TokenizerFile, tokenizer: Tokenizer) -> "RerankPrompt":
        """The prompt of a file.  Raises TemplateError if its template is no text."""
        return cls(tokenizer, text_of(gguf, RERANK))

    def ids(self, query: str, document: str, most: int = 0) -> list[int]:
        """The token ids.  Control tokens are recognized in the template only.

        most: the number of tokens to which the end of the document is cut; 0: it is not.
        """
        ids = self._ids(query, document)
        while most and len(ids) > most and document:
            # What follows the document stays.  Tokens are no shorter than a part of a character, so this ends.
            whole = self._tokenizer.encode(document, add_special=False)
            kept = max(0, len(whole) - max(1, len(ids) - most))
            document = self._tokenizer.decode(whole[:kept]) if kept else ""
            ids = self._ids(query, document)
        return ids

    def _ids(self, query: str, document: str) -> list[int]:
        if not self._template:
            return self._tokenizer.pair(query, document)
        given = {"query": query, "document": document}
        parts, trusted, at = [], bytearray(), 0
        for place in _PLACES.finditer(self._template):
            parts += [self._template[at : place.start()], given[place[1]]]
            trusted += _marks(parts[-2:])
            at = place.end()
        parts.append(self._template[at:])
        trusted += b"\1" * len(parts[-1])
        return self._tokenizer.encode_marked("".join(parts), bytes(trusted), add_special=False)


def _marks(pair: Sequence[str]) -> bytes:
    """Which characters of a piece of the template and of a text of the user may be part of control tokens."""
    return b"\1" * len(pair[0]) + b"\0" * len(pair[1])
