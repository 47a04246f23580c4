"""What a regular expression costs: a matcher that counts its steps, and texts that make an expression search in vain.

Steps are counted, not timed, so a busy machine changes nothing.  The matcher backtracks as Python's ``re`` does, but without
its shortcuts.
"""

from collections.abc import Callable, Iterator
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

MANY = 40
"""Repetitions from which on a bounded repetition counts as one without a bound."""

CATEGORIES: dict[Any, Callable[[str], bool]] = {
    c.CATEGORY_DIGIT: str.isdecimal,
    c.CATEGORY_NOT_DIGIT: lambda text: not text.isdecimal(),
    c.CATEGORY_SPACE: str.isspace,
    c.CATEGORY_NOT_SPACE: lambda text: not text.isspace(),
    c.CATEGORY_WORD: lambda text: text.isalnum() or text == "_",
    c.CATEGORY_NOT_WORD: lambda text: not (text.isalnum() or text == "_"),
}

Program = list[tuple[Any, ...]]


class TooManySteps(Exception):
    """The matcher has made as many steps as it may."""


class Expression:
    """A regular expression, given as its source and flags, that counts the steps of a search.

    Raises NotImplementedError for what it does not know: references to groups and conditions.
    """

    def __init__(self, pattern: str | bytes, flags: int = 0) -> None:
        text = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
        self.tree = parser.parse(text, flags)
        self._flags = self.tree.state.flags
        self._program: Program = []
        self._n_marks = 0
        self._compile(self.tree, self._program)
        self._program.append(("end",))
        self.steps = 0

    # --- compiling -------------------------------------------------------------------------------------------------

    def _compile(self, tree: Any, out: Program) -> None:
        for op, value in tree:
            if op in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN, c.CATEGORY, c.RANGE):
                out.append(("character", self.taking(op, value)))
            elif op is c.SUBPATTERN:
                self._compile(value[-1], out)
            elif op is c.BRANCH:
                self._branch(value[1], out)
            elif op in (c.MAX_REPEAT, c.MIN_REPEAT):
                least, most, inner = value
                self._repeat(least, most, inner, out, op is c.MAX_REPEAT)
            elif op is c.AT:
                out.append(("at", value))
            elif op in (c.ASSERT, c.ASSERT_NOT):
                direction, inner = value
                back = inner.getwidth()[0] if direction < 0 else 0
                out.append(("look", self._own(inner), back, op is c.ASSERT))
            elif op is c.ATOMIC_GROUP:
                out.append(("atomic", self._own(value)))
            elif op is c.POSSESSIVE_REPEAT:
                out.append(("atomic", self._own([(c.MAX_REPEAT, value)])))
            else:
                raise NotImplementedError(f"regular expressions with {op}")

    def _own(self, tree: Any) -> Program:
        out: Program = []
        self._compile(tree, out)
        out.append(("end",))
        return out

    def _branch(self, choices: Any, out: Program) -> None:
        jumps = []
        for i, choice in enumerate(choices):
            if i + 1 < len(choices):
                split = len(out)
                out.append(("split",))
                self._compile(choice, out)
                jumps.append(len(out))
                out.append(("jump",))
                out[split] = ("split", split + 1, len(out))
            else:
                self._compile(choice, out)
        for at in jumps:
            out[at] = ("jump", len(out))

    def _repeat(self, least: int, most: Any, inner: Any, out: Program, greedy: bool) -> None:
        for _ in range(least):
            self._compile(inner, out)
        if most is c.MAXREPEAT:
            mark, self._n_marks = self._n_marks, self._n_marks + 1
            split = len(out)
            out += [("split",), ("mark", mark)]
            self._compile(inner, out)
            out += [("moved", mark), ("jump", split)]
            out[split] = ("split", split + 1, len(out)) if greedy else ("split", len(out), split + 1)
        else:
            splits = []
            for _ in range(most - least):
                splits.append(len(out))
                out.append(("split",))
                self._compile(inner, out)
            for at in splits:
                out[at] = ("split", at + 1, len(out)) if greedy else ("split", len(out), at + 1)

    def taking(self, op: Any, value: Any) -> Callable[[str], bool]:
        """Whether a node that takes one character takes this one."""
        if op is c.LITERAL:
            own = chr(value)
            folded = self._flags & parser.SRE_FLAG_IGNORECASE
            return (lambda text: text.lower() == own.lower()) if folded else (lambda text: text == own)
        if op is c.NOT_LITERAL:
            return lambda text: text != chr(value)
        if op is c.ANY:
            return (lambda text: True) if self._flags & parser.SRE_FLAG_DOTALL else (lambda text: text != "\n")
        if op is c.RANGE:
            low, high = value
            if self._flags & parser.SRE_FLAG_IGNORECASE:
                return lambda text: any(low <= ord(each) <= high for each in (text.lower(), text.upper()))
            return lambda text: low <= ord(text) <= high
        if op is c.CATEGORY:
            return CATEGORIES[value]
        negated = value[0][0] is c.NEGATE
        tests = [self.taking(*each) for each in value[negated:]]
        return lambda text: any(test(text) for test in tests) != negated

    # --- matching --------------------------------------------------------------------------------------------------

    def match(self, text: str, at: int = 0, *, whole: bool = False, most_steps: int = 1 << 40) -> int | None:
        """Where a match at ``at`` ends, None if there is none; whole: the match must end with the text."""
        return self._run(self._program, text, at, whole, most_steps)

    def find_all(self, text: str, most_steps: int = 1 << 40) -> list[tuple[int, int]]:
        """The places of all matches, as ``re.finditer`` gives them, but for empty ones."""
        found, at = [], 0
        while at <= len(text):
            end = self.match(text, at, most_steps=most_steps)
            if end is not None and end > at:
                found.append((at, end))
                at = end
            else:
                at += 1
        return found

    def _run(self, program: Program, text: str, at: int, whole: bool, most_steps: int) -> int | None:
        waiting: list[tuple[int, int, tuple[int, ...]]] = [(0, at, (-1,) * self._n_marks)]
        while waiting:
            i, at, marks = waiting.pop()
            while True:
                self.steps += 1
                if self.steps > most_steps:
                    raise TooManySteps
                op, *values = program[i]
                i += 1
                if op == "character":
                    if at == len(text) or not values[0](text[at]):
                        break
                    at += 1
                elif op == "split":
                    waiting.append((values[1], at, marks))
                    i = values[0]
                elif op == "jump":
                    i = values[0]
                elif op == "mark":
                    marks = (*marks[: values[0]], at, *marks[values[0] + 1 :])
                elif op == "moved":
                    if marks[values[0]] == at:
                        break
                elif op == "at":
                    if not self._is_at(values[0], text, at):
                        break
                elif op == "look":
                    inner, back, wanted = values
                    found = at >= back and self._run(inner, text, at - back, False, most_steps) is not None
                    if found is not wanted:
                        break
                elif op == "atomic":
                    end = self._run(values[0], text, at, False, most_steps)
                    if end is None:
                        break
                    at = end
                else:
                    if whole and at < len(text):
                        break
                    return at
        return None

    def _is_at(self, place: Any, text: str, at: int) -> bool:
        lines = self._flags & parser.SRE_FLAG_MULTILINE
        word = CATEGORIES[c.CATEGORY_WORD]
        if place in (c.AT_BEGINNING, c.AT_BEGINNING_STRING):
            return at == 0 or bool(lines and place is c.AT_BEGINNING and text[at - 1] == "\n")
        if place is c.AT_END:
            return at == len(text) or text[at:] == "\n" or bool(lines and text[at] == "\n")
        if place is c.AT_END_STRING:
            return at == len(text)
        boundary = (at > 0 and word(text[at - 1])) != (at < len(text) and word(text[at]))
        return boundary if place is c.AT_BOUNDARY else not boundary


