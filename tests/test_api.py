"""The Python interface: names, options, errors, conversations, closing, saved states, threads."""

import copy
import doctest
import gc
import importlib
import importlib.metadata
import inspect
import io
import json
import os
import pickle
import pydoc
import re
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import engine
from engine.decode.running_batch import AHEAD_TOKENS
from engine.errors import ContextError, EngineError, TemplateError, TokenizerError, UsageError
from engine.hub.resolve import resolve
from engine.options import Options
from engine.text.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

PROMPT = "def add(a, b):\n    "
OTHER = "class Stack:\n    def push(self, item):\n"
SEEDED: dict[str, Any] = {"max_tokens": 12, "seed": 5}


@pytest.fixture(scope="module")
def llm() -> engine.LLM:
    return engine.load(n_ctx=256)


# --- names ---------------------------------------------------------------------------------------------------------


def python(source: str, *, folder: Path = REPOSITORY) -> str:
    """What a program prints that runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_is_cheap_and_names_are_there() -> None:
    out = python(
        "import sys, engine; names = dir(engine); engine.UsageError, engine.TokenLogprob, engine.__version__\n"
        "print(sorted({'numpy', 'numba', 'jinja2'} & set(sys.modules)), names == sorted(engine.__all__))"
    )
    assert out.split() == ["[]", "True"]
    for name in engine.__all__:
        assert getattr(engine, name) is not None
    assert not hasattr(engine, "no_such_name")


def test_functions_need_no_package_of_the_server() -> None:
    out = python(
        "import sys, engine; engine.LLM, engine.ToolCall\n"
        "print(sorted({'starlette', 'uvicorn', 'llguidance', 'pydantic', 'engine.serving'} & set(sys.modules)))"
    )
    assert out == "[]\n"


def test_all_has_every_error() -> None:
    from engine import errors

    assert {name for name in vars(errors) if name.endswith("Error")} == {
        n for n in engine.__all__ if n.endswith("Error")
    }


def test_the_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine import version

    try:
        expected = importlib.metadata.version("bitmirror")
    except importlib.metadata.PackageNotFoundError:
        expected = "0+unknown"
    assert engine.__version__ == expected

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", missing)
        assert importlib.reload(version).__version__ == "0+unknown"
    assert importlib.reload(version).__version__ == expected


def test_options_are_those_of_generate() -> None:
    hints = get_type_hints(engine.LLM.generate)
    keywords = {
        name: hints[name]
        for name, parameter in inspect.signature(engine.LLM.generate).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert get_type_hints(Options) == keywords


PUBLIC = [getattr(engine, name) for name in engine.__all__ if name != "__version__"]


def documented() -> Iterator[tuple[str, Any]]:
    """Public functions and classes, and the public methods of classes."""
    for thing in PUBLIC:
        yield thing.__name__, thing
        if inspect.isclass(thing):
            for name, member in inspect.getmembers(thing, inspect.isroutine):
                if not name.startswith("_") and (getattr(member, "__module__", "") or "").startswith("engine"):
                    yield f"{thing.__name__}.{name}", member


@pytest.mark.parametrize(
    "name",
    [
        "load",
        "LLM.generate",
        "LLM.complete",
        "LLM.chat",
        "LLM.stream",
        "LLM.stream_chat",
        "LLM.score",
        "LLM.verify",
        "LLM.trace",
        "LLM.save_state",
        "LLM.load_state",
        "LLM.tokenize",
        "LLM.detokenize",
        "LLM.logits",
        "LLM.prefill",
        "LLM.compile",
        "Grammar",
        "Grammar.json_schema",
        "Grammar.regex",
        "Grammar.lark",
        "ChatTemplate.render",
        "ChatTemplate.load",
        "SamplingParams",
        "SpeculationParams",
    ],
)
def test_every_parameter_is_documented(name: str) -> None:
    thing = dict(documented())[name]
    text = inspect.getdoc(thing) or ""
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\w+\n-+\n|\Z)", text, re.M | re.S)
    assert section
    heads = re.findall(r"^(\S[^\n]*)$", section[1], re.M)
    found = {part.strip().lstrip("*") for head in heads for part in head.split(" : ")[0].split(",")}
    assert found == set(inspect.signature(thing).parameters) - {"self"}


def test_help_shows_what_is_documented() -> None:
    """The methods that the book lists, the attributes that the docstring lists, and nothing of the machinery."""
    book = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    methods = re.findall(r"\w+", re.search(r"documented: class engine\.LLM\(\)\n:members: (.*)", book)[1])  # type: ignore[index]
    attributes = re.search(r"^Attributes\n-+\n(.*)", inspect.getdoc(engine.LLM) or "", re.M | re.S)
    heads = re.findall(r"^(\S.*) : ", attributes[1] if attributes else "", re.M)
    names = methods + [name for head in heads for name in head.split(", ")]
    assert sorted(engine.LLM.documented) == sorted(names)
    llm = engine.load(device="cpu", n_ctx=64, n_threads=1)
    assert all(hasattr(llm, name) for name in names)
    assert sorted(name for name in dir(llm) if not name.startswith("__")) == sorted(names)
    text = pydoc.plain(pydoc.render_doc(engine.LLM))
    shown = set(re.findall(r"^ \|  ([a-z]\w*)(?:\(self|$)", text, re.M))
    assert shown == {name for name in names if hasattr(engine.LLM, name)} >= {*methods}


def test_examples_in_docstrings_run() -> None:
    pytest.importorskip("llguidance", reason="the example of Grammar needs the extra serve")
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    out = io.StringIO()
    tests = [
        test
        for thing in [engine, *PUBLIC]
        for test in finder.find(thing, getattr(thing, "__name__", ""))
        if test.examples
    ]
    # Methods that a class inherits are found in the class that defines them.
    from engine.answers import Answers
    from engine.cached_model import CachedModel
    from engine.conversations import Conversations
    from engine.generating_model import GeneratingModel

    tests += [
        test
        for base in (Answers, Conversations, GeneratingModel, CachedModel)
        for test in finder.find(base)
        if test.examples
    ]
    assert len(tests) >= 9
    for test in tests:
        runner.run(test, out=out.write)
    assert runner.failures == 0, out.getvalue()


def test_the_help_of_an_answer_has_nothing_internal() -> None:
    shown = pydoc.plain(pydoc.render_doc(engine.Generation))
    assert not re.search("Request|Sampler|AnsweringModel|_begin|__init__", shown)
    described = set(re.findall(r"^ \|  (\w+)(?:\(self.*)?$", shown, re.M))
    assert {"close", "done", "message", "parsed"} <= described
    options = inspect.getdoc(Options) or ""
    assert {name for name in Options.__annotations__ if f"``{name}``" not in options} == set()


PROGRAM = """
import asyncio
from typing import Unpack

