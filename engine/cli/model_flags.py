"""The flags that say which model is opened, how, and where its drafts come from: those of ``bitmirror run`` and ``serve``."""

import argparse
from typing import Any

from engine.cli import shared
from engine.cli.parser import Choice, Parser, real, whole
from engine.limits import MOST_DRAFTS
from engine.speculative.params import MODES, SpeculationParams

CACHE_RAM = """\
MiB of host memory in which recurrent models keep states near the ends of messages, so that a
conversation can resume there; -1 = up to 2048, less if memory is short"""

DEVICE = """\
cpu (or none), cuda, cuda:1 and so on, several GPUs such as cuda:0,cuda:1, each with a part of the
layers, or auto: the first usable GPU, or the CPU if there is none; the answer is the same"""

DRAFT_MODEL = """\
a smaller model with the same vocabulary that drafts tokens for this one, an EAGLE-3 or DFlash
network, an assistant of Gemma 4, or the model's own layer for that in a file of its own; given as
for -m. Good drafts make answers faster; by default they do not change them"""

DRAFT_LOOKUP = """\
draft the tokens that followed the last occurrence of the latest tokens in the prompt or answer, or
in an earlier answer; if nothing is found, the draft model drafts, if there is one"""

DRAFT_MAX = """\
maximum number of drafts per pass, at most 15; 0 = 4 from a draft model or the model's own layer, 8
from a DFlash network, 7 from lookup. Fewer or none are made if they would cost more time than they
save"""

SPEC_ACCEPT = """\
how drafts are accepted: exact: the text is the same as without drafts; ratio: another text from the
same distribution; p-min: drafts with a probability of at least --spec-p-min are kept, which changes
the distribution"""


def add_model(top: Parser, text: str = shared.MODEL, *, repeated: bool = False) -> None:
    """Adds the group of the model; ``text``: the help of -m, ``repeated``: it may be given several times."""
    group = top.add_argument_group("model")
    shared.add_model(group, text, repeated=repeated)
    shared.add_context(group, "size of the context in tokens; 0 = as trained, less if memory is short")
    shared.add_batch_size(group)
    shared.add_cache_types(group)
    shared.add_kv_budget(group)
    shared.add_ds4_rounding(group)
    add = group.add_argument
    add("-cram", "--cache-ram", metavar="N", type=whole(-1, note="0 stores none"), default=-1, help=CACHE_RAM)
    shared.add_threads(group)
    shared.add_device(group, DEVICE)
    shared.add_division(group)
    add("--list-devices", action="store_true", help="print the devices of this machine and exit")
    add(
        "--no-warmup",
        action="store_true",
        help="compile each kernel when it is first used, not all before the prompt is read",
    )


def add_speculation(top: Parser) -> None:
    """Adds the group of speculation."""
    drafts: dict[str, Any] = {"metavar": "N", "type": whole(0, MOST_DRAFTS)}
    share: dict[str, Any] = {"metavar": "X", "type": real(0, 1)}
    group = top.add_argument_group("speculation")
    shared.add_draft_model(group, DRAFT_MODEL)
    add = group.add_argument
    add(
        "-devd",
        "--device-draft",
        metavar="NAME",
        default="",
        help="device of the draft model; default: that of the model",
    )
    add("--draft-lookup", action="store_true", help=DRAFT_LOOKUP)
    add("--draft-max", **drafts, default=0, help=DRAFT_MAX)
    add(
        "--draft-min",
        **drafts,
        default=0,
        help="minimum number of drafts per pass; if there are fewer, none are used",
    )
    add("--draft-p-min", **share, default=0.0, help="stop drafting at a token with a probability below X")
    how: dict[str, Any] = {"type": Choice(MODES), "metavar": "HOW"}
    add("--spec-accept", **how, default="exact", help=SPEC_ACCEPT)
    add("--spec-p-min", **share, default=0.3, help="minimum probability for --spec-accept p-min")
    add(
        "--spec-sequential-verify",
        action="store_true",
        help="verify drafts one by one, not in one pass: slow, for debugging",
    )
    add("--no-spec", action="store_true", help="disable all drafts, whatever the other flags say")


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


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of ``engine.load``, without those that are models."""
    drafts = speculation_params(args)
    return {
        "device": args.device,
        "gpu_memory": args.gpu_memory,
        "n_ctx": args.ctx_size,
        "n_threads": args.threads,
        "batch_size": args.batch_size,
        "cache_type": args.cache_type,
        "cache_type_k": args.cache_type_k,
        "cache_type_v": args.cache_type_v,
        "kv_budget": args.kv_budget,
        "ds4_rounding": args.ds4_rounding,
        **shared.division_options(args),
        "device_draft": args.device_draft or None,
        "mtp": not (args.no_mtp or args.no_spec),
        "draft_max": drafts.most("lookup") if drafts.lookup or drafts.draft_min else drafts.draft_max,
        "snapshot_bytes": args.cache_ram << 20 if args.cache_ram >= 0 else None,
    }
