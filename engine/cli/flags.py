"""The flags of ``bitmirror run``, with llama.cpp's names and defaults, and what their values mean."""

import argparse
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from engine.checks import shown
from engine.cli import llama_cpp, model_flags, shared
from engine.cli.model_flags import speculation_params
from engine.cli.parser import Parser, filled, real, whole
from engine.cli.sampling import Given
from engine.cli.sampling_flags import add_sampling
from engine.cli.texts import read_text, unescape, valid
from engine.devices import parse_device
from engine.errors import UsageError
from engine.hub.resolve import names_model
from engine.text.template.builtin import TEMPLATES

USAGE = """\
%(prog)s [-m MODEL] ["PROMPT" | -p TEXT | -f FILE] [flags]    one answer
       %(prog)s [-m MODEL] --cnv [flags]                             a conversation
       COMMAND | %(prog)s [-m MODEL] [flags]                         the prompt is piped"""

DESCRIPTION = """\
Runs a GGUF model. Only the answer goes to stdout; progress and reports go to stderr.

  bitmirror run "def fibonacci(n):"                     the bundled model continues the text
  bitmirror run -m smollm2-135m                         a conversation
  bitmirror run -m model.gguf "Why is the sky blue?"    one question, one answer
  git diff | bitmirror run -m model.gguf --json | jq -r .text

If the model has a chat template, the prompt is a message that it answers: --cnv continues with a
conversation, and --no-cnv makes the model continue the bare text instead. A model without a
template always continues the bare text. Without a prompt, a conversation begins if stdin is a
terminal; otherwise the prompt is read from stdin."""

CHAT_USAGE = """\
%(prog)s [-m MODEL] [flags]                 a conversation
       %(prog)s [-m MODEL] "MESSAGE" [flags]       one that begins with this message"""

CHAT_DESCRIPTION = """\
Holds a conversation with a GGUF model. Type a message and press Enter; /help lists the commands,
Ctrl-C ends an answer, Ctrl-D the conversation. Without -m, the model is smollm2-135m, which is
downloaded if you agree. A model without a chat template continues each text that you enter.

  bitmirror chat                                        the default model
  bitmirror chat -m model.gguf --sys "Answer briefly."  a file, and a system prompt
  bitmirror chat -c 4096 --seed 1 --temp 0.5            another context, seed and temperature"""

CHAT_MODEL = """\
path of a GGUF file, a name from `bitmirror models` (downloaded when needed), or
hf:owner/repo:Q4_K_M for a file on Hugging Face; default: smollm2-135m, or the bundled model if you
refuse the download"""

PREDICT = """\
maximum number of tokens to generate; -1 = until the context is full. By default an answer ends when
the model ends it, and a bare text without a grammar also ends at two blank lines or after 256 tokens"""

JSON_SCHEMA = """\
the answer is JSON in one line that follows this schema: a file, or JSON text, which begins with {"""

GRAMMAR = """\
a file with a grammar of the answer, in llguidance's variant of Lark; its rule start is the whole
answer"""

DRY_SEQUENCE_BREAKER = """\
text beyond which DRY does not follow repetitions; may be repeated; replaces the default: line break,
colon, quotation mark and asterisk; none = no such text"""

JSON = """\
print one JSON object instead of the text: model, prompt, prompt_ids, ids, text, finish_reason, seed,
sampling, logprobs (if requested), timings, speculation (if there were drafts)"""

RECEIPT = """\
write a receipt of the answer, which `bitmirror verify` replays"""

SAMPLING = """\
What the model's file recommends replaces a default, but no flag; --verbose shows what is used."""

EPILOG = """\
Exit status: 0 answered, 2 user error (one sentence on stderr says what to do), 130 interrupted by
Ctrl-C, 1 a bug. `bitmirror models` lists the named models. For most other flags of llama.cpp, an
error message says what to use instead."""

CHAT_EPILOG = """\
Exit status: 0 ended by /quit, Ctrl-D or the end of stdin, 2 user error (one sentence on stderr says
what to do), 130 ended by Ctrl-C, 1 a bug. `bitmirror models` lists the named models."""


def bias(text: str) -> tuple[int, float]:
    """``TOKEN_ID(+/-)BIAS``, as in ``15043+1`` or ``2-inf``."""
    match = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|inf))", text.replace(" ", ""))
    if match is None:
        raise argparse.ArgumentTypeError(f"must be TOKEN_ID+BIAS or TOKEN_ID-BIAS, as in 15043-1, not {text!r}")
    return int(match[1]), float(match[2])


