"""``python -m engine.run``: the command line."""

import argparse
import io
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.flags import check, generation_options, parser, unescape, valid
from engine.errors import EngineError, UsageError

if TYPE_CHECKING:
    from engine.cli.answer import Answer
    from engine.llm import LLM
    from engine.speculative.statistics import Statistics
    from engine.text.chat import ChatTemplate

EXIT_BUG, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    verbose = bool({"-v", "--verbose"} & set(words))
    try:
        status = run(parser().parse_args(words))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe
        abandon_stdout()
        return EXIT_BROKEN_PIPE
    except EngineError as error:
        return fail(str(error), EXIT_USAGE, verbose)
    except MemoryError:
        return fail("not enough memory: choose a smaller context with -c, or a smaller model", EXIT_USAGE, verbose)
    except ImportError as error:
        return fail(f"a package is missing ({error}): install this one again with pip", EXIT_USAGE, verbose)
    except OSError as error:
        abandon_stdout()
        named = f"{error.filename}: " if error.filename else ""
        return fail(f"{named}{error.strerror or error}", EXIT_USAGE, verbose)
    except Exception as error:
        what = f"this is a bug ({type(error).__name__}: {error})"
        return fail(f"{what}; please run it again with --verbose and report what it prints", EXIT_BUG, verbose)


def abandon_stdout() -> None:
    """Redirects stdout, which the interpreter flushes once more at exit, to a place where that cannot fail."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(sentence: str, status: int, verbose: bool) -> int:
    """Prints why a run ends, and returns its exit status."""
    from engine.cli.report import printable

    if verbose:
        traceback.print_exc()
    print(f"error: {printable(sentence)}", file=sys.stderr)
    return status


def run(args: argparse.Namespace) -> int:
    """Does what the flags request, from loading the model to the report; raises EngineError."""
    if args.version:
        print(f"bitmirror {version()}")
        return 0
    use_utf8()
    if args.list_devices:
        return list_devices()
    prompt, options = read_prompt(args), generation_options(args)
    check(args, prompt)

    import engine
    from engine.cli.answer import Answer, answer
    from engine.cli.chat import chat
    from engine.cli.report import Report
    from engine.decode.sampler import SamplingParams
    from engine.devices import why_no_gpu
    from engine.hub.resolve import resolve

    fields = {field: options[field] for field in options.keys() & SamplingParams.__dataclass_fields__.keys()}
    SamplingParams(**fields)  # reports a value out of range before a model is loaded, which takes seconds
    with Report(args.verbose) as report:
        path = resolve(args.model, report.progress)
        drafts = args.draft_model and not args.no_spec
        llm = engine.load(
            path,
            device=args.device,
            n_ctx=args.ctx_size,
            n_threads=max(args.threads, 0),
            batch_size=args.batch_size,
            cache_type=args.cache_type,
            cache_type_k=args.cache_type_k,
            cache_type_v=args.cache_type_v,
            draft_model=resolve(args.draft_model, report.progress) if drafts else None,
            device_draft=args.device_draft or None,
            mtp=not (args.no_mtp or args.no_spec),
            draft_max=options["speculation"].most("lookup" if args.draft_lookup else "mtp"),
            snapshot_bytes=args.cache_ram << 20 if args.cache_ram >= 0 else None,
            progress=report.progress,
        )
        report.started(llm)
        if args.verbose and args.device == "auto" and not llm.model.ops.gpu_name:
            report.detail(f"auto selects the CPU: {why_no_gpu()}")
        template = choose_template(args, llm)
        if not args.no_warmup:
            llm.compile(report.progress)
        report.device(llm)
        report.detail(f"{llm.path}; sampling {fields}")

        def ask(asked: Sequence[int] | str, given: Mapping[str, Any]) -> Answer:
            return answer(llm, asked, given, report, echo=asked if isinstance(asked, str) else "")

        if template is not None and (args.cnv or prompt is None):
            return chat(llm, template, ask, report, options, system=args.system, first=prompt)
        if prompt is None:
            raise UsageError("this model has no chat template, so it needs a text to continue: give one with -p or -f")
        ids: Sequence[int] | str = prompt
        if template is not None:
            system = [{"role": "system", "content": args.system}] if args.system is not None else []
            messages = [*system, {"role": "user", "content": prompt}]
            report.detail(f"prompt as rendered by the template: {template.render(messages)!r}")
            ids = template.encode(messages)
        reply = answer(llm, ids, options, report, show=not args.json, echo="" if template is not None else prompt)
        if args.json:
            print(json.dumps(as_object(llm, prompt, reply, options), ensure_ascii=False))
        elif args.logprobs:
            report.logprobs(reply.generation, lambda id: llm.detokenize([id]))
        report.finished(llm, reply.generation, reason=reply.reason, seed=options["seed"])
        return EXIT_INTERRUPTED if reply.interrupted else 0


def list_devices() -> int:
    """Prints one line per device."""
    from engine.devices import describe_devices

    print("\n".join(describe_devices()))
    return 0


def use_utf8() -> None:
    """Makes pipes and files carry UTF-8 whatever the locale is; a terminal keeps its encoding but never fails."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=stream.encoding if stream.isatty() else "utf-8", errors="replace")


