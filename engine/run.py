"""``bitmirror run``: the command line."""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine.cli import entry
from engine.cli.entry import EXIT_INTERRUPTED
from engine.cli.flags import check, generation_options, parser
from engine.cli.grammars import grammar
from engine.cli.model_flags import load_options
from engine.cli.prompt import read_prompt
from engine.cli.sampling import given, origins, with_file
from engine.cli.shared import about, check_gpu_layers
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.cli.answer import Answer
    from engine.llm import LLM
    from engine.speculative.statistics import Statistics
    from engine.text.template.chat import ChatTemplate

BARE_STOP = "\n\n\n"
"""The default end of a bare text: two blank lines, which separate functions in Python and hardly occur in prose."""

BARE_TOKENS = 256
"""The most tokens by which a bare text is continued, by default."""


def main(argv: Sequence[str] | None = None, prog: str = "bitmirror run") -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr.

    prog: the command as the help names it.
    """
    return entry.main(lambda: parser(prog), run, argv)


def run(args: argparse.Namespace) -> int:
    """Does what the flags request, from loading the model to the report; raises EngineError."""
    import engine

    if about(args):
        return 0
    prompt, options = read_prompt(args), generation_options(args)
    check(args, prompt)
    if (restricted := grammar(args)) is not None:
        options["grammar"] = restricted

    from engine.cli.answer import Answer, answer
    from engine.cli.first_model import conversation_model
    from engine.cli.report import Report
    from engine.decode.sampler import SamplingParams
    from engine.devices import why_no_gpu
    from engine.hub.resolve import resolve

    fields = {field: options[field] for field in options.keys() & SamplingParams.__dataclass_fields__.keys()}
    SamplingParams(**fields)  # reports a value out of range before a model is loaded, which takes seconds
    with Report(args.verbose) as report:
        name = args.model
        if name is None and (args.cnv or prompt is None):
            name = conversation_model(report)
        path = resolve(name, report.progress)
        check_gpu_layers(args, path)
        drafts = args.draft_model and not args.no_spec
        llm = engine.load(
            path,
            draft_model=resolve(args.draft_model, report.progress) if drafts else None,
            **load_options(args),
            progress=report.progress,
        )
        report.started(llm)
        for warning in llm.warnings:
            report.line(f"note: {warning}")
        if args.verbose and args.device == "auto" and not llm.model.ops.gpu_name:
            report.detail(f"auto selects the CPU: {why_no_gpu()}")
        template = choose_template(args, llm)
        if not args.no_warmup:
            llm.compile(report.progress)
        report.device(llm)
        options = with_file(options, given(args), llm.sampling)
        sampling = origins(given(args), llm.sampling)
        if recommended := [f"{name} {options[name]}" for name, origin in sampling.items() if origin == "file"]:
            report.line(f"sampling as the file recommends: {', '.join(recommended)}")
        used = ", ".join(f"{name} {options[name]} ({origin})" for name, origin in sampling.items())
        report.detail(f"{llm.path}; sampling: {used}, seed {options['seed']}")

        open_ended = args.predict is None and not args.stop and not args.ignore_eos
        limited = template is None and open_ended and restricted is None
        if limited:
            options |= {"stop": [BARE_STOP], "max_tokens": BARE_TOKENS}

        prose = template is not None and restricted is None  # else a line break would change what is copied

        def ask(asked: Sequence[int] | str, settings: Mapping[str, Any]) -> Answer:
            return answer(llm, asked, settings, report, echo=asked if isinstance(asked, str) else "", prose=prose)

        if prompt is None or args.cnv:
            from engine.cli.chat import chat  # here: a single answer needs none of it

            return chat(llm, template, ask, report, options, system=args.system, first=prompt)
        ids: Sequence[int] | str = prompt
        if template is not None:
            system = [{"role": "system", "content": args.system}] if args.system is not None else []
            messages = [*system, {"role": "user", "content": prompt}]
            report.detail(f"prompt as rendered by the template: {template.render(messages)!r}")
            ids = template.encode(messages)
        reply = answer(llm, ids, options, report, show=not args.json, echo="" if template else prompt, prose=prose)
        if args.json:
            print(json.dumps(as_object(llm, prompt, reply, options, sampling), ensure_ascii=False))
        elif args.logprobs:
            report.logprobs(reply.generation)
        report.finished(llm, reply.generation, ending=ending(llm, reply, options, limited))
        return EXIT_INTERRUPTED if reply.interrupted else 0


def ending(llm: "LLM", reply: "Answer", options: dict[str, Any], limited: bool) -> str:
    """Why an answer ended, and what would have let it continue; ``limited``: by the default limits of a bare text."""
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


def choose_template(args: argparse.Namespace, llm: "LLM") -> "ChatTemplate | None":
    """The chat template to use; None to continue bare text. Raises UsageError if a flag needs one."""
    if args.no_cnv:
        return None
    if args.chat_template is not None:
        from engine.text.template.chat import ChatTemplate

        return ChatTemplate.load(args.chat_template, llm.tokenizer)
    if llm.chat_template is None and args.system is not None:
        raise UsageError("--sys needs a chat template and this model has none: give one with --chat-template")
    return llm.chat_template


def as_object(
    llm: "LLM", prompt: str, reply: "Answer", options: dict[str, Any], sampling: Mapping[str, str]
) -> dict[str, Any]:
    """The object that --json prints; rates that were not measured and infinite log-probabilities are null.

    sampling: where the parameters of sampling come from.
    Everything but the timings is the same on every device.
    """
    from engine.cli.report import peak_memory
    from engine.models.traffic import bytes_per_second
    from engine.version import ARITHMETIC

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
        "sampling": {name: {"value": options[name], "from": origin} for name, origin in sampling.items()},
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
