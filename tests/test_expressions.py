"""Regular expressions of the engine: each that sees text of a user takes a number of steps in proportion to the text.

The sources are searched for them: a file that is in neither table fails, and so does an expression that takes more.  What the
tokenizers library searches with is tested in ``tests/text/test_pre_tokenizers.py``.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from engine.serving.ollama.loading import _DURATION
from engine.text.template.dsml import MARK
from tests.backtracking import Expression, Run, TooManySteps, runs
from tests.conftest import REPOSITORY
from tests.tiers import examples

USES = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}

MODULES = ("re", "regex")

N = 24
"""Repetitions in the smaller one of two texts; the other one has four times as many."""

MOST_GROWTH = 7
"""The most that the steps may grow by then: 4 is linear, 16 quadratic."""

MOST_STEPS = 60_000
"""The most steps of a search that is not given up."""


TRUSTED = {
    "engine/checks.py": "sizes of the command line",
    "engine/cli/commands.py": "what the user of a terminal types",
    "engine/cli/flags.py": "the command line",
    "engine/cli/sweep.py": "the command line",
    "engine/cli/texts.py": "the command line, and files that it names",
    "engine/cli/words.py": "the answer on the terminal of a user",
    "engine/cuda/runtime/compiler.py": "code that the compiler has made",
    "engine/cuda/runtime/ptx.py": "code that the compiler has made",
    "engine/devices.py": "the command line",
    "engine/errors.py": "messages of the command line",
    "engine/gguf/file.py": "a name of a file",
    "engine/hub/repository.py": "names of files",
    "engine/models/division.py": "names of tensors, for expressions of the command line",
    "engine/models/nextn.py": "names of tensors",
    "engine/models/weights.py": "names of tensors",
    "engine/parity.py": "a message of ours",
    "engine/synthetic/shapes.py": "names of ours",
    "engine/text/breakers.py": "tokens of a vocabulary, for texts of at most 40 characters",
    "engine/text/rerank.py": "the template of a file",
    "engine/text/vocabulary.py": "tokens of a vocabulary",
    "engine/verify/lockstep.py": "names of tensors",
    "engine/verify/report.py": "what the system says of its processor",
}
"""Files whose expressions see no text of a client of the server, and what they read."""

BODY, ANSWER, SCHEMA = "a body (--body-bytes)", "an answer (-c)", "a schema (--schema-bytes)"

SEEN = {
    "engine/grammar/messages.py": f"a report on {SCHEMA}",
    "engine/tools/calls/function.py": SCHEMA,
    "engine/tools/calls/gemma4.py": SCHEMA,
    "engine/tools/calls/qwen3_coder.py": SCHEMA,
    "engine/tools/calls/rules.py": SCHEMA,
    "engine/tools/calls/schemas.py": SCHEMA,
    "engine/tools/formats/arguments.py": ANSWER,
    "engine/tools/formats/deepseek3.py": ANSWER,
    "engine/tools/formats/deepseek4.py": ANSWER,
    "engine/tools/formats/gemma4.py": ANSWER,
    "engine/tools/formats/glm.py": ANSWER,
    "engine/tools/formats/gpt_oss.py": ANSWER,
    "engine/tools/formats/history.py": BODY,
    "engine/tools/formats/hunyuan.py": ANSWER,
    "engine/tools/formats/json_call.py": ANSWER,
    "engine/tools/formats/kimi.py": ANSWER,
    "engine/tools/formats/minimax.py": ANSWER,
    "engine/tools/formats/mistral.py": ANSWER,
    "engine/tools/formats/parser.py": ANSWER,
    "engine/tools/formats/qwen3_coder.py": ANSWER,
    "engine/tools/formats/reader.py": ANSWER,
    "engine/tools/formats/seed_oss.py": ANSWER,
    "engine/tools/formats/tagged_values.py": ANSWER,
    "engine/tools/formats/tools.py": "a number in an answer (MAX_DIGITS)",
    "engine/serving/guard.py": "a header (64 KiB)",
    "engine/serving/llama_server/template.py": f"what a template makes of {BODY}",
    "engine/serving/ollama/loading.py": "a duration (MOST_CHARACTERS)",
    "engine/text/bpe.py": BODY,
    "engine/text/charsmap.py": BODY,
    "engine/text/template/dsml.py": BODY,
    "engine/text/template/harmony.py": BODY,
    "engine/text/template/sandbox.py": BODY,
    "engine/text/tokenizer.py": BODY,
    "engine/text/unigram.py": BODY,
    "engine/text/wordpiece.py": BODY,
}
"""The other files: what their expressions read, and what bounds its length."""

ONCE = {
    r'(at )?(?P<line>\d+)\(\d+\): |failed to (compile JSON schema|parse "%json"): |panic: .*',
    *(rf"\s*</{MARK}tool_calls>\s*\Z", rf"\s*</{MARK}invoke>", rf'\s*<{MARK}invoke name="([^"]*)">'),
    _DURATION.pattern,
    rf'\s*<{MARK}parameter name="([^"]*)" string="(true|false)">(.*?)</{MARK}parameter>',
}
"""Expressions that would take too many steps if they were tried at every place of a text, as any other may be: they are tried
at one place only."""

SAMPLES = {
    "f'[^{tags}]+' if tags else '(?s:.+)'": ("[^\ud800\ud801]+", "(?s:.+)"),
    "'|'.join(map(re.escape, longest))": ("<tool_call>|<function=|</function>|</parameter>|<parameter=|</think>",),
    "'(' + '|'.join(map(re.escape, self._ids)) + ')'": ("(<tool_call>|</tool_call>|<think>)",),
    "'[' + ''.join(map(re.escape, sorted(firsts))) + ']'": ("[<\\[ \n]",),
    "": (r"\S", r'["{}\[\]]', r'["\\]', r"(?s:.)"),  # map(re.compile, ...)
}
"""What expressions look like that are made of other texts, by the first argument as it is written."""


class Found(NamedTuple):
    """A use of ``re`` in the sources: where it is, and the arguments of the call, if it is one, as they are written."""

    file: str
    line: int
    arguments: tuple[str, ...]


def found() -> Iterator[Found]:
    """Every use of an expression in the engine."""
    for path in sorted((REPOSITORY / "engine").rglob("*.py")):
        file, text = path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8")
        if not re.search(r"\bimport re|\bfrom re|\bregex", text):
            continue  # a name that is not imported is an error of lint; to parse every file takes seconds
        tree = ast.parse(text)
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.ImportFrom) and node.module in MODULES), f"{file}: import re as a whole"
            if isinstance(node, ast.Import):
                assert not any(name.name in MODULES and name.asname for name in node.names), f"{file}: import re as re"
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id in MODULES and node.attr in USES:
                call = calls.get(id(node))
                given = [*call.args, *(each.value for each in call.keywords)] if call else []
                yield Found(file, node.lineno, tuple(map(ast.unparse, given)))


def expressions(use: Found) -> Iterator[tuple[str | bytes, int]]:
    """The expressions of a use, and their flags."""
    first = use.arguments[0] if use.arguments else ""
    if first in SAMPLES:
        yield from ((sample, 0) for sample in SAMPLES[first])
        return
    names = vars(importlib.import_module(use.file.removesuffix(".py").replace("/", ".")))
    flags = [eval(each, names) for each in use.arguments[1:] if each.startswith("re.") and each[3:].isupper()]
    yield eval(first, names), int(flags[0]) if flags else 0


USED = list(found())


def test_every_file_with_expressions_is_in_a_table() -> None:
    files = {use.file for use in USED}
    assert files == TRUSTED.keys() | SEEN.keys(), "say what the expressions of this file read"
    assert not TRUSTED.keys() & SEEN.keys()


def test_nothing_else_searches_text() -> None:
    """Expressions of the tokenizers library, which are not Python's, are those of one file."""
    for path in (REPOSITORY / "engine").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "Regex(" not in text or path.name == "bpe.py", path
        assert "import fnmatch" not in text, path