import engine
from engine import LLM, Generation, SpeculationParams, TokenLogprob


def likely(entry: TokenLogprob) -> list[tuple[str, float]]:
    return [(one.text, one.logprob) for one in entry.top]


def ask(llm: LLM, prompt: str, **options: Unpack[engine.Options]) -> Generation:
    return llm.complete(prompt, **options)


def main() -> None:
    with engine.load("pycoder", n_ctx=256) as llm:
        ids: list[int] = llm.tokenize("x")
        shape: tuple[int, ...] = llm.logits(ids).shape
        answer = ask(llm, "x", max_tokens=3, stop="\\n", logprobs=2)
        text: str = answer.text + str(shape)
        for piece in llm.chat([{"role": "user", "content": "x"}], stream=True, chat_template="chatml", seed=1):
            text += piece.upper()
        rate: float = answer.timings.predicted_per_second
        llm.generate("x", speculation=SpeculationParams(lookup=True)).close()
        llm.save_state("state.json")
        ids += llm.load_state("state.json")
        print(text, rate, likely(answer.logprobs[0]), engine.__version__.upper())
    try:
        llm.compile()
    except engine.UsageError as error:
        print(str(error))


main()
"""

WRONG = """
import engine
llm = engine.load(n_ctx="many")
llm.complete("x", max_tokens="3")
llm.complete("x", temprature=0.5)
llm.chat("hello")
llm.complete("x").logprobs[0]["id"]
engine.no_such_name
"""


@pytest.mark.thorough
def test_mypy_accepts_a_program_and_finds_mistakes(tmp_path: Path) -> None:
    def check(source: str) -> list[str]:
        file = tmp_path / "program.py"
        file.write_text(source, encoding="utf-8")
        # An installed package is only followed; from a source tree, mypy would also report on the package itself.
        words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", "cache", file.name]
        environment = os.environ | {"MYPYPATH": str(REPOSITORY)}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return [line for line in done.stdout.splitlines() if "error:" in line or done.returncode > 1]

    pytest.importorskip("mypy")
    assert check(PROGRAM) == []
    found = check(WRONG)
    assert list(dict.fromkeys(int(line.split(":")[1]) for line in found)) == [3, 4, 5, 6, 7, 8], found


# --- what is shown, copied and refused -----------------------------------------------------------------------------


def test_representations_are_short(llm: engine.LLM) -> None:
    answer = llm.complete(PROMPT, max_tokens=30, temperature=0)
    assert repr(answer) == f"<Generation: 30 tokens, ended by 'length', {answer.text[:39] + '…'!r}>"
    one = llm.generate(PROMPT, max_tokens=9)
    assert repr(one) == "<Generation: 0 tokens, in progress, ''>"
    next(one)
    assert "in progress" in repr(one)
    one.close()
    assert "closed early" in repr(one)
    assert re.fullmatch(r"<LLM 'Dense' \(qwen3, 18.4 M parameters\) on .*, \d+ of 256 tokens in the cache>", repr(llm))


def test_a_model_is_not_copied(llm: engine.LLM) -> None:
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="path.*engine.load"):
            attempt(llm)  # type: ignore[operator]


def test_a_finished_answer_is_copied_and_an_unfinished_one_is_not(llm: engine.LLM) -> None:
    answer = llm.generate(PROMPT, logprobs=2, speculation=engine.SpeculationParams(lookup=True), **SEEDED)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="in progress"):
            attempt(answer)  # type: ignore[operator]
    pieces = list(answer)
    assert pieces
    for twin in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer), copy.copy(answer)):
        assert repr(twin) == repr(answer)
        for name in ("text", "ids", "prompt_ids", "logprobs", "finish_reason", "seed", "timings", "speculation"):
            assert getattr(twin, name) == getattr(answer, name)
        assert twin.done and list(twin) == []
        twin.close()


ONE_SENTENCE = re.compile(r"[^\n]{10,240}")


class BytesPath:
    """A path whose text is bytes."""

    def __fspath__(self) -> bytes:
        return b"model"


@pytest.mark.parametrize(
    "prompt", [None, 5, ["a", 5], [5, "a"], [1.5], [True], b"ab", {1: 2}, object(), np.zeros((2, 2), np.int32)]
)
def test_a_prompt_of_a_wrong_type(llm: engine.LLM, prompt: Any) -> None:
    for use in (llm.complete, llm.generate):
        with pytest.raises(UsageError, match="a prompt must be a text or a sequence of token ids") as caught:
            use(prompt)
        assert ONE_SENTENCE.fullmatch(str(caught.value))


@pytest.mark.parametrize("ids", [[[1, 2], [3]], [[1, 2]], 5, "ab", [1.5], None, np.zeros((2, 2), np.int32)])
def test_ids_that_are_no_sequence_of_whole_numbers(llm: engine.LLM, ids: Any) -> None:
    for use in (llm.logits, llm.prefill):
        with pytest.raises(UsageError, match="token ids must be a sequence of whole numbers.*, not "):
            use(ids)


@pytest.mark.parametrize("id", [2**31, 2**70, -(10**5000)], ids=range(3))
def test_ids_beyond_64_bits(llm: engine.LLM, id: int) -> None:
    for use in (llm.generate, llm.logits):
        with pytest.raises(UsageError, match="token ids must be 0 to 8191"):
            use([id])
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        llm.detokenize([id])


def test_lone_surrogates_are_replaced(llm: engine.LLM) -> None:
    messages = [{"role": "user", "content": "\ud800"}]
    for answer in (
        llm.complete("\ud800", heal=True, stop="\udfff", **SEEDED),
        llm.chat(messages, chat_template="chatml", **SEEDED),
    ):
        assert "\ufffd" in llm.detokenize(answer.prompt_ids)


def test_token_ids_may_be_an_array(llm: engine.LLM) -> None:
    ids: Any = np.array(llm.tokenize(PROMPT))
    assert llm.complete(ids, **SEEDED).ids == llm.complete(PROMPT, **SEEDED).ids
    assert llm.detokenize(ids) == PROMPT


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stop": 5}, "stop must be a text"),
        ({"stop": [1]}, "stop must be a text"),
        ({"stop": None}, "stop must be a text"),
        ({"max_tokens": "3"}, "max_tokens must be a whole number, not '3'"),
        ({"max_tokens": 1.0}, "max_tokens must be a whole number"),
        ({"max_tokens": None}, "max_tokens must be a whole number"),
        ({"logprobs": True}, "logprobs must be a whole number"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"logit_bias": 3}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": [(1, 2)]}, "logit_bias must map token ids to numbers"),
        ({"speculation": 3}, "speculation must be SpeculationParams"),
        ({"on_prefill": 5}, "on_prefill must be a function, not 5"),
        ({"dry_multiplier": np.array([1.0, 2.0])}, "dry_multiplier must be a number, not ndarray"),
        ({"stop": 10**5000}, "stop must be a text .* not a whole number of 16610 bits"),
        ({"max_tokens": -(10**5000)}, "max_tokens must be -1 .* not a negative number of 16610 bits"),
        ({"logprobs": 10**5000}, "logprobs must be between"),
        ({"temperature": "x" * 10**6}, "temperature must be a number, not a text of 1000000 characters"),
    ],
)
def test_options_of_wrong_types(llm: engine.LLM, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        llm.generate(PROMPT, **options)
    assert ONE_SENTENCE.fullmatch(str(caught.value))


def test_an_unknown_option_is_pythons_error(llm: engine.LLM) -> None:
    options: dict[str, Any] = {"temprature": 1}
    for use in (llm.generate, llm.complete, lambda prompt, **o: llm.chat(MESSAGES, chat_template="chatml", **o)):
        with pytest.raises(TypeError, match="temprature"):
            use(PROMPT, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"path_or_name": 5},
        {"path_or_name": ""},
        {"path_or_name": b"pycoder"},
        {"draft_model": ""},
        {"n_ctx": "256"},
        {"n_ctx": 1.5},
        {"n_threads": None},
        {"batch_size": True},
        {"snapshot_bytes": "1"},
        {"cache_type": 16},
        {"cache_type": []},
        {"cache_type_k": []},
        {"progress": 5},
        {"n_ctx": 10**5000},
        {"n_threads": 10**5000},
        {"batch_size": 10**5000},
        {"draft_max": 10**5000},
        {"snapshot_bytes": -(10**5000)},
        {"device": "x" * 10**6},
        {"path_or_name": BytesPath()},
        {"device": 5},
        {"device": None},
    ],
    ids=lambda options: next(iter(options)),
)
def test_loading_with_wrong_types(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        engine.load(**options)
    assert ONE_SENTENCE.fullmatch(str(caught.value))


@pytest.mark.parametrize("text", [None, 5, b"x", ["x"]])
def test_only_text_has_tokens(llm: engine.LLM, text: Any) -> None:
    with pytest.raises(UsageError, match="only a text"):
        llm.tokenize(text)
    if text is None or text == ["x"]:
        with pytest.raises(UsageError):
            llm.detokenize(text)
        with pytest.raises(UsageError):
            llm.logits(text)


def test_a_text_is_one_stop_text(llm: engine.LLM) -> None:
    whole = llm.complete(PROMPT, max_tokens=40, temperature=0).text
    stop = whole[5:9]
    answer = llm.complete(PROMPT, max_tokens=40, temperature=0, stop=stop)
    assert (answer.text, answer.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_tops_have_the_texts_of_their_tokens(llm: engine.LLM) -> None:
    (entry,) = llm.complete(PROMPT, max_tokens=1, temperature=0, logprobs=llm.config.n_vocab).logprobs
    assert isinstance(entry, engine.TokenLogprob)
    assert entry.top[0] == engine.TokenLogprob(entry.id, entry.text, entry.logprob)
    assert sorted(t.id for t in entry.top) == list(range(llm.config.n_vocab))
    assert abs(sum(np.exp(t.logprob) for t in entry.top) - 1) < 1e-4
    for likely in entry.top:
        assert likely.text.encode() == llm.tokenizer.token_bytes(likely.id, special=True) or "\ufffd" in likely.text
    with pytest.raises(AttributeError):
        entry.id = 3  # type: ignore[misc]


# --- conversations -------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": PROMPT}]


def test_chat_answers_what_the_template_writes(llm: engine.LLM) -> None:
    template = engine.ChatTemplate.load("chatml", llm.tokenizer)
    ids = template.encode(MESSAGES)
    expected = llm.complete(ids, **SEEDED)
    for given in ("chatml", template):
        answer = llm.chat(MESSAGES, chat_template=given, **SEEDED)
        assert (answer.prompt_ids, answer.ids, answer.text) == (ids, expected.ids, expected.text)
        assert answer.done
    streamed = llm.chat(tuple(MESSAGES), stream=True, chat_template="chatml", **SEEDED)
    assert (streamed.ids, streamed.done) == ([], False)
    assert "".join(streamed) == expected.text


def test_chat_reads_a_template_from_a_file_and_passes_values_on(llm: engine.LLM, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ opening }}{{ messages[-1].content }}", encoding="utf-8")
    answer = llm.chat(MESSAGES, chat_template=file, chat_template_kwargs={"opening": "# "}, max_tokens=0)
    assert llm.detokenize(answer.prompt_ids) == "# " + PROMPT


def test_chat_uses_the_models_own_template(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TemplateError, match="no chat template.*chat_template"):
        llm.chat(MESSAGES)
    monkeypatch.setattr(llm, "chat_template", engine.ChatTemplate.load("chatml", llm.tokenizer))
    assert llm.chat(MESSAGES, **SEEDED).ids == llm.chat(MESSAGES, chat_template="chatml", **SEEDED).ids


def test_earlier_turns_are_not_read_again_and_do_not_show(llm: engine.LLM) -> None:
    llm.reset()
    options: dict[str, Any] = {"chat_template": "chatml", "max_tokens": 16, "temperature": 0}
    messages = list(MESSAGES)
    first = llm.chat(messages, **options)
    assert first.timings.cache_n == 0
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": OTHER}]
    second = llm.chat(messages, **options)
    t = second.timings
    # Of the last token of an answer, and of those that close its message, the cache holds nothing yet.
    assert t.cache_n >= len(first.prompt_ids) + len(first.ids) - 2
    assert t.cache_n + t.prompt_n == len(second.prompt_ids)
    llm.complete(OTHER, max_tokens=3)
    assert llm.chat(messages, **options).ids == second.ids  # whatever was asked in between


@pytest.mark.parametrize(
    "messages",
    ["hello", None, 5, [], {"role": "user", "content": "x"}, ["x"], [{"role": "user"}], [{"role": 1, "content": "x"}]],
    ids=str,
)
def test_messages_of_wrong_types(llm: engine.LLM, messages: Any) -> None:
    with pytest.raises(UsageError, match="message.*give a list such as") as caught:
        llm.chat(messages, chat_template="chatml")
    assert ONE_SENTENCE.fullmatch(str(caught.value))


@pytest.mark.parametrize(("template", "error"), [("no such", TemplateError), (5, UsageError), ("", TemplateError)])
def test_templates_that_are_not_there(llm: engine.LLM, template: Any, error: type[EngineError]) -> None:
    with pytest.raises(error) as caught:
        llm.chat(MESSAGES, chat_template=template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values", [{"messages": []}, {"self": 1}, {"known": "x"}, {"at_least": 1}, {1: 2}, [], ["x"], "x", 5]
)
def test_template_values_of_wrong_types(llm: engine.LLM, values: Any) -> None:
    with pytest.raises(UsageError, match="chat_template_kwargs") as caught:
        llm.chat(MESSAGES, chat_template="chatml", chat_template_kwargs=values)
    assert ONE_SENTENCE.fullmatch(str(caught.value))


def test_a_template_of_another_model(llm: engine.LLM) -> None:
    vocabulary = llm.tokenizer.vocabulary
    twin = Tokenizer(replace(vocabulary))
    answer = llm.chat(MESSAGES, chat_template=engine.ChatTemplate.load("chatml", twin), **SEEDED)
    assert answer.ids == llm.chat(MESSAGES, chat_template="chatml", **SEEDED).ids
    tokens = [*vocabulary.tokens, "another"]
    other = Tokenizer(
        replace(
            vocabulary, tokens=tokens, index={text: i for i, text in enumerate(tokens)}, types=vocabulary.types + b"\1"
        )
    )
    with pytest.raises(UsageError, match="made for another model"):
        llm.chat(MESSAGES, chat_template=engine.ChatTemplate.load("chatml", other))


# --- closing -------------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[engine.LLM], object]] = {
    "tokenize": lambda llm: llm.tokenize("x"),
    "detokenize": lambda llm: llm.detokenize([5]),
    "logits": lambda llm: llm.logits([5]),
    "prefill": lambda llm: llm.prefill([5]),
    "read": lambda llm: llm.read([5]),
    "step": lambda llm: llm.step(5),
    "reset": lambda llm: llm.reset(),
    "compile": lambda llm: llm.compile(),
    "warm_up": lambda llm: llm.warm_up(),
    "generate": lambda llm: llm.generate("x"),
    "complete": lambda llm: llm.complete("x"),
    "chat": lambda llm: llm.chat(MESSAGES, chat_template="chatml"),
    "save_state": lambda llm: llm.save_state("never-written.json"),
    "load_state": lambda llm: llm.load_state("never-read.json"),
    "with": lambda llm: llm.__enter__(),
    "model": lambda llm: llm.model.ops,
    "cache": lambda llm: llm.sequence.length,
}


@pytest.fixture(scope="module")
def closed() -> engine.LLM:
    with engine.load(n_ctx=64) as llm:
        llm.complete(PROMPT, max_tokens=2)
    return llm


@pytest.mark.parametrize("use", USES)
def test_a_closed_model_says_so(closed: engine.LLM, use: str) -> None:
    assert closed.closed
    with pytest.raises(UsageError, match=r"^this model is closed; open it again with engine.load\(\)\.$"):
        USES[use](closed)
    closed.close()  # again
    assert repr(closed) == "<LLM 'Dense' (qwen3, 18.4 M parameters), closed>"


def begin(generation: engine.Generation) -> engine.Generation:
    """The answer after three tokens: the first one is the prompt's, and the others are made step by step."""
    while len(generation.ids) < 3:
        next(generation)
    return generation


