"""``bitmirror run``: the command line."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli import entry
from engine.cli.entry import EXIT_INTERRUPTED
from engine.cli.flags import check, generation_options, parser
from engine.cli.grammars import grammar
from engine.cli.prompt import read_prompt
from engine.cli.shared import about
from engine.devices import begin_gpu
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.cli.answer import Outcome
    from engine.cli.opened import Opened
    from engine.speculative.statistics import Statistics


def main(argv: Sequence[str] | None = None, prog: str = "bitmirror run") -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr.

    prog: the command as the help names it.
    """
    return entry.main(lambda: parser(prog), run, argv)


def run(args: argparse.Namespace) -> int:
    """Does what the flags request, from loading the model to the report; raises EngineError."""
    if about(args):
        return 0
    prompt, options = read_prompt(args), generation_options(args)
    check(args, prompt)
    begin_gpu(args.device)
    if (restricted := grammar(args)) is not None:
        options["grammar"] = restricted
    if args.receipt is not None:
        options["receipt"] = True

    from engine.cli.answer import answer
    from engine.cli.first_model import conversation_model
    from engine.cli.opened import open_model
    from engine.cli.report import Report
    from engine.hub.resolve import resolve
    from engine.sampling.sampler import SamplerParams

    fields = {field: options[field] for field in options.keys() & SamplerParams.__dataclass_fields__.keys()}
    SamplerParams(**fields)  # reports a value out of range before a model is loaded, which takes seconds
    with Report(args.verbose) as report:
        name = args.model
        if name is None and (args.cnv or prompt is None):
            name = conversation_model(report)
        path = resolve(name, report.progress)
        draft_model = None if args.no_spec else args.draft_model or None
        opened = open_model(args, path, options, report, draft_model=draft_model)
        if prompt is None or args.cnv:
            from engine.cli.chat import chat  # here: a single answer needs none of it

            def open_other(path: Path) -> "Opened":
                return open_model(args, path, options, report, other=True)

            return chat(opened, report, open_other, system=args.system, first=prompt)
        llm, template = opened.llm, opened.template
        ids: Sequence[int] | str = prompt
        if template is not None:
            system = [{"role": "system", "content": args.system}] if args.system is not None else []
            messages = [*system, {"role": "user", "content": prompt}]
            report.detail(f"prompt as rendered by the template: {template.render(messages)!r}")
            ids = template.encode(messages)
        prose = opened.is_prose(opened.options)
        echo = "" if template else prompt
        reply = answer(llm, ids, opened.options, report, show=not args.json, echo=echo, prose=prose)
        if args.receipt is not None:
            write_receipt(Path(args.receipt).expanduser(), reply.generation.receipt())
        if args.json:
            print(json.dumps(as_object(opened, prompt, reply), ensure_ascii=False))
        elif args.logprobs:
            report.logprobs(reply.generation)
        report.finished(llm, reply.generation, ending=ending(opened, reply))
        return EXIT_INTERRUPTED if reply.interrupted else 0


def write_receipt(path: Path, receipt: dict[str, Any]) -> None:
    """Write a receipt to a file, which is replaced as a whole; raises UsageError if it cannot be written."""
    from engine.machine.files import replaced

    try:
        with replaced(path) as file:
            file.write(json.dumps(receipt).encode() + b"\n")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the receipt cannot be written to {path}: {getattr(error, 'strerror', None) or error}."
        ) from None


def ending(opened: "Opened", reply: "Outcome") -> str:
    """Why an answer ended, and what would have let it continue."""
    from engine.cli.opened import BARE_STOP, BARE_TOKENS

    llm, options, limited = opened.llm, opened.options, opened.limited
    generation, reason = reply.generation, reply.reason
    why = ""
    if reason == "length" and len(generation.prompt_ids) + len(generation.ids) >= llm.n_ctx:
        why = "the context is full: -c sets its size"
    elif reason == "length" and limited:
        why = f"{BARE_TOKENS} tokens, the default for a bare text: -n sets another number"
    elif reason == "stop" and limited and BARE_STOP in llm.detokenize(generation.ids):
        why = "two blank lines, the default for a bare text: -n or --stop sets another end"
    how = "greedy" if options["temperature"] == 0 else f"seed {options['seed']}"
    return f"{reason}  ({why}; {how})" if why else f"{reason}  ({how})"


def as_object(opened: "Opened", prompt: str, reply: "Outcome") -> dict[str, Any]:
    """The object that --json prints; rates that were not measured and infinite log-probabilities are null.

    Everything but the timings is the same on every device.
    """
    from engine.cli.report import peak_memory
    from engine.models.traffic import bytes_per_second
    from engine.version import ARITHMETIC

    llm, options, ops = opened.llm, opened.options, opened.llm.model.ops
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
        "sampling": {name: {"value": options[name], "from": origin} for name, origin in opened.sampling.items()},
        "arithmetic": ARITHMETIC,
    }
    if options["logprobs"]:
        result["logprobs"] = [
            {
                "id": entry.id,
                "text": entry.text,
                "logprob": finite(entry.logprob),
                "top": [{"id": t.id, "text": t.text, "logprob": finite(t.logprob)} for t in entry.top],
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


if __name__ == "__main__":
    entry.program(main)
