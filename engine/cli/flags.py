"""The flags of ``python -m engine.run``, with llama.cpp's names and defaults, and what their values mean."""

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from engine.devices import check_batch_size, parse_device
from engine.errors import UsageError
from engine.speculative.params import MODES, SpeculationParams
from engine.text.chat_templates import TEMPLATES

DESCRIPTION = """\
Answers with a GGUF model. Only the answer goes to stdout; progress and reports go to stderr.

  python -m engine.run -p "def fibonacci(n):"               the bundled model continues the text
  python -m engine.run -m smollm2-135m                      a conversation
  python -m engine.run -m model.gguf -p "Why is it dark?"   one question, one answer
  git diff | python -m engine.run -m model.gguf -p - --json | jq -r .text

With -p or -f, a model that has a chat template is asked one question through it; --cnv continues
as a conversation, --no-cnv makes the model continue the bare text, which is also what a model
without a template does. Without a prompt a conversation begins, if stdin is a terminal and the
model has a template."""


MODEL = """\
path of a GGUF file, a name from `python -m engine.models` (fetched when needed), or
hf:owner/repo/file.gguf; default: the bundled model"""

CACHE_RAM = """\
MiB of host memory for the states of recurrent models at the ends of messages, so that a
conversation can resume there; -1 = up to 2048, less if memory is short"""

DEVICE = """\
cpu (or none), cuda, cuda:1 and so on, or auto: the first usable GPU, or the CPU if there is none;
the answer is the same"""

BATCH_SIZE = """\
tokens of a prompt read per pass; 0 = 1024 on a GPU, less if memory is short, and 128 on the CPU;
the answer is the same"""

DRAFT_MODEL = """\
a smaller model with the same vocabulary that drafts tokens for this one, named as for -m; the
answer is the same, but faster"""

DRAFT_LOOKUP = """\
draft what followed the last occurrence of the latest tokens in prompt or answer; a draft model, if
there is one, drafts where nothing is found"""

DRAFT_MAX = """\
most drafts per pass, at most 15; 0 = 4 from a draft model or the model's own layer, 7 from lookup.
Fewer are made, or none, where they would cost more time than they save"""

SPEC_ACCEPT = """\
exact: the text is the same as without drafts; ratio: another text from the same distribution;
p-min: drafts with a probability of at least --spec-p-min are kept, which changes the distribution"""

JSON = """\
print one JSON object instead of the text: model, prompt, prompt_ids, ids, text, finish_reason,
logprobs, seed, timings, speculation"""

EPILOG = """\
Exit status: 0 answered, 2 user error (one sentence on stderr says what to do), 130 interrupted by
Ctrl-C, 1 a bug. `python -m engine.models` lists the named models."""


CACHE_TYPES = ("f32", "f16", "q8_0", "q4_0")
"""The names in ``engine/cache/types.py``, repeated here because importing it is slow and a wrong command line needs none."""


class Parser(argparse.ArgumentParser):
    """argparse that raises its complaints as a UsageError, and accepts values that begin with a dash."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists every flag)")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses like argparse, but ``-p --x`` means the prompt ``--x``, as it does in llama.cpp."""
        rest, joined = list(args if args is not None else sys.argv[1:]), []
        while rest:
            word = rest.pop(0)
            action = self._option_string_actions.get(word)
            if action is not None and action.nargs is None and rest:
                joined.append(f"{action.option_strings[-1]}={rest.pop(0)}")
            elif action is None and word.partition("=")[0] not in self._option_string_actions:
                raise UsageError(self._unknown(word))
            else:
                joined.append(word)
        return super().parse_args(joined, namespace)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}: give the model with -m and the prompt, in quotes, with -p"
        near = difflib.get_close_matches(word, self._option_string_actions, n=1)
        return f"unknown flag {word}: " + (f"did you mean {near[0]}?" if near else "--help lists every flag")


