"""``bitmirror verify``: the replay of a receipt."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.cli import entry, shared
from engine.cli.model_flags import DEVICE
from engine.cli.parser import Parser
from engine.devices import begin_gpu
from engine.errors import UsageError

USAGE = "%(prog)s RECEIPT -m MODEL [flags]"

DESCRIPTION = """\
Says whether a model gives the answer of a receipt, which `bitmirror run --receipt` or a server has
written: whether all weights are the same, and whether each token is the one that is chosen there,
from the same logits, bit for bit. The text is read in passes like a prompt, on any device. The
types of the cache are those of the receipt."""

EPILOG = """\
examples:
  bitmirror run -m model.gguf --receipt receipt.json "Why is the sky blue?"
  bitmirror verify receipt.json -m model.gguf --device cpu

Exit status: 0 all is the same, 1 something differs (stdout says what differs first) or a bug, 2 user
error (one sentence on stderr says what to do), 130 interrupted by Ctrl-C."""

EXIT_DIFFERS = 1

GRANULE = 64
"""The context is a multiple of this number of positions."""


def parser(prog: str = "bitmirror verify") -> Parser:
    """The command line as an argparse parser."""
    top = Parser(prog, usage=USAGE, description=DESCRIPTION, epilog=EPILOG, finish=shared.settle_model)
    group = top.add_argument_group("receipt")
    top.add_positional("receipt", metavar="RECEIPT", help="a file with a receipt", group=group)
    group.add_argument("--json", action="store_true", help="print a JSON object instead of a sentence")

    group = top.add_argument_group("model")
    shared.add_model(group)
    shared.add_batch_size(group)
    shared.add_threads(group)
    shared.add_device(group, DEVICE)
    shared.add_division(group)
    shared.add_other(top.add_argument_group("other"))
    return top


def run(args: argparse.Namespace) -> int:
    """Replays the receipt and returns the exit status; raises EngineError."""
    if args.receipt is None:
        raise UsageError("there is no receipt: name a file that holds one")
    begin_gpu(args.device)

    from engine.cli.report import Report
    from engine.hub.resolve import resolve
    from engine.loading import load
    from engine.receipts.form import problem_of
    from engine.replay import Verification, read_receipt

    receipt = read_receipt(args.receipt)
    if problem := problem_of(receipt):
        return _tell(args, Verification(False, problem, 0))
    with Report(args.verbose) as report:
        llm = load(
            resolve(args.model, report.progress),
            device=args.device,
            gpu_memory=args.gpu_memory,
            n_threads=args.threads,
            batch_size=args.batch_size,
            progress=report.progress,
            **shared.division_options(args),
            **_options(receipt),
        )
        with llm:
            llm.compile(report.progress)
            found = llm.verify(receipt, lambda done, total: report.progress("prompt", done, total))
    return _tell(args, found)


def _options(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of ``engine.load`` that give the cache of a receipt."""
    model, n_tokens = receipt["model"], len(receipt["prompt"]) + len(receipt["tokens"])
    found: dict[str, Any] = {"n_ctx": -(-n_tokens // GRANULE) * GRANULE, "mtp": False, "snapshot_bytes": 0}
    types, budget = model.get("cache"), model.get("kv_budget", 0)
    if isinstance(types, dict) and all(isinstance(types.get(name), str) for name in "kv"):
        found |= {"cache_type_k": types["k"], "cache_type_v": types["v"]}
    if type(budget) is not int or budget < 0:
        raise UsageError("the kv_budget of the receipt is no number of positions, so it cannot be replayed.")
    return found | {"kv_budget": budget, "ds4_rounding": bool(model.get("rounding"))}


def _tell(args: argparse.Namespace, found: Any) -> int:
    if args.json:
        print(json.dumps(dataclasses.asdict(found)))
    elif found.same:
        print(f"same: this model gives the {found.n_tokens} tokens of the receipt, from the same logits.")
    else:
        print(f"not the same: {found.problem}")
    return 0 if found.same else EXIT_DIFFERS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr."""
    return entry.main(parser, run, argv)


if __name__ == "__main__":
    entry.program(main)
