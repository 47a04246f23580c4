"""Grammars: what an answer may be, as users write it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.checks import described
from engine.errors import UsageError
from engine.grammar.library import llguidance
from engine.grammar.messages import DEEP
from engine.grammar.trial import TRIAL

MOST_BYTES = 1 << 18
"""The most bytes of a schema, a regular expression or a grammar."""

MOST_STEPS = 2_000_000
"""The most characters of a grammar in GBNF times its rules: the time of the conversion grows with that, to a second."""

KINDS = ("JSON schema", "regular expression", "grammar")
"""What a grammar can be made from."""

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How answers write JSON: as ``json.dumps`` does.  Where any blanks are permitted, some models write them without end."""

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""A token is permitted if its text is.  By default, llguidance permits only one way to divide a text that must come next."""


@dataclass(frozen=True, repr=False)
class Grammar:
    """What an answer may be: a JSON value, a text that matches a regular expression, or a text of a language.

    Create it with :meth:`json_schema`, :meth:`regex`, :meth:`lark` or :meth:`gbnf`, and pass it as ``grammar`` to
    :meth:`LLM.generate`, :meth:`LLM.complete`, :meth:`LLM.chat` or :meth:`LLM.stream`. It belongs to no model, never
    changes, and any number of answers may share it. It needs the extra ``serve`` (the package llguidance).

    Parameters
    ----------
    kind : str
        What it was made from, as error messages call it.
    source : str
        The grammar in llguidance's variant of Lark.

    Examples
    --------
    >>> import engine
    >>> llm = engine.load(n_ctx=256)
    >>> grammar = engine.Grammar.json_schema({"enum": ["red", "green", "blue"]})
    >>> llm.complete("colour = ", grammar=grammar, temperature=0).text in ('"red"', '"green"', '"blue"')
    True
    """

    kind: str
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Grammar":
        """A grammar of the JSON values that a JSON schema (draft 2020-12) accepts.

        The values are written in one line, with one blank after each comma and colon, like those of ``json.dumps``.
        Properties come in the order of the schema. A number has at most 32 digits in a row, unless the schema asks for
        more.

        Parameters
        ----------
        schema : mapping or str
            The schema, which is an object, or its JSON text. ``{}`` accepts any value, ``{"type": "object"}`` any object.

        Returns
        -------
        Grammar
            The grammar.

        Raises
        ------
        UsageError
            If the schema is not valid, uses a keyword that is not supported, cannot be satisfied, or is too large, or if
            llguidance is not installed.
        """
        kind = "JSON schema"
        try:
            if isinstance(schema, str):
                schema = json.loads(_checked(kind, schema), parse_constant=_refused)
            if not isinstance(schema, Mapping):
                raise UsageError(f"a JSON schema must be an object, such as {{}}, not {described(schema)}.")
            text = json.dumps({**schema, "x-guidance": JSON_OPTIONS}, allow_nan=False)
        except RecursionError:
            raise _rejected(kind, DEEP) from None
        except (TypeError, ValueError) as error:
            raise UsageError(f"the JSON schema is not JSON: {error}; correct it.") from error
        return cls._tried(kind, _checked(kind, text), "start: %json ", "")

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """A grammar of the texts that match a regular expression from their first to their last character.

        Parameters
        ----------
        pattern : str
            The expression, in the syntax of Rust's ``regex``: like Python's, without back-references, assertions such as
            ``\\b`` and ``(?=...)``, and comments. ``.`` matches no line break.

        Returns
        -------
        Grammar
            The grammar.

        Raises
        ------
        UsageError
            If the expression is not valid or too large, or if llguidance is not installed.
        """
        kind = "regular expression"
        pattern = _checked(kind, pattern)
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
            raise _rejected(kind, "it ends with a single backslash")
        library = llguidance()
        return cls._tried(kind, library.regex_to_lark(pattern, ""), "start: /", "/")

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """A grammar in llguidance's variant of Lark.

        Parameters
        ----------
        text : str
            The grammar; its rule ``start`` is the whole answer. ``<|name|>`` is a special token of the model, ``%json
            {...}`` a JSON schema. The options ``max_tokens`` and ``stop`` of a rule are not supported, ``temperature`` has
            no effect.

        Returns
        -------
        Grammar
            The grammar.

        Raises
        ------
        UsageError
            If the grammar is not valid or too large, or if llguidance is not installed.
        """
        kind = "grammar"
        text = _checked(kind, text)
        try:
            return cls._tried(kind, text, "", "")
        except UsageError:
            if "::=" not in text:
                raise
        raise _rejected(kind, "it is GBNF, not Lark; python -m llguidance.gbnf_to_lark FILE converts it")

    @classmethod
    def gbnf(cls, text: str) -> "Grammar":
        """A grammar in GBNF, the notation of llama.cpp, which llguidance converts to Lark.

        Rules that are not recursive become tokens of a lexer, which takes as many characters as it can, so fewer texts may
        be accepted than in llama.cpp.

        Parameters
        ----------
        text : str
            The grammar; its rule ``root`` is the whole answer.

        Returns
        -------
        Grammar
            The grammar.

        Raises
        ------
        UsageError
            If the grammar is not valid or too large, or if llguidance is not installed.
        """
        kind = "grammar"
        text = _checked(kind, text)
        llguidance()
        from llguidance.gbnf_to_lark import gbnf_to_lark

        if len(text) * text.count("::=") > MOST_STEPS:
            raise _rejected(kind, "it has too many rules for its length")
        try:
            converted = gbnf_to_lark(text)
        except Exception as error:  # the converter has no error of its own for all that it rejects
            raise _rejected(kind, f"it is not valid GBNF ({str(error)[:200]})") from None
        return cls._tried(kind, _checked(kind, converted.removeprefix("%llguidance {}")), "", "")

    @classmethod
    def restored(cls, kind: object, source: object) -> "Grammar":
        """The grammar whose ``kind`` and ``source`` were stored, possibly by others.  Raises UsageError if it cannot be
        used."""
        if kind not in KINDS:
            raise UsageError(
                f"there is no kind of grammar {described(kind)}: it is {', '.join(KINDS[:-1])} or {KINDS[-1]}."
            )
        text = _checked(str(kind), source)
        if not text.endswith(_OPTIONS):
            raise _rejected(str(kind), "it was not stored by this engine")
        return cls._tried(str(kind), text.removesuffix(_OPTIONS), "", "")

    @classmethod
    def _tried(cls, kind: str, text: str, before: str, after: str) -> "Grammar":
        llguidance()
        grammar = cls(kind, f"{before}{text}{after}{_OPTIONS}")
        grammar.check(TRIAL.problem(grammar.source))
        return grammar

    @property
    def has_json(self) -> bool:
        """Whether parts of the answer follow a JSON schema, so that their numbers must end."""
        return "%json" in self.source

    @property
    def expression(self) -> str:
        """The expression that stands for it within another grammar, where it is the last thing in its line."""
        source = self.source.removesuffix(_OPTIONS)
        # The rules of a nested grammar have their own names.
        return f"%lark {{\n{source}\n}}" if self.kind == "grammar" else source.removeprefix("start: ")

    def check(self, problem: str) -> None:
        """Raise UsageError if there is a problem."""
        if problem:
            raise _rejected(self.kind, problem)

    def __repr__(self) -> str:
        return f"<Grammar: {self.kind}, {len(self.source) - len(_OPTIONS)} characters>"


def _rejected(kind: str, problem: str) -> UsageError:
    return UsageError(f"the {kind} cannot be used: {problem}; correct or simplify it.")


def _checked(kind: str, text: object) -> str:
    """A text that is Unicode and not too long."""
    if not isinstance(text, str):
        raise UsageError(f"a {kind} must be a text, not {described(text)}.")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise UsageError(f"the {kind} has half a character at index {error.start}; remove it.") from error
    if size > MOST_BYTES:
        raise UsageError(f"the {kind} has {size} bytes, and at most {MOST_BYTES} are allowed; shorten it.")
    return text


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