@pytest.mark.parametrize("use", [use for use in USED if use.file in SEEN], ids=lambda use: f"{use.file}:{use.line}")
def test_steps_grow_in_proportion_to_the_text(use: Found) -> None:
    for pattern, flags in expressions(use):
        expression = Expression(pattern, flags)
        for how in ("match" if pattern in ONCE else "search", "fullmatch"):
            assert (run := costly(expression, how)) is None, f"{pattern!r} takes too many steps for {run}"


def costly(expression: Expression, how: str) -> Run | None:
    """A run for which a search takes more steps than in proportion to its length, if there is one."""
    for run in runs(expression):
        small, large = (steps(expression, run.text(n), how) for n in (N, 4 * N))
        if large > min(MOST_GROWTH * small, MOST_STEPS):
            return run
    return None


def steps(expression: Expression, text: str, how: str = "search") -> int:
    """The number of steps of a search that is given up after MOST_STEPS."""
    expression.steps = 0
    try:
        if how == "search":
            expression.find_all(text, MOST_STEPS)
        else:
            expression.match(text, whole=how == "fullmatch", most_steps=MOST_STEPS)
    except TooManySteps:
        pass
    return expression.steps


# --- the matcher itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "how", "linear"),
    [
        (r"[+-]?(?:0|(?:(?:\d+\.?\d*|\.\d+)(?:ns|us|s|m|h))+)", "fullmatch", False),
        (r"[+-]?(?:0|(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|s|m|h))+)", "fullmatch", True),
        (r"(a+)+b", "match", False),
        (r"(?:a|ab|b)*c", "match", False),
        (r"(?:a|b)*c", "match", True),
        (r"a*+a*b", "match", True),
        (r"\s+$", "search", False),
        (r"(?<!\s)\s+$", "search", True),
        (r"x*y", "search", False),
        (r".*?,", "match", True),
        (r"(?=.*b)a", "search", False),
    ],
)
def test_slow_expressions_are_told_from_others(pattern: str, how: str, linear: bool) -> None:
    assert (costly(Expression(pattern), how) is None) == linear


PARTS = ("a", "b", r"\d", "[^a]", ".", "(a|b1)", "(?:ab)?", "a*", "b+?", "(a|)*", "[ab]{1,2}", r"\b", "(?<!a)", "(?=1)")


@examples(300)
@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=6).map("".join), st.text("ab1 \n", max_size=8))
def test_the_matcher_finds_what_python_finds(pattern: str, text: str) -> None:
    expression = Expression(pattern)
    for whole, method in ((False, re.match), (True, re.fullmatch)):
        theirs = method(pattern, text)
        assert expression.match(text, whole=whole) == (theirs and theirs.end())
