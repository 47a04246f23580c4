"""The flags: names, defaults, values, and that every mistake in them is reported in one sentence."""

import ast
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.flags import check, generation_options, parser, speculation_params
from engine.cli.texts import unescape
from engine.errors import UsageError
from engine.speculative.params import SpeculationParams
from tests.conftest import REPOSITORY


def test_defaults_are_those_of_llama_cpp() -> None:
    args = vars(parser().parse_args([]))
    expected: dict[str, object] = {
        "predict": None,
        "ctx_size": 0,
        "temp": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "typical": 1.0,
    }
    expected |= {"repeat_penalty": 1.0, "repeat_last_n": 64, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    expected |= {"dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1}
    expected |= {"dry_sequence_breaker": [], "xtc_probability": 0.0, "xtc_threshold": 0.1}
    expected |= {"seed": -1, "escape": True, "ignore_eos": False, "stop": [], "logit_bias": [], "cache_type": None}
    expected |= {"device": "auto", "threads": 0}
    assert {name: args[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("names", "value", "field", "meaning"),
    [
        ("-m --model", "a.gguf", "model", "a.gguf"),
        ("-p --prompt", "--not-a-flag", "prompt", "--not-a-flag"),
        ("-f --file", "-", "file", "-"),
        ("-n --predict --n-predict", "-1", "predict", -1),
        ("-c --ctx-size", "4096", "ctx_size", 4096),
        ("-b --batch-size", "512", "batch_size", 512),
        ("-t --threads", "3", "threads", 3),
        ("-s --seed", "42", "seed", 42),
        ("--temp --temperature", "1e-1", "temp", 0.1),
        ("--top-k", "0", "top_k", 0),
        ("--typical --typical-p", ".5", "typical", 0.5),
        ("-r --stop --reverse-prompt", "-", "stop", ["-"]),
        ("-l --logit-bias", "15043+1.5", "logit_bias", [(15043, 1.5)]),
        ("-l --logit-bias", "2-inf", "logit_bias", [(2, -float("inf"))]),
        ("--dry-multiplier", "0.8", "dry_multiplier", 0.8),
        ("--dry-base", "1.5", "dry_base", 1.5),
        ("--dry-allowed-length", "3", "dry_allowed_length", 3),
        ("--dry-penalty-last-n", "-1", "dry_penalty_last_n", -1),
        ("--dry-sequence-breaker", "-x", "dry_sequence_breaker", ["-x"]),
        ("--xtc-probability", "0.5", "xtc_probability", 0.5),
        ("--xtc-threshold", "0.2", "xtc_threshold", 0.2),
        ("-sys --sys --system-prompt", "-s", "system", "-s"),
        ("-dev --device", "cuda:1", "device", "cuda:1"),
        ("--cache-type", "f32", "cache_type", "f32"),
        ("--chat-template", "chatml", "chat_template", "chatml"),
        ("--logprobs", "5", "logprobs", 5),
        ("-md --draft-model --model-draft", "small.gguf", "draft_model", "small.gguf"),
        ("-devd --device-draft", "cuda:1", "device_draft", "cuda:1"),
        ("--gpu-memory", "800M", "gpu_memory", 800 << 20),
        ("--draft-max", "7", "draft_max", 7),
        ("--draft-min", "2", "draft_min", 2),
        ("--draft-p-min", "0.5", "draft_p_min", 0.5),
        ("--spec-accept", "p-min", "spec_accept", "p-min"),
        ("--spec-p-min", "0.25", "spec_p_min", 0.25),
    ],
)
def test_every_name_of_a_flag(names: str, value: str, field: str, meaning: object) -> None:
    for name in names.split():
        assert getattr(parser().parse_args([name, value]), field) == meaning
        assert getattr(parser().parse_args([f"{name}={value}"]), field) == meaning


@pytest.mark.parametrize(
    ("names", "field", "meaning"),
    [
        ("-cnv --cnv --conversation", "cnv", True),
        ("-no-cnv --no-cnv --no-conversation", "no_cnv", True),
        ("-e --escape", "escape", True),
        ("--no-escape", "escape", False),
        ("--ignore-eos", "ignore_eos", True),
        ("--json", "json", True),
        ("--no-warmup", "no_warmup", True),
        ("--ds4-rounding", "ds4_rounding", True),
        ("--list-devices", "list_devices", True),
        ("-v --verbose", "verbose", True),
        ("--draft-lookup", "draft_lookup", True),
        ("--spec-sequential-verify", "spec_sequential_verify", True),
        ("--no-spec", "no_spec", True),
    ],
)
def test_every_name_of_a_switch(names: str, field: str, meaning: bool) -> None:
    for name in names.split():
        assert getattr(parser().parse_args([name]), field) is meaning


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--tmep", "1"], "did you mean --temp?"),
        (["-temp", "1"], "did you mean --temp?"),
        (["--n", "1"], "did you mean -n?"),
        (["--samplrs", "x"], "unknown flag --samplrs: --help lists every flag"),
        (["--top-x", "1"], "unknown flag --top-x: --help lists every flag"),  # --top-k or --top-p
        (["-ngk", "1"], "unknown flag -ngk: --help lists every flag"),
        (["Why", "is", "it"], "unexpected argument 'it': write the prompt in quotes"),
        (["Why?", "-p", "What?"], "PROMPT and -p are both given"),
        (["-p", "What?", "-f", "file"], "-p and -f are both given"),
        (["-m", ""], "-m is empty"),
        (["-m", "x", "-hf", "a/b"], "-m and -hf are both given"),
        (["-hff", "b.gguf"], "-hf"),
        (["-ngl", "0", "--device", "cuda:1"], "use only one"),
        (["-ngl", "some"], "-ngl must be 0, all, auto or a number of layers, not 'some'"),
        (["--sys", "a", "-sysf", "b"], "--sys and --system-prompt-file are both given"),
        (["-sysf", "/no/such/file"], "/no/such/file: No such file"),
        (["--chat-template", "a", "--chat-template-file", "b"], "are both given"),
        (["-n", "many"], "-n must be a whole number, not 'many'"),
        (["-n", "1.5"], "-n must be a whole number, not '1.5'"),
        (["--temp", "nan"], "--temp must be a number, not 'nan'"),
        (["--top-p", "inf"], "--top-p must be a number, not 'inf'"),
        (["-l", "15043*2"], "TOKEN_ID"),
        (["-l", "15043+nan"], "TOKEN_ID"),
        (["--cache-type", "q5_0"], "--cache-type must be f32, f16, q8_0, q4_0, i12 or i8, not 'q5_0'"),
        (["--spec-accept", "always"], "--spec-accept must be exact, ratio or p-min, not 'always'"),
        (["--draft-max", "x"], "--draft-max must be a whole number, not 'x'"),
        (["-p"], "-p needs a value: -p TEXT"),
        (["--json=yes"], "--json takes no value"),
    ],
)
def test_a_wrong_flag_is_one_sentence(words: list[str], hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parser().parse_args(words)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "breakers"),
    [
        ([], None),  # the default of LLM.generate
        ([r"\n"], ["\n"]),
        (["a", r"\t", "none of it"], ["a", "\t", "none of it"]),
        (["none"], []),
        (["a", "none"], []),
        (["none", "b", "c"], ["b", "c"]),
        (["none", "b", "none", "c"], ["c"]),
    ],
)
def test_breakers_replace_the_default(words: list[str], breakers: list[str] | None) -> None:
    args = parser().parse_args([part for word in words for part in ("--dry-sequence-breaker", word)])
    assert generation_options(args).get("dry_sequence_breakers") == breakers