class Document(argparse.RawDescriptionHelpFormatter):
    """Help that shows the value of a flag once (``-n, --predict N``) and every default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=98)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join(action.option_strings) + value

    def _get_help_string(self, action: argparse.Action) -> str:
        silent = isinstance(action.default, bool) or action.default in (None, "", [], argparse.SUPPRESS)
        return (action.help or "") + ("" if silent else " (default %(default)s)")


def whole(text: str) -> int:
    """The value of an integer flag."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def real(text: str) -> float:
    """The value of a real flag; infinities and NaN are refused."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def bias(text: str) -> tuple[int, float]:
    """``TOKEN_ID(+/-)BIAS``, as in ``15043+1`` or ``2-inf``."""
    match = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|inf))", text.replace(" ", ""))
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID+BIAS or TOKEN_ID-BIAS, as in 15043-1")
    return int(match[1]), float(match[2])


def parser() -> Parser:
    """The command line as an argparse parser; building it imports nothing that is slow to import."""
    top = Parser(
        prog="python -m engine.run",
        usage="python -m engine.run [-m MODEL] [-p TEXT | -f FILE] [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Document,
        allow_abbrev=False,
        add_help=False,
    )
    n: dict[str, Any] = {"type": whole, "metavar": "N"}
    x: dict[str, Any] = {"type": real, "metavar": "X"}
    text: dict[str, Any] = {"metavar": "TEXT"}
    yes: dict[str, Any] = {"action": "store_true"}
    many: dict[str, Any] = {"action": "append", "default": []}

    add = top.add_argument_group("model").add_argument
    add("-m", "--model", metavar="MODEL", default=None, help=MODEL)
    add("-c", "--ctx-size", **n, default=0, help="context in tokens; 0 = as trained, less if memory is short")
    add("-b", "--batch-size", **n, default=0, help=BATCH_SIZE)
    types: dict[str, Any] = {"choices": CACHE_TYPES, "metavar": "TYPE"}
    add("--cache-type", **types, default="f16", help="type of the key-value cache: f32, f16, q8_0 or q4_0")
    add("-ctk", "--cache-type-k", **types, help="type of the keys, if different")
    add("-ctv", "--cache-type-v", **types, help="type of the values, if different")
    add("-cram", "--cache-ram", **n, default=-1, help=CACHE_RAM)
    add("-t", "--threads", **n, default=0, help="CPU threads; 0 = every core")
    add("-dev", "--device", metavar="NAME", default="auto", help=DEVICE)
    add("--list-devices", **yes, help="print the devices of this machine and exit")
    add("--no-warmup", **yes, help="compile each kernel on first use, not all before the prompt")

    add = top.add_argument_group("prompt").add_argument
    add("-p", "--prompt", **text, help="the prompt; - reads it from stdin")
    add("-f", "--file", metavar="FILE", help="a file with the prompt; one line break at its end is dropped")
    add(
        "-e",
        "--escape",
        **yes,
        default=True,
        help="interpret \\n \\t \\r \\' \\\" \\\\ \\xHH in -p and --stop (the default)",
    )
    add("--no-escape", dest="escape", action="store_false", help="do not interpret backslash escapes")
    add("-sys", "--sys", "--system-prompt", **text, dest="system", help="the system prompt")
    add("-cnv", "--cnv", "--conversation", **yes, dest="cnv", help="start a conversation, even after -p")
    add(
        "-no-cnv", "--no-cnv", "--no-conversation", **yes, dest="no_cnv", help="use no template: continue the bare text"
    )
    add("--chat-template", metavar="NAME", help=f"{', '.join(TEMPLATES)}, or a Jinja file")

    add = top.add_argument_group("answer").add_argument
    add("-n", "--predict", "--n-predict", **n, default=-1, help="tokens to generate; -1 = until the context is full")
    add("-r", "--stop", "--reverse-prompt", **text, **many, dest="stop", help="end before this text; may be repeated")
    add("--ignore-eos", **yes, help="continue after the model's end of text")
    add("--no-heal", **yes, help="disable token healing, which may replace the last token of a bare text")
    add("--logprobs", **n, default=0, help="also report log-probabilities: of each token and the N likeliest")
    add("--json", **yes, help=JSON)

    add = top.add_argument_group("sampling").add_argument
    add("-s", "--seed", **n, default=-1, help="the same seed gives the same text; -1 = a random one")
    add("--temp", "--temperature", **x, default=0.8, help="temperature; 0 = always the likeliest token")
    add("--top-k", **n, default=40, help="keep the N likeliest tokens; 0 = all")
    add("--top-p", **x, default=0.95, help="keep the likeliest tokens that add up to X; 1 = all")
    add("--min-p", **x, default=0.05, help="drop tokens below X times the likeliest; 0 = none")
    add("--typical", "--typical-p", **x, default=1.0, help="locally typical sampling; 1 = off")
    add("--repeat-penalty", **x, default=1.0, help="make recent tokens less likely; 1 = off")
    add("--repeat-last-n", **n, default=64, help="number of recent tokens to penalize; 0 = none, -1 = all")
    add("--presence-penalty", **x, default=0.0, help="subtracted from the logits of recent tokens; 0 = off")
    add("--frequency-penalty", **x, default=0.0, help="subtracted once per occurrence of a recent token; 0 = off")
    add("-l", "--logit-bias", **many, type=bias, metavar="ID+X", help="15043+1, 15043-1, 2-inf; may be repeated")

    add = top.add_argument_group("speculation").add_argument
    add("-md", "--draft-model", "--model-draft", metavar="MODEL", default="", dest="draft_model", help=DRAFT_MODEL)
    add("-devd", "--device-draft", metavar="NAME", default="", help="device of the draft model; default: the same")
    add(
        "--no-mtp",
        **yes,
        help="do not draft with the model's own layer for it, if there is one (multi-token prediction)",
    )
    add("--draft-lookup", **yes, help=DRAFT_LOOKUP)
    add("--draft-max", **n, default=0, help=DRAFT_MAX)
    add("--draft-min", **n, default=0, help="do not verify fewer than N drafts")
    add("--draft-p-min", **x, default=0.0, help="stop drafting at a token less likely than X")
    add("--spec-accept", choices=MODES, metavar="HOW", default="exact", help=SPEC_ACCEPT)
    add("--spec-p-min", **x, default=0.3, help="the probability of --spec-accept p-min")
    add("--spec-sequential-verify", **yes, help="verify drafts one by one, not in one pass: slow, for debugging")
    add("--no-spec", **yes, help="no drafts, whatever the other flags say")

    add = top.add_argument_group("other").add_argument
    add("-v", "--verbose", **yes, help="print more, and show the traceback of an error")
    add("--version", **yes, help="print the version and exit")
    add("-h", "--help", action="help", help="print this help and exit")
    return top


def check(args: argparse.Namespace, prompt: str | None) -> None:
    """Refuses flags that contradict one another, before anything slow starts; raises UsageError."""
    if args.cnv and (args.no_cnv or args.json):
        raise UsageError(
            f"--cnv and {'--no-cnv' if args.no_cnv else '--json'} are mutually exclusive: give only one of them"
        )
    if args.no_cnv and (args.system is not None or args.chat_template is not None):
        raise UsageError("--no-cnv uses no chat template: leave out --sys and --chat-template, or leave out --no-cnv")
    if prompt is None and not args.cnv and (args.no_cnv or args.json or not sys.stdin.isatty()):
        raise UsageError("there is no prompt: give one with -p TEXT, with -f FILE, or with -p - on stdin")
    for name, value, least in (
        ("-c", args.ctx_size, 0),
        ("-n", args.predict, -2),
        ("--logprobs", args.logprobs, 0),
        ("--cache-ram", args.cache_ram, -1),
    ):
        if value < least:
            raise UsageError(f"{name} {value} is too small: the least is {least}")
    check_batch_size(args.batch_size)
    parse_device(args.device)
    if args.device_draft:
        if not args.draft_model:
            raise UsageError("--device-draft is the device of a draft model: give one with --draft-model")
        parse_device(args.device_draft)
    speculation_params(args)


def speculation_params(args: argparse.Namespace) -> SpeculationParams:
    """The parameters of speculation that the flags set; raises UsageError for a value out of range."""
    return SpeculationParams(
        enabled=not args.no_spec,
        lookup=args.draft_lookup,
        draft_max=args.draft_max,
        draft_min=args.draft_min,
        draft_p_min=args.draft_p_min,
        accept=args.spec_accept,
        accept_p_min=args.spec_p_min,
        sequential=args.spec_sequential_verify,
    )


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of ``LLM.generate``; a random seed is chosen here, so that a report can name it."""
    biases: dict[int, float] = {}
    for token, value in args.logit_bias:
        biases[token] = biases.get(token, 0.0) + value
    return {
        "max_tokens": max(args.predict, -1),  # llama.cpp's -2, until the context is full, is -1 here
        "temperature": max(args.temp, 0.0),
        "top_k": max(args.top_k, 0),
        "top_p": args.top_p,
        "min_p": args.min_p,
        "typical_p": args.typical,
        "repeat_penalty": args.repeat_penalty,
        "repeat_last_n": args.repeat_last_n,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "logit_bias": biases,
        # 4294967295 is llama.cpp's other name for a random seed.
        "seed": int.from_bytes(os.urandom(4), "little") if args.seed in (-1, 2**32 - 1) else args.seed,
        "stop": [unescape(text) if args.escape else valid(text) for text in args.stop],
        "ignore_eos": args.ignore_eos,
        "heal": not args.no_heal,
        "logprobs": args.logprobs,
        "speculation": speculation_params(args),
    }


_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}


def unescape(text: str) -> str:
    """Text with its backslash escapes interpreted as in llama.cpp; an unknown escape stays as it is written."""

    def replace(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        return bytes.fromhex(escape[1:].decode()) if escape[:1] == b"x" else _ESCAPES[escape]

    data = re.sub(rb"\\(x[0-9a-fA-F]{2}|[nrt'\"\\])", replace, text.encode("utf-8", "surrogateescape"))
    return valid(data.decode("utf-8", "surrogateescape"))


def valid(text: str) -> str:
    """The text itself; raises UsageError if it is not Unicode (bytes of another encoding, or a cut ``\\xHH``)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"the text given is not UTF-8 (after {text[: error.start][-20:]!r})") from error
    return text
