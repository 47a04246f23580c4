"""``bitmirror serve``: models over HTTP."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checks import shown
from engine.cli import entry
from engine.cli.model_flags import load_options, speculation_params
from engine.cli.sampling import flagged
from engine.cli.serve_flags import limits, parser
from engine.cli.shared import about
from engine.devices import begin_gpu
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.serving.served import Spec

MISSING = "the server needs packages that are missing ({}): install them with pip install 'bitmirror[serve]'"


def main(argv: Sequence[str] | None = None, prog: str = "bitmirror serve") -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr.

    Parameters
    ----------
    argv : sequence of str, optional
        The words after the command; None: those of the process.
    prog : str
        What the command is called.

    Returns
    -------
    int
        Exit status.
    """
    return entry.main(lambda: parser(prog), run, argv)


def run(args: argparse.Namespace) -> int:
    """Serves until it is told to end; raises EngineError."""
    if about(args):
        return 0
    begin_gpu(args.device)
    try:
        from engine.serving.lines import Lines
        from engine.serving.process import serve
        from engine.serving.repeated import Repeated
    except ImportError as error:
        raise UsageError(MISSING.format(error.name)) from None
    level = logging.DEBUG if args.verbose else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("bitmirror").setLevel(level)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(Lines())
        handler.addFilter(Repeated("bitmirror.serving.access"))
    return serve(
        specs(args),
        limits=limits(args),
        host=args.host,
        port=args.port,
        keys=args.api_key,
        origins=args.cors_origins,
        certificate=(args.ssl_cert_file, args.ssl_key_file) if args.ssl_cert_file else None,
        models_max=args.models_max,
        drain_seconds=args.drain_seconds,
        webui=args.webui,
        slot_folder=slot_folder(args),
    )


def slot_folder(args: argparse.Namespace) -> Path | None:
    """The folder for saved slots; raises UsageError if it cannot be used."""
    if args.slot_save_path is None:
        return None
    folder = Path(args.slot_save_path).expanduser().absolute()
    if not folder.is_dir():
        raise UsageError(
            f"{shown(str(folder))} is not a folder: make it first, or give another one with --slot-save-path"
        )
    return folder


def specs(args: argparse.Namespace) -> list["Spec"]:
    """The models that the flags name; raises UsageError if two have the same name."""
    from engine.cli.first_model import conversation_model
    from engine.cli.report import Report
    from engine.hub.resolve import resolve
    from engine.serving.served import Spec

    names: list[str | Path | None] = list(args.model)
    if args.models_dir:
        folder = Path(args.models_dir).expanduser()
        found = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
        if not found:
            raise UsageError(f"{folder} holds no GGUF files: give another folder with --models-dir")
        names += found
    made: list[Spec] = []
    drafts, sampling = speculation_params(args), flagged(args)
    with Report(args.verbose) as report:
        for name in names or [conversation_model(report, "serve")]:
            path = resolve(name, report.progress)
            called = path.stem if name is None or "/" in str(name) else str(name).removesuffix(".gguf")
            # As in llama-server and vLLM, the model is listed by the first of the names that are given.
            first, *aliases = dict.fromkeys([*([] if made else args.alias), called])
            made.append(
                Spec(first, Opener(args, path), aliases, str(path), int(path.stat().st_mtime), drafts, sampling)
            )
    every = [each for spec in made for each in (spec.name, *spec.aliases)]
    twice = next((each for each in every if every.count(each) > 1), None)
    if twice is not None:
        raise UsageError(f"two models are called {twice}: rename one of the files, or leave one out")
    return made


class Opener:
    """Opens a model as the flags say."""

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        self._args = args
        self._path = path

    def __call__(self) -> "LLM":
        import engine
        from engine.cli.report import Report
        from engine.hub.resolve import resolve
        from engine.text.template.chat import ChatTemplate

        args = self._args
        options: dict[str, Any] = load_options(args) | {"parallel": args.parallel, "pooling": args.pooling}
        if args.cache_disk:
            options |= {"cache_disk": args.cache_disk << 30, "cache_disk_path": args.cache_disk_path}
        with Report(args.verbose) as report:
            drafts = args.draft_model and not args.no_spec
            draft = resolve(args.draft_model, report.progress) if drafts else None
            llm = engine.load(self._path, draft_model=draft, progress=report.progress, **options)
            if args.chat_template is not None:
                llm.chat_template = ChatTemplate.load(args.chat_template, llm.tokenizer)
            if not args.no_warmup:
                llm.compile(report.progress)
        return llm


if __name__ == "__main__":
    entry.program(main)