def test_an_answer_of_a_closed_model_says_so() -> None:
    llm = engine.load(n_ctx=64)
    begun, waiting = (llm.generate(PROMPT, max_tokens=20, temperature=0) for _ in range(2))
    finished = llm.complete(PROMPT, max_tokens=3)
    text = begin(begun).text
    with pytest.raises(ZeroDivisionError), llm:
        raise ZeroDivisionError
    for generation in (begun, waiting):
        with pytest.raises(UsageError, match="this model is closed"):
            list(generation)
        generation.close()
    assert begun.text == text and len(finished.ids) == 3


def mapped(file: Path) -> bool:
    """Whether this process has mapped a file."""
    return str(file) in Path("/proc/self/maps").read_text(encoding="utf-8")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what is mapped")
@pytest.mark.parametrize("draft", [True, False], ids=["with a draft model", "alone"])
def test_closing_frees_the_cache_and_the_weights(tmp_path: Path, draft: bool) -> None:
    names = {"model": "pycoder-draft"} | ({"draft_model": "pycoder-draft"} if draft else {})
    files = {name: Path(shutil.copy(resolve(model), tmp_path / f"{name}.gguf")) for name, model in names.items()}
    llm = engine.load(files["model"], n_ctx=64, draft_model=files.get("draft_model"))
    lookup = engine.SpeculationParams(lookup=True)
    generation = llm.generate(PROMPT, max_tokens=20, temperature=0, speculation=lookup)
    begin(generation)
    parts: list[Callable[[], object]] = [weakref.ref(llm.model), weakref.ref(llm.cache)]
    if draft:
        assert llm.draft is not None
        parts += [weakref.ref(llm.draft.llm.model), weakref.ref(llm.draft.llm.cache)]
    assert all(part() is not None for part in parts) and all(map(mapped, files.values()))
    llm.close()
    # The answer still waits for its next token, but holds nothing.
    assert [part() for part in parts] == [None] * len(parts)
    assert not any(map(mapped, files.values()))
    with pytest.raises(UsageError, match="closed"):
        next(generation)