def read_prompt(args: argparse.Namespace) -> str | None:
    """The text of -p, -f or stdin; None if no prompt is given. Raises UsageError."""
    if args.prompt is not None and args.file is not None:
        raise UsageError("-p and -f are both given: give only one of them")
    if args.prompt is not None and args.prompt != "-":
        return unescape(args.prompt) if args.escape else valid(args.prompt)
    name = args.file or args.prompt
    if name is None:
        return None
    if name == "-" and sys.stdin.isatty():
        print("enter the prompt, and end it with Ctrl-D on a line of its own:", file=sys.stderr)
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"the prompt cannot be read from {name}: {error.strerror}") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt in {name} is not UTF-8 text (byte {error.start} begins no character)") from error
    return text.removesuffix("\n")


def choose_template(args: argparse.Namespace, llm: "LLM") -> "ChatTemplate | None":
    """The chat template to use; None to continue bare text. Raises UsageError if a flag needs one."""
    if args.no_cnv:
        return None
    if args.chat_template is not None:
        from engine.text.chat import ChatTemplate

        return ChatTemplate.load(args.chat_template, llm.tokenizer)
    if llm.chat_template is None and (args.cnv or args.system is not None):
        flag = "--cnv" if args.cnv else "--sys"
        raise UsageError(f"{flag} needs a chat template and this model has none: give one with --chat-template")
    return llm.chat_template


def as_object(llm: "LLM", prompt: str, reply: "Answer", options: dict[str, Any]) -> dict[str, Any]:
    """The object that --json prints; rates that were not measured and infinite log-probabilities are null.

    Everything but the timings is the same on every device.
    """
    from engine.cli.report import peak_memory
    from engine.models.traffic import bytes_per_second

    ops = llm.model.ops
    memory = ops.device_memory()
    generation, t = reply.generation, reply.generation.timings
    result: dict[str, Any] = {
        "model": str(llm.path),
        "prompt": prompt,
        "prompt_ids": [int(id) for id in generation.prompt_ids],
        "ids": [int(id) for id in generation.ids],
        "text": generation.text,
        "finish_reason": reply.reason,
        "seed": options["seed"],
    }
    if options["logprobs"]:
        result["logprobs"] = [
            {
                "id": int(entry["id"]),
                "logprob": finite(entry["logprob"]),
                "top": [[int(id), finite(value)] for id, value in entry["top"]],
            }
            for entry in generation.logprobs
        ]
    result["timings"] = {
        "device": ops.label,
        "load_ms": finite(t.load_s * 1e3),
        "compile_ms": finite(t.compile_s * 1e3),
        "cache_n": int(t.cache_n),
        "prompt_n": int(t.prompt_n),
        "prompt_ms": finite(t.prompt_s * 1e3),
        "prompt_per_second": finite(t.prompt_per_second),
        "predicted_n": int(t.predicted_n),
        "predicted_ms": finite(t.predicted_s * 1e3),
        "predicted_per_second": finite(t.predicted_per_second),
        "predicted_bytes_per_second": finite(bytes_per_second(llm, t) or math.inf),
        "first_token_ms": finite(t.first_token_s * 1e3),
        "peak_memory_bytes": peak_memory(),
        "device_memory_bytes": memory.allocated if memory is not None else None,
    }
    if generation.speculation is not None:
        result["speculation"] = speculation_object(generation.speculation)
    return result


def speculation_object(s: "Statistics") -> dict[str, Any]:
    """What --json reports about drafts."""
    return {
        "drafted": s.drafted,
        "accepted": s.accepted,
        "accepted_by_place": s.by_place,
        "sources": {name: {"drafted": n, "accepted": s.accepted_by[name]} for name, n in s.drafted_by.items()},
        "verifications": s.verifications,
        "mean_accepted_length": s.mean_length,
        "plain_tokens": s.plain_n,
        "plain_per_second": finite(s.plain_per_second or math.inf),
    }


def finite(value: float) -> float | None:
    """The value as JSON can represent it: None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def version() -> str:
    """The version of the installed distribution."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("bitmirror")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the terminal and the cache are cleaned up at exit
    sys.exit(main())
