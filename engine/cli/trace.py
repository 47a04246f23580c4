"""``bitmirror trace``: one token on its way through the layers."""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import entry, shared
from engine.cli.model_flags import DEVICE, DRAFT_MODEL
from engine.cli.parser import Parser, filled, whole
from engine.cli.terminal import printable
from engine.cli.texts import unescape, valid
from engine.devices import begin_gpu
from engine.errors import UsageError
from engine.limits import MOST_DRAFTS

if TYPE_CHECKING:
    from engine.llm import LLM

USAGE = "%(prog)s PROMPT [flags]"

DESCRIPTION = """\
Follows one token of a text through the layers of a model: what the model would say after each layer,
which earlier tokens each head of attention gives most weight, which experts are chosen, and which
drafts after the token are kept. All numbers are those of the pass that computes the logits."""

EPILOG = """\
examples:
  bitmirror trace "def add(a, b):\\n    return"
  bitmirror trace -m model.gguf --chat "What is the capital of France?"
  bitmirror trace -m model.gguf --token 3 --json - "The sky is blue" | jq .layers[-1].lens

Exit status: 0 shown, 2 user error (one sentence on stderr says what to do), 130 interrupted by Ctrl-C,
1 a bug."""

CHAT = """\
read the prompt as a message in the model's chat template, up to the beginning of the answer; otherwise it is
read as it is"""

TOKEN = """\
number of the token, from 0; negative numbers count from the end. What follows it is not read"""

MOST_TOP = 100
"""The most tokens that the lens lists."""


def parser(prog: str = "bitmirror trace") -> Parser:
    """The command line as an argparse parser."""
    top = Parser(prog, usage=USAGE, description=DESCRIPTION, epilog=EPILOG, finish=shared.settle_model)
    group = top.add_argument_group("text")
    top.add_positional("prompt", metavar="PROMPT", help="a text; \\n is a line break", group=group)
    add = group.add_argument
    add("--chat", action="store_true", help=CHAT)
    add("--token", metavar="N", type=whole(), default=-1, help=TOKEN)
    add("--top", metavar="K", type=whole(1, MOST_TOP), default=5, help="tokens to list after each layer")
    most = whole(0, MOST_DRAFTS)
    add("--drafts", metavar="N", type=most, default=3, help="drafts after the token to verify; 0 = none")
    file = filled("name a file, or - for stdout")
    add("--json", metavar="FILE", type=file, help="write a JSON object to a file instead; - = stdout")

    group = top.add_argument_group("model")
    shared.add_model(group)
    shared.add_draft_model(group, DRAFT_MODEL)
    shared.add_context(group, "size of the context in tokens; 0 = as trained, less if memory is short")
    shared.add_batch_size(group)
    shared.add_cache_types(group)
    shared.add_threads(group)
    shared.add_device(group, DEVICE)
    shared.add_other(top.add_argument_group("other"))
    return top


def run(args: argparse.Namespace) -> int:
    """Traces the token and returns the exit status; raises EngineError."""
    if not args.prompt:
        raise UsageError("there is no prompt: write one in quotes")
    prompt = unescape(valid(args.prompt))
    file = None if args.json in (None, "-") else Path(args.json).expanduser()
    if file is not None and not file.parent.is_dir():
        raise UsageError(f"{file.parent} is no folder: name another file with --json")
    begin_gpu(args.device)

    from engine.cli.report import Report
    from engine.hub.resolve import resolve
    from engine.loading import load
    from engine.trace.text import lines_of

    with Report(args.verbose) as report:
        draft = args.draft_model
        llm = load(
            resolve(args.model, report.progress),
            device=args.device,
            gpu_memory=args.gpu_memory,
            n_ctx=args.ctx_size,
            n_threads=args.threads,
            batch_size=args.batch_size,
            cache_type=args.cache_type,
            cache_type_k=args.cache_type_k,
            cache_type_v=args.cache_type_v,
            draft_model=None if draft is None else resolve(draft, report.progress),
            mtp=not args.no_mtp,
            draft_max=args.drafts,
            progress=report.progress,
        )
        with llm:
            llm.compile(report.progress)
            found = llm.trace(
                read_ids(llm, prompt, args.chat),
                token=args.token,
                top=args.top,
                drafts=args.drafts,
                on_prefill=lambda done, total: report.progress("prompt", done, total),
            )
            head = {"model": llm.path.name, "device": llm.model.ops.label}
    if args.json is not None:
        write(file, head | found.as_json(args.top))
        return 0
    for line in lines_of(found, shutil.get_terminal_size().columns):
        print(printable(line))
    return 0


def read_ids(llm: "LLM", prompt: str, chat: bool) -> list[int]:
    """The token ids of a prompt.  Raises UsageError if it is a message and the model has no chat template."""
    if not chat:
        return llm.tokenize(prompt)
    if llm.chat_template is None:
        raise UsageError("this model has no chat template, which --chat needs: leave it out")
    return llm.chat_template.encode([{"role": "user", "content": prompt}])


def write(file: Path | None, found: dict[str, Any]) -> None:
    """Write an object to a file, or to stdout."""
    text = json.dumps(found, ensure_ascii=False)
    if file is None:
        sys.stdout.write(text + "\n")
    else:
        file.write_text(text + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr."""
    return entry.main(parser, run, argv)


if __name__ == "__main__":
    entry.program(main)