def test_breakers_without_escapes() -> None:
    args = parser().parse_args(["--no-escape", "--dry-sequence-breaker", r"\n"])
    assert generation_options(args)["dry_sequence_breakers"] == [r"\n"]


def test_without_flags_an_answer_is_drafted_by_nothing_but_a_draft_model() -> None:
    assert speculation_params(parser().parse_args([])) == SpeculationParams()
    assert not SpeculationParams().lookup
    assert SpeculationParams().accept == "exact"


ESCAPABLE = st.one_of(
    st.sampled_from([r"\n", r"\t", r"\r", r"\'", r"\"", r"\\"]),
    st.integers(0, 127).map("\\x{:02x}".format),
    st.characters(exclude_characters="\\\"'\n\r\x00", exclude_categories=["Cs"]),
)


@given(st.lists(ESCAPABLE).map("".join))
def test_escapes_mean_what_they_mean_in_python(text: str) -> None:
    assert unescape(text) == ast.literal_eval(f'"{text}"')


def test_other_escapes_stay_as_they_are() -> None:
    # As string_process_escapes of llama.cpp.
    assert unescape(r"\d\x4 \xzz \q\ ") == r"\d\x4 \xzz \q\ "
    assert unescape("end\\") == "end\\"
    assert unescape(r"\xc3\xa9") == "é"
    with pytest.raises(UsageError, match="UTF-8"):
        unescape(r"\xc3")
    with pytest.raises(UsageError, match="UTF-8"):
        unescape("\udcff")


def test_help_is_complete_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom engine.run import main\ntry:\n main(['--help'])\nexcept SystemExit as e:\n assert e.code == 0\n"
        "assert main(['--nope']) == 2 and main(['--version']) == 0\n"
        "assert not {'numba', 'numpy', 'rich', 'jinja2', 'tokenizers'} & set(sys.modules), set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for action in parser()._actions:
        assert all(name in done.stdout for name in action.option_strings)
        assert action.help
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_the_help_of_a_chat_has_its_flags_only() -> None:
    """A flag that a conversation refuses is not in its help, and is still refused with a sentence."""
    text, run = parser("bitmirror chat").format_help(), parser().format_help()
    for name, values in (("--json", []), ("--no-cnv", []), ("--logprobs", ["2"])):
        assert name in run and not re.search(rf"{name}\b(?!-)", text)
        with pytest.raises(UsageError, match=f"^{name} is "):
            check(parser("bitmirror chat").parse_args(["--cnv", name, *values]), None)
    assert "the first message" in text and "the prompt;" not in text and "the prompt;" in run
    assert max(map(len, text.splitlines())) <= 100