def parser(prog: str = "bitmirror run") -> Parser:
    """The command line as an argparse parser; building it imports nothing that is slow to import."""
    chat = prog.endswith("chat")
    top = Parser(
        prog,
        usage=CHAT_USAGE if chat else USAGE,
        description=CHAT_DESCRIPTION if chat else DESCRIPTION,
        epilog=CHAT_EPILOG if chat else EPILOG,
        foreign=llama_cpp.RUN,
        positional="write the prompt in quotes, and name the model with -m",
        finish=settle,
    )
    text: dict[str, Any] = {"metavar": "TEXT"}
    yes: dict[str, Any] = {"action": "store_true"}
    many: dict[str, Any] = {"action": "append", "default": []}

    def n(least: int, most: int | None = None, note: str = "") -> dict[str, Any]:
        return {"metavar": "N", "type": whole(least, most, note)}

    def x(least: float | None = None, most: float | None = None, **more: Any) -> dict[str, Any]:
        return {"metavar": "X", "type": real(least, most, **more)}

    def unless_chat(text: str) -> str:
        """The help of a flag that a conversation has no use for."""
        return argparse.SUPPRESS if chat else text

    model_flags.add_model(top, CHAT_MODEL if chat else f"{shared.MODEL}, or smollm2-135m for a conversation")
    group = top.add_argument_group("prompt")
    add = group.add_argument
    what, reads = ("first message", "") if chat else ("prompt", "; - reads it from stdin")
    top.add_positional(
        "words", metavar='"MESSAGE"' if chat else '"PROMPT"', help=f"the {what}, as with -p", group=group
    )
    add("-p", "--prompt", **text, help=f"the {what}{reads}")
    add("-f", "--file", metavar="FILE", help=f"a file that contains the {what}; one line break at its end is removed")
    add(
        "-e",
        "--escape",
        **yes,
        default=True,
        help=f"interpret \\n \\t \\r \\' \\\" \\\\ \\xHH in the {what} and in --stop (the default)",
    )
    add("--no-escape", dest="escape", action="store_false", help="do not interpret backslash escapes")
    add("-sys", "--sys", "--system-prompt", **text, dest="system", help="the system prompt")
    add("-sysf", "--system-prompt-file", metavar="FILE", help="a file that contains the system prompt")
    begin = unless_chat("start a conversation, even after a prompt")
    add("-cnv", "--cnv", "--conversation", **yes, dest="cnv", help=begin)
    bare = unless_chat("use no template: continue the bare text")
    add("-no-cnv", "--no-cnv", "--no-conversation", **yes, dest="no_cnv", help=bare)
    add("-st", "--single-turn", **yes, help=f"answer one message and exit; without a {what}, ask for the message")
    add("--chat-template", metavar="NAME", help=f"the chat template: {', '.join(TEMPLATES)}, or a Jinja file")
    add("--chat-template-file", metavar="FILE", help="a Jinja file with the chat template")

    add = top.add_argument_group("answer").add_argument
    add(
        "-n",
        "--predict",
        "--n-predict",
        **n(-2, note="-1 generates until the context is full"),
        help=PREDICT,
    )
    add("-r", "--stop", "--reverse-prompt", **text, **many, dest="stop", help="end before this text; may be repeated")
    add("--ignore-eos", **yes, help="never end the answer with an end-of-generation token")
    add("-j", "--json-schema", metavar="SCHEMA", help=JSON_SCHEMA)
    add("--regex", **text, help="the answer matches this regular expression, from its beginning to its end")
    add("--grammar", metavar="FILE", help=GRAMMAR)
    add("--no-heal", **yes, help="disable token healing, which may replace the last token of a bare text")
    likely = unless_chat("also report log-probabilities: of each token and the N likeliest")
    add("--logprobs", **n(0), default=0, help=likely)
    add("--json", **yes, help=unless_chat(JSON))
    add("--receipt", metavar="FILE", type=filled("name the file to write"), help=unless_chat(RECEIPT))

    add = partial(top.add_argument_group("sampling", SAMPLING).add_argument, action=Given)
    seeds = n(-1, 2**64 - 1, note="-1 chooses one at random")
    add("-s", "--seed", **seeds, default=-1, help="the same seed gives the same text; -1 = a random one")
    add_sampling(add)
    add("--dry-sequence-breaker", **text, **many, help=DRY_SEQUENCE_BREAKER)
    add(
        "-l",
        "--logit-bias",
        **many,
        type=bias,
        metavar="ID+X",
        help="add X to the logit of a token, as in 15043+1, 15043-1 or 2-inf (never); may be repeated",
    )

    model_flags.add_speculation(top)
    group = top.add_argument_group("other")
    group.add_argument("--version", **yes, help="print the version and exit")
    shared.add_other(group, "print more, and show the traceback of an error")
    return top


