"""An open model with what the flags say about its answers: its chat template, and the options of sampling and of the end."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.model_flags import load_options
from engine.cli.report import Report
from engine.cli.sampling import given, origins, with_file
from engine.devices import why_no_gpu
from engine.errors import UsageError
from engine.hub.resolve import resolve

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.text.template.chat import ChatTemplate

BARE_STOP = "\n\n\n"
"""The default end of a bare text: two blank lines, which separate functions in Python and hardly occur in prose."""

BARE_TOKENS = 256
"""The most tokens by which a bare text is continued, by default."""


@dataclass(frozen=True)
class Opened:
    """A model that can answer.

    Attributes: ``llm``; ``template``, its chat template, or None to continue texts as they are; ``options``, the keyword
    arguments of ``LLM.generate``; ``sampling``, where each parameter of sampling comes from (flag, file or default); and
    ``limited``, whether the default limits of a bare text end the answers.
    """

    llm: "LLM"
    template: "ChatTemplate | None"
    options: Mapping[str, Any]
    sampling: Mapping[str, str] = field(default_factory=dict)
    limited: bool = False

    def is_prose(self, options: Mapping[str, Any]) -> bool:
        """Whether lines of an answer with these options may be broken between words.  Line breaks would change a bare text,
        and one that a grammar describes."""
        return self.template is not None and options.get("grammar") is None


def open_model(
    args: argparse.Namespace,
    path: Path,
    options: Mapping[str, Any],
    report: Report,
    *,
    draft_model: str | None = None,
    other: bool = False,
) -> Opened:
    """Opens the model at ``path`` as the flags say, compiles its kernels, and reports what was opened; raises EngineError.

    options: the keyword arguments of ``LLM.generate`` that the flags set; those that no flag sets may come from the file.
    draft_model: what the user calls the draft model; it is fetched if necessary, after the flags have been checked.
    other: the flags were given for another model, so their chat template is used only if this one has none.
    """
    import engine

    # A device of drafts says nothing if there is no draft model.
    drafts: dict[str, Any] = {"draft_model": None, "device_draft": None}
    if draft_model is not None:
        drafts = {"draft_model": resolve(draft_model, report.progress)}
    llm = engine.load(path, **load_options(args) | drafts, progress=report.progress)
    try:
        report.started(llm)
        for warning in llm.warnings:
            report.line(f"note: {warning}")
        if args.verbose and args.device == "auto" and not llm.model.ops.gpu_name:
            report.detail(f"auto selects the CPU: {why_no_gpu()}")
        template = choose_template(args, llm, other)
        if not args.no_warmup:
            llm.compile(report.progress)
        report.device(llm)
    except BaseException:
        llm.close()
        raise
    options, sampling = with_file(options, given(args), llm.sampling), origins(given(args), llm.sampling)
    if recommended := [f"{name} {options[name]}" for name, origin in sampling.items() if origin == "file"]:
        report.line(f"sampling as the file recommends: {', '.join(recommended)}")
    used = ", ".join(f"{name} {options[name]} ({origin})" for name, origin in sampling.items())
    report.detail(f"{llm.path}; sampling: {used}, seed {options['seed']}")
    open_ended = args.predict is None and not args.stop and not args.ignore_eos
    limited = template is None and open_ended and options.get("grammar") is None
    if limited:
        options |= {"stop": [BARE_STOP], "max_tokens": BARE_TOKENS}
    return Opened(llm, template, options, sampling, limited)


def choose_template(args: argparse.Namespace, llm: "LLM", other: bool = False) -> "ChatTemplate | None":
    """The chat template to use; None to continue bare text. Raises UsageError if a flag needs one.

    other: the flags were given for another model.
    """
    if args.no_cnv:
        return None
    if args.chat_template is not None and not (other and llm.chat_template is not None):
        from engine.text.template.chat import ChatTemplate

        return ChatTemplate.load(args.chat_template, llm.tokenizer)
    if llm.chat_template is None and args.system is not None and not other:
        raise UsageError("--sys needs a chat template and this model has none: give one with --chat-template")
    return llm.chat_template