@pytest.mark.gpu
@pytest.mark.alone
def test_closing_frees_the_memory_of_a_gpu() -> None:
    llm = engine.load(n_ctx=1024, device="cuda", draft_model="pycoder-draft")
    device = llm.model.ops.device  # type: ignore[attr-defined]
    generation = begin(llm.generate(PROMPT, max_tokens=40, temperature=0))
    free, weights = device.free_memory(), llm.n_bytes
    llm.close()
    gc.collect()
    assert device.free_memory() >= free + weights
    with pytest.raises(UsageError, match="closed"):
        list(generation)


# --- saved states --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(llm: engine.LLM, tmp_path: Path) -> Path:
    llm.reset()
    llm.complete(PROMPT, max_tokens=9, temperature=0)
    llm.save_state(tmp_path / "state.json")
    return tmp_path / "state.json"


def line_of(path: Path) -> dict[str, Any]:
    """The first line of a state."""
    found: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[0])
    return found


def test_a_state_continues_with_the_same_bits(llm: engine.LLM, saved: Path) -> None:
    ids = line_of(saved)["tokens"]
    answer = llm.complete(PROMPT, max_tokens=9, temperature=0)
    assert ids == (answer.prompt_ids + answer.ids)[: llm.n_cached] and len(ids) > len(answer.prompt_ids)
    text = [*ids, *llm.tokenize("\n" + OTHER)]
    expected = llm.complete(text, logprobs=3, **SEEDED)
    with engine.load(n_ctx=128, n_threads=1, batch_size=3) as other:
        seen: list[tuple[int, int]] = []
        assert other.load_state(str(saved), lambda *step: seen.append(step)) == ids
        assert seen[-1] == (len(ids), len(ids)) and other.n_cached == len(ids)
        found = other.complete(text, logprobs=3, **SEEDED)
        assert found.timings.cache_n == len(ids)
        assert (found.ids, found.logprobs) == (expected.ids, expected.logprobs)  # every bit