def settle(args: argparse.Namespace) -> None:
    """Combines the flags that have one meaning; raises UsageError if they contradict one another."""
    shared.settle_model(args)
    shared.settle_device(args)
    given = [
        name for name, value in (("PROMPT", args.words), ("-p", args.prompt), ("-f", args.file)) if value is not None
    ]
    if len(given) > 1 and args.file == "-":
        given.remove("-f")  # what is piped comes before the prompt
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are both given: give the prompt once")
    if args.words is not None:
        if args.model is None and names_model(args.words):
            name = shown(args.words)
            raise UsageError(
                f"{name} is a model, not a prompt: did you mean -m {name}? (-p {name} continues this text)"
            )
        args.prompt = args.words
    if args.single_turn:
        args.cnv = False
    if args.system_prompt_file is not None:
        if args.system is not None:
            raise UsageError("--sys and --system-prompt-file are both given: use only one of them")
        args.system = read_text(args.system_prompt_file, "system prompt")
    if args.chat_template_file is not None:
        if args.chat_template is not None:
            raise UsageError("--chat-template and --chat-template-file are both given: use only one of them")
        # With a folder, a name is never that of a built-in template.
        args.chat_template = os.path.abspath(args.chat_template_file)


def check(args: argparse.Namespace, prompt: str | None) -> None:
    """Rejects flags that contradict one another, before anything slow starts; raises UsageError."""
    if args.cnv and (args.no_cnv or args.json):
        raise UsageError(f"{'--no-cnv' if args.no_cnv else '--json'} is not for a conversation: leave it out")
    if args.no_cnv and (args.system is not None or args.chat_template is not None):
        raise UsageError(
            "--no-cnv disables the chat template: leave out --sys and --chat-template, or leave out --no-cnv"
        )
    if prompt is None and (args.no_cnv or args.json):
        raise UsageError(
            f"{'--no-cnv' if args.no_cnv else '--json'} needs a prompt: write it in quotes, or give -p or -f"
        )
    if args.logprobs and (args.cnv or prompt is None):
        raise UsageError(
            "--logprobs is for one answer, not for a conversation: leave it out, or give a prompt without --cnv"
        )
    if args.receipt is not None:
        if args.cnv or prompt is None:
            raise UsageError(
                "--receipt is for one answer, not for a conversation: leave it out, or give a prompt without --cnv"
            )
        if not (folder := Path(args.receipt).expanduser().parent).is_dir():
            raise UsageError(f"{folder} is no folder: name another file with --receipt")
    if args.device_draft:
        if not args.draft_model:
            raise UsageError("--device-draft needs a draft model: give one with --draft-model")
        parse_device(args.device_draft)
    speculation_params(args)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of ``LLM.generate``; a random seed is chosen here, so that a report can name it."""
    biases: dict[int, float] = {}
    for token, value in args.logit_bias:
        biases[token] = biases.get(token, 0.0) + value
    return {
        "max_tokens": -1 if args.predict is None else max(args.predict, -1),  # -2 is llama.cpp's other name for -1
        "temperature": args.temp,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "typical_p": args.typical,
        "repeat_penalty": args.repeat_penalty,
        "repeat_last_n": args.repeat_last_n,
        "presence_penalty": args.presence_penalty,
        "frequency_penalty": args.frequency_penalty,
        "logit_bias": biases,
        "dry_multiplier": args.dry_multiplier,
        "dry_base": args.dry_base,
        "dry_allowed_length": args.dry_allowed_length,
        "dry_penalty_last_n": args.dry_penalty_last_n,
        **_breakers(args),
        "xtc_probability": args.xtc_probability,
        "xtc_threshold": args.xtc_threshold,
        # 4294967295 is llama.cpp's other name for a random seed.
        "seed": int.from_bytes(os.urandom(4), "little") if args.seed in (-1, 2**32 - 1) else args.seed,
        "stop": [unescape(text) if args.escape else valid(text) for text in args.stop],
        "ignore_eos": args.ignore_eos,
        "heal": not args.no_heal,
        "logprobs": args.logprobs,
        "speculation": speculation_params(args),
    }


def _breakers(args: argparse.Namespace) -> dict[str, list[str]]:
    """The breakers of DRY, if there are flags for them: those after the last "none"."""
    texts = args.dry_sequence_breaker
    if not texts:
        return {}
    given = texts[len(texts) - texts[::-1].index("none") :] if "none" in texts else texts
    return {"dry_sequence_breakers": [unescape(text) if args.escape else valid(text) for text in given]}
