"""``bitmirror embed``: texts as vectors."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.cli import entry, shared
from engine.cli.model_flags import DEVICE
from engine.cli.parser import Parser, filled, whole
from engine.cli.texts import read_text, valid
from engine.devices import begin_gpu
from engine.errors import UsageError

USAGE = """\
%(prog)s -m MODEL [flags] TEXT...            texts
       %(prog)s -m MODEL [flags] -f FILE            the lines of a file"""

DESCRIPTION = """\
Prints a JSON object for each text, one a line: its number and its vector, whose length is 1. With
-o, the vectors are written to a file of NumPy instead, float32 [texts, elements]. A vector depends
on its text only, not on other texts or on the device."""

EPILOG = """\
examples:
  bitmirror embed -m minilm.gguf "a cat" "a dog" | jq -c .embedding
  bitmirror embed -m minilm.gguf -f lines.txt -o vectors.npy
  bitmirror embed -m model.gguf --pooling mean "a cat"        a model that is not made for embeddings

Exit status: 0 written, 2 user error (one sentence on stderr says what to do), 130 interrupted by
Ctrl-C, 1 a bug."""


def parser(prog: str = "bitmirror embed") -> Parser:
    """The command line as an argparse parser."""
    top = Parser(prog, usage=USAGE, description=DESCRIPTION, epilog=EPILOG, finish=shared.settle_model)
    group = top.add_argument_group("texts")
    top.add_positionals("texts", metavar="TEXT", help="a text", group=group)
    file = filled("name a file, or - for stdin")
    group.add_argument("-f", "--file", metavar="FILE", type=file, help="a file with one text per line; - = stdin")
    group.add_argument(
        "--dimensions",
        metavar="N",
        type=whole(0),
        default=0,
        help="keep the first N elements of each vector only; 0 = all",
    )
    group.add_argument("--truncate", action="store_true", help="cut texts that are longer than the context")
    output = filled("name the file to write")
    group.add_argument("-o", "--output", metavar="FILE", type=output, help="the file of NumPy (.npy) to write")

    group = top.add_argument_group("model")
    shared.add_model(group)
    shared.add_pooling(group)
    shared.add_context(group, "size of the context in tokens; 0 = as trained, less if memory is short")
    shared.add_batch_size(group)
    shared.add_cache_types(group)
    shared.add_threads(group)
    shared.add_device(group, DEVICE)
    shared.add_other(top.add_argument_group("other"))
    return top


def run(args: argparse.Namespace) -> int:
    """Embeds the texts and returns the exit status; raises EngineError."""
    texts = read_texts(args)
    output = None if args.output is None else Path(args.output).expanduser()
    if output is not None and not output.parent.is_dir():
        raise UsageError(f"{output.parent} is no folder: name another file with -o")
    begin_gpu(args.device)

    import numpy as np

    from engine.cli.report import Report
    from engine.hub.resolve import resolve
    from engine.loading import load

    with Report(args.verbose) as report:
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
            pooling=args.pooling,
            progress=report.progress,
        )
        with llm:
            llm.check_dimensions(args.dimensions)
            llm.embedding_ids([])  # refuses a model that has no vectors before its kernels are compiled
            llm.compile(report.progress)
            vectors = llm.embed(texts, dimensions=args.dimensions, truncate=args.truncate)
    if output is not None:
        with output.open("wb") as file:
            np.save(file, vectors)
        return 0
    for i, vector in enumerate(vectors):
        sys.stdout.write(json.dumps({"index": i, "embedding": vector.tolist()}) + "\n")
    return 0


def read_texts(args: argparse.Namespace) -> list[str]:
    """The texts that the flags give.  Raises UsageError if there are none, or if they come from both places."""
    if args.texts and args.file is not None:
        raise UsageError("texts are given as words and with -f: use only one of them")
    if args.texts:
        return [valid(text) for text in args.texts]
    if args.file is None:
        raise UsageError("there is no text: write some in quotes, or give a file with -f, one text a line")
    lines = read_text(args.file, "texts").splitlines()
    if not lines:
        raise UsageError(f"{args.file} has no lines: write one text a line")
    empty = next((number for number, line in enumerate(lines, 1) if not line.strip()), 0)
    if empty:
        raise UsageError(f"line {empty} of {args.file} is empty: each line must be a text")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr."""
    return entry.main(parser, run, argv)


if __name__ == "__main__":
    entry.program(main)