# --- texts ---------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A text ``before + repeated * n + after``."""

    before: str
    repeated: str
    after: str

    def text(self, n: int) -> str:
        """The text with n repetitions."""
        return self.before + self.repeated * n + self.after


def runs(expression: Expression) -> Iterator[Run]:
    """Texts that repeat what a repetition of the expression takes, after what stands before it, and that then end, or go on
    with something else."""
    pool = sorted(_pool(expression.tree))
    seen = set()
    for before, inner in _repetitions(expression, expression.tree, "", pool):
        for repeated in _samples(expression, inner, pool)[:6]:
            for after in ("", *_others(pool, repeated)):
                run = Run(before, repeated, after)
                if repeated and run not in seen:
                    seen.add(run)
                    yield run


def _others(pool: list[str], repeated: str) -> list[str]:
    """A few characters that differ from what is repeated."""
    return [each for each in ("!", "\x00", *pool) if each not in repeated][:3]


def _pool(tree: Any) -> set[str]:
    """Characters that stand for the classes of an expression."""
    found = set(" \n05a_-.\\\u00e9")
    for op, value in tree:
        if op in (c.LITERAL, c.NOT_LITERAL):
            found.add(chr(value))
        elif op is c.RANGE:
            found |= {chr(value[0]), chr(value[1])}
        elif op is c.IN:
            found |= _pool([each for each in value if each[0] is not c.NEGATE])
        elif op is c.BRANCH:
            found = found.union(*map(_pool, value[1]))
        elif op in (c.SUBPATTERN, c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT, c.ASSERT, c.ASSERT_NOT):
            found |= _pool(value[-1])
        elif op is c.ATOMIC_GROUP:
            found |= _pool(value)
    return found


def _samples(expression: Expression, tree: Any, pool: list[str]) -> list[str]:
    """A few short texts that a part of an expression takes."""
    found = [""]
    for op, value in tree:
        if op in (c.LITERAL, c.NOT_LITERAL, c.ANY, c.IN, c.CATEGORY):
            takes = expression.taking(op, value)
            choices = [each for each in pool if takes(each)][:6] or [""]
        elif op is c.BRANCH:
            choices = [text for choice in value[1] for text in _samples(expression, choice, pool)[:2]]
        elif op in (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT):
            least, _, inner = value
            choices = [text * max(1, least) for text in _samples(expression, inner, pool)]
            choices += [] if least else [""]
        elif op is c.SUBPATTERN:
            choices = _samples(expression, value[-1], pool)
        elif op is c.ATOMIC_GROUP:
            choices = _samples(expression, value, pool)
        else:
            choices = [""]
        found = [one + other for one in found[:6] for other in choices][:12]
    return list(dict.fromkeys(found))


def _repetitions(expression: Expression, tree: Any, before: str, pool: list[str]) -> Iterator[tuple[str, Any]]:
    """The repetitions of an expression without a narrow bound, each with a text that leads to it."""
    for op, value in tree:
        if op in (c.MAX_REPEAT, c.MIN_REPEAT, c.POSSESSIVE_REPEAT):
            _, most, inner = value
            if most is c.MAXREPEAT or most >= MANY:
                yield before, inner
            yield from _repetitions(expression, inner, before, pool)
        elif op in (c.SUBPATTERN, c.ASSERT, c.ASSERT_NOT):
            yield from _repetitions(expression, value[-1], before, pool)
        elif op is c.ATOMIC_GROUP:
            yield from _repetitions(expression, value, before, pool)
        elif op is c.BRANCH:
            for choice in value[1]:
                yield from _repetitions(expression, choice, before, pool)
        before += _samples(expression, [(op, value)], pool)[0]