def test_a_state_of_a_recurrent_model(tmp_path: Path) -> None:
    with engine.load("pycoder-moe-mtp", n_ctx=96) as llm:
        begun = llm.complete(PROMPT, max_tokens=6, temperature=0)
        llm.save_state(tmp_path / "state")
        whole = llm.complete([*begun.prompt_ids, *begun.ids], max_tokens=6, temperature=0)
        llm.reset()
        ids = llm.load_state(tmp_path / "state")
        assert ids == (begun.prompt_ids + begun.ids)[: len(ids)]
        rest = llm.complete([*begun.prompt_ids, *begun.ids], max_tokens=6, temperature=0)
        assert rest.ids == whole.ids and rest.timings.cache_n > 0


def test_an_empty_state(llm: engine.LLM, tmp_path: Path) -> None:
    llm.reset()
    llm.save_state(tmp_path / "empty")
    llm.prefill(llm.tokenize(PROMPT))
    assert llm.load_state(tmp_path / "empty") == []
    assert llm.n_cached == llm.sequence.length == 0


def test_a_state_is_replaced_at_once_or_not_at_all(
    llm: engine.LLM, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    llm.prefill(llm.tokenize(OTHER))
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(UsageError, match="cannot be saved to .*: No space left"):
                llm.save_state(saved)
        assert saved.read_bytes() == before
        assert [*saved.parent.iterdir()] == [saved]
    llm.save_state(saved)
    assert saved.read_bytes() != before
    assert [*saved.parent.iterdir()] == [saved]


def test_ctrl_c_leaves_no_part_of_a_state(llm: engine.LLM, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.save_state(saved)
    assert [*saved.parent.iterdir()] == [saved]


def test_a_state_of_a_much_longer_context(llm: engine.LLM, saved: Path) -> None:
    state = line_of(saved)
    saved.write_text(json.dumps(state | {"tokens": [1] * 50_000}), encoding="utf-8")
    with pytest.raises(ContextError, match="more tokens than the context, 256; .*larger context .n_ctx="):
        llm.load_state(saved)


@pytest.mark.parametrize(
    "path", ["", 5, None, "no/such/folder/state", "\0", ".", BytesPath(), "no/\ud800"], ids=range(8)
)
def test_paths_that_hold_no_state(llm: engine.LLM, path: Any) -> None:
    for use in (llm.save_state, llm.load_state):
        with pytest.raises(UsageError) as caught:
            use(path)
        assert ONE_SENTENCE.fullmatch(str(caught.value)) and str(caught.value).encode()
        with pytest.raises(UsageError) as caught:
            use("x" * 10**6)
        assert len(str(caught.value)) < 300


Change = Callable[[dict[str, Any]], object]

CHANGES: dict[str, tuple[Change, str]] = {
    "format": (lambda s: s.update(format="x"), "is not a saved state"),
    "version": (lambda s: s.update(version=3, engine="9.9"), "another version of this engine .'9.9'"),
    "no version": (lambda s: s.pop("version"), "another version"),
    "arithmetic": (lambda s: s.update(arithmetic=1, engine="0.1"), "another arithmetic .by engine '0.1'."),
    "no arithmetic": (lambda s: s.pop("arithmetic"), "another arithmetic"),
    "digest": (lambda s: s["model"].update(digest="0" * 64), "another model .'Dense'"),
    "name": (lambda s: s["model"].update(name="\x1b[31m\n" * 99), "another model"),
    "no model": (lambda s: s.pop("model"), "another model"),
    "model is a list": (lambda s: s.update(model=[1]), "another model"),
    "cache": (lambda s: s["cache"].update(k="q8_0"), "type of cache .'q8_0', 'i8'. than the model has .'i8', 'i8'"),
    "cache is a list": (lambda s: s.update(cache=[[]]), "type of cache"),
    "no tokens": (lambda s: s.pop("tokens"), "damaged: its tokens"),
    "tokens are a text": (lambda s: s.update(tokens="123"), "damaged: its tokens"),
    "a negative token": (lambda s: s["tokens"].append(-1), "damaged: its tokens"),
    "a token beyond the vocabulary": (lambda s: s["tokens"].append(8192), "damaged: its tokens"),
    "a huge token": (lambda s: s["tokens"].append(10**400), "damaged: its tokens"),
    "a fraction": (lambda s: s["tokens"].append(1.0), "damaged: its tokens"),
    "true": (lambda s: s["tokens"].append(True), "damaged: its tokens"),
    "too many tokens": (
        lambda s: s.update(tokens=[1] * 257),
        "257 tokens and the context 256; .*larger context .n_ctx=",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_does_not_fit_changes_nothing(llm: engine.LLM, saved: Path, change: str) -> None:
    edit, said = CHANGES[change]
    state = line_of(saved)
    edit(state)
    saved.write_text(json.dumps(state), encoding="utf-8")
    held = llm.n_cached
    with pytest.raises((UsageError, ContextError), match=said) as caught:
        llm.load_state(saved)
    assert ONE_SENTENCE.fullmatch(str(caught.value).replace(str(saved), "")) and "\x1b" not in str(caught.value)
    assert llm.n_cached == llm.sequence.length == held


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"9" * 10_000,
        b'{"format": "bitmirror-state"}',
        b" " * 200_000,
    ],
    ids=range(9),
)
def test_files_that_are_no_states(llm: engine.LLM, tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "state"
    file.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        llm.load_state(file)
    assert "\n" not in str(caught.value)


def test_damaged_bytes_are_refused_in_a_sentence(llm: engine.LLM, saved: Path) -> None:
    data, random = saved.read_bytes(), np.random.default_rng(7)
    end = data.index(b"\n")
    for _ in range(60):
        damaged = bytearray(data)
        for at in random.integers(0, end, 3):
            damaged[at] ^= random.integers(1, 256)
        saved.write_bytes(damaged)
        with pytest.raises(EngineError):
            llm.load_state(saved)


def test_a_pipe_is_not_waited_for(llm: engine.LLM, tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("the system has no named pipes")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is not a file"):
        llm.load_state(tmp_path / "pipe")


@pytest.mark.thorough
def test_states_of_other_models_and_caches(saved: Path) -> None:
    with engine.load("pycoder-draft", n_ctx=64) as other, pytest.raises(UsageError, match="another model .'Dense'"):
        other.load_state(saved)
    with engine.load(n_ctx=64, cache_type_v="q8_0") as other, pytest.raises(UsageError, match="type of cache"):
        other.load_state(saved)


@pytest.mark.thorough
def test_the_digest_depends_on_contents_and_not_on_the_path(llm: engine.LLM, saved: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy.gguf"
    data = bytearray(Path(llm.path).read_bytes())
    copied.write_bytes(data)
    with engine.load(copied, n_ctx=64) as twin:
        assert twin.load_state(saved)
        tensor = twin.model.gguf.tensors["blk.3.ffn_up.weight"]
        at = tensor.offset
    data[at + 20] ^= 1  # one bit of a weight, as in a fine-tuned model
    copied.unlink()
    copied.write_bytes(data)
    with engine.load(copied, n_ctx=64) as other, pytest.raises(UsageError, match="another model"):
        other.load_state(saved)


# --- threads -------------------------------------------------------------------------------------------------------


def in_threads(*tasks: Callable[[], object]) -> None:
    """Run tasks at once, each in a thread of its own, and raise the first of their errors."""
    failed: list[BaseException] = []

    def run(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if failed:
        raise failed[0]


PROMPTS = [PROMPT, OTHER, "import os\n", "for i in range("]


def rows_of_passes(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of the passes that a model runs from now on."""
    rows: list[int] = []
    split, step = llm.model.split, llm.model.step

    def counted_split(tokens: np.ndarray, *given: Any) -> Any:
        rows.append(tokens.size)
        return split(tokens, *given)

    def counted_step(parts: Any) -> Any:
        rows.append(sum(len(tokens) for _, tokens in parts))
        return step(parts)

    monkeypatch.setattr(llm.model, "split", counted_split)
    monkeypatch.setattr(llm.model, "step", counted_step)
    return rows


def test_answers_of_threads_are_those_of_one_thread(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [llm.complete(prompt, **SEEDED).ids for prompt in PROMPTS]
    llm.reset()
    rows = rows_of_passes(llm, monkeypatch)
    answers: list[engine.Generation] = []
    found: dict[int, list[list[int]]] = {i: [] for i in range(len(PROMPTS))}

    def ask(i: int) -> None:
        for turn in range(3):
            if turn == 1:
                answer = llm.chat([{"role": "user", "content": PROMPTS[i]}], chat_template="chatml", **SEEDED)
            else:
                answer = llm.complete(PROMPTS[i], **SEEDED)
                found[i].append(answer.ids)
            answers.append(answer)

    in_threads(*(lambda i=i: ask(i) for i in range(len(PROMPTS))))  # type: ignore[misc]
    assert found == {i: [ids, ids] for i, ids in enumerate(alone)}
    # Every answer was computed without a break: nothing but its prompt and its tokens was read.
    assert sum(rows) == sum(a.timings.prompt_n + a.timings.predicted_n - 1 for a in answers)
    assert all(a.timings.cache_n + a.timings.prompt_n == len(a.prompt_ids) for a in answers)


def test_streams_of_threads_do_not_mix(llm: engine.LLM) -> None:
    alone = [llm.complete(prompt, **SEEDED) for prompt in PROMPTS]
    turn = threading.Barrier(len(PROMPTS))
    texts = [""] * len(PROMPTS)

    def stream(i: int) -> None:
        for n, piece in enumerate(llm.generate(PROMPTS[i], **SEEDED)):
            texts[i] += piece
            if n == 1:
                turn.wait(30)  # all answers have begun, and none holds the model while it waits

    in_threads(
        *(lambda i=i: stream(i) for i in range(len(PROMPTS))),  # type: ignore[misc]
        lambda: [llm.logits([1, 2, 3]) for _ in range(3)],
        lambda: [llm.reset() for _ in range(3)],
    )
    assert texts == [answer.text for answer in alone]


def test_an_answer_that_waits_does_not_hold_the_model(llm: engine.LLM) -> None:
    waiting = begin(llm.generate(PROMPT, **SEEDED))
    in_threads(lambda: llm.complete(OTHER, max_tokens=3))
    rest = "".join(waiting)
    assert rest and waiting.ids == llm.complete(PROMPT, **SEEDED).ids


def test_the_collector_does_not_wait_for_the_model(llm: engine.LLM) -> None:
    """An abandoned answer may be collected in any thread, also in one that holds what the user of the model waits for."""
    expected = llm.complete(PROMPT, **SEEDED).ids
    abandoned = begin(llm.generate(PROMPT, max_tokens=30, temperature=0))
    watched = weakref.ref(abandoned)
    held, collected = threading.Event(), threading.Event()

    def use() -> None:
        with llm.lock:
            held.set()
            assert collected.wait(30)
            assert llm.complete(PROMPT, **SEEDED).ids == expected

    def collect() -> None:
        nonlocal abandoned
        assert held.wait(30)
        del abandoned
        gc.collect()
        collected.set()

    in_threads(use, collect)
    assert watched() is None
    assert llm.complete(PROMPT, **SEEDED).ids == expected


def test_an_answer_is_collected_in_the_middle_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run in the thread that computes another answer; then nothing changes until the pass has ended."""
    with engine.load(n_ctx=128, parallel=2) as llm:
        expected = llm.complete(OTHER, **SEEDED).ids
        abandoned = begin(llm.generate(PROMPT, max_tokens=30, temperature=0))
        watched = weakref.ref(abandoned)
        # Its thread waits for nothing, so no step of it is in the passes below unless it is computed ahead.
        step, collected = llm.model.step, False

        def collecting(parts: Any) -> Any:
            nonlocal abandoned, collected
            if not collected:
                collected, active = True, llm.core.n_active
                del abandoned
                gc.collect()
                assert watched() is None and llm.core.n_active == active == 2
            return step(parts)

        monkeypatch.setattr(llm.model, "step", collecting)
        assert llm.complete(OTHER, **SEEDED).ids == expected
        assert collected and llm.core.n_active == 0


def test_an_answer_that_waits_is_read_again_only_when_it_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine.load(n_ctx=128) as llm:
        expected = [llm.complete(prompt, **SEEDED).ids for prompt in PROMPTS[1:]]
        long: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        whole = llm.complete(PROMPT, **long)
        waiting = begin(llm.generate(PROMPT, **long))
        rows = rows_of_passes(llm, monkeypatch)
        answers = [llm.complete(prompt, **SEEDED) for prompt in PROMPTS[1:]]
        assert [answer.ids for answer in answers] == expected
        # Besides, tokens of the answer that waits were computed ahead, before it gave its slot back.
        assert sum(rows) == AHEAD_TOKENS + sum(a.timings.prompt_n + a.timings.predicted_n - 1 for a in answers)
        rows.clear()
        list(waiting)
        assert waiting.ids == whole.ids
        assert sum(rows) <= len(whole.prompt_ids) + 39  # once


def test_slow_answers_do_not_take_the_slot_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for its next token does not lose its slot, however long that takes."""
    monkeypatch.setattr("engine.decode.preemption.PATIENCE", 1e-9)
    monkeypatch.setattr("engine.decode.running_batch.AHEAD_TOKENS", 1)
    with engine.load(n_ctx=128) as llm:
        alone = [llm.complete(prompt, **SEEDED).ids for prompt in PROMPTS]
        first = llm.generate(PROMPT, **SEEDED)
        next(first)
        request = llm.core.scheduler.batch.requests[0]
        request.asking = True  # as while another thread waits in ``EngineCore.next``
        other = threading.Thread(target=lambda: found.append(llm.complete(OTHER, **SEEDED).ids), daemon=True)
        found: list[list[int]] = []
        other.start()
        other.join(0.2)
        assert request.has_slot and not found
        list(first)
        other.join(60)
        assert first.ids == alone[0] and found == [alone[1]]


def test_closing_waits_for_a_turn() -> None:
    llm = engine.load(n_ctx=128)
    begun = threading.Event()
    answers: list[engine.Generation] = []

    def ask() -> None:
        answers.append(llm.complete(PROMPT, max_tokens=20, on_prefill=lambda *_: begun.set()))

    def end() -> None:
        assert begun.wait(30)
        llm.close()

    in_threads(ask, end)
    assert answers[0].done and len(answers[0].ids) > 0 and llm.closed
