"""The flags that several command lines have: each is defined once, with one help text and one range."""

import argparse
from functools import partial
from typing import Any

from engine.checks import memory_size
from engine.cli.parser import Choice, Numbers, add_help, filled, whole
from engine.devices import MOST_BATCH, parse_device, parse_devices
from engine.errors import UsageError
from engine.limits import ALL_LAYERS, LEAST_KV_BUDGET

MODEL = """\
path of a GGUF file, a name from `bitmirror models` (downloaded when needed), or
hf:owner/repo:Q4_K_M for a file on Hugging Face; default: the bundled model"""

HF_REPO = """\
a model on Hugging Face: owner/repo, or owner/repo:Q4_K_M to select a quantization"""

GPU_LAYERS = """\
number of layers on the GPU: the last ones, and the output; the others are on the CPU. 0 = all on the CPU;
auto = as many as fit into the GPU's memory (default auto); the answer is the same"""

CPU_MOE = """\
keep the mixtures of experts of the first N layers on the CPU; the answer is the same"""

OVERRIDE_TENSOR = """\
keep the parts of layers whose tensors' names contain a match on a device, CPU or GPU, such as
ffn_.*_exps=CPU; the first match counts. The tensors of a mixer stay together, as do those of a network"""

SPLIT_MODE = """\
how several GPUs divide a model: layer = each has a run of layers, in the order of --device; tensor =
each has a part of every layer (also with --device cpu,cpu); none = the first one has all of it (default
layer); the answer is the same"""

TENSOR_SPLIT = """\
shares of several GPUs, a number for each, such as 3,1; default: in proportion to their free memory"""

GPU_MEMORY = """\
use no more than SIZE of a GPU's memory, such as 12G or 800M, for everything including the driver's part:
what does not fit is refused as on a smaller GPU"""

CACHE_TYPE = """\
element type of the key-value cache: f32, f16, q8_0, q4_0, i12 or i8; by default i8 for quantized weights,
i12 for others, and f16 where these do not fit; another type changes the answer"""

DS4_ROUNDING = """\
of a DeepSeek V4 model (deepseek4): round what the cache stores as the official implementation does,
latents to 8 bits and keys of the indexer to 4; needs --cache-type f32"""

KV_BUDGET = """\
keep at most N positions of a prompt in layers without a window while an answer is generated: the first
and the last ones, and those that the last 64 tokens attend to most (SnapKV); 0 = all"""

BATCH_SIZE = """\
number of prompt tokens per pass; 0 = 1024 on a GPU, less if memory is short, and 128 on the CPU; the
answer is the same"""

POOLING = """\
how embeddings join the outputs of a text: mean, or cls or last for that of the first or last token;
default: as the file says, which only models that are made for embeddings do"""

JOINED = ("mean", "cls", "last")
"""The names in ``engine/models/pooling.py``, which is slow to import."""

CACHE_TYPES = ("f32", "f16", "q8_0", "q4_0", "i12", "i8")
"""The names in ``engine/cache/types.py``, repeated here because importing it is slow and a wrong command line needs none."""

Group = argparse._ArgumentGroup
"""What ``add_argument_group`` returns."""


def add_model(group: Group, help: str = MODEL, *, repeated: bool = False) -> None:
    """Adds -m and -hf; with ``repeated``, -m may be given several times and ``args.model`` is a list.

    ``settle_model`` combines them into ``args.model``.
    """
    name: dict[str, Any] = {"metavar": "MODEL", "type": filled("leave it out for the bundled model"), "help": help}
    many: dict[str, Any] = {"action": "append", "default": []} if repeated else {}
    group.add_argument("-m", "--model", **name, **many)
    repo = filled("write it as owner/repo:Q4_K_M")
    group.add_argument("-hf", "-hfr", "--hf-repo", metavar="REPO", type=repo, help=HF_REPO)
    file = filled("name a .gguf file of the repository")
    group.add_argument("-hff", "--hf-file", metavar="FILE", type=file, help="a file of the repository given with -hf")


def settle_model(args: argparse.Namespace) -> None:
    """Sets ``args.model`` to the model that -hf and -hff name, if they are given.  Raises UsageError."""
    if args.hf_repo is None:
        if args.hf_file is not None:
            raise UsageError("-hff names a file of a repository: give the repository with -hf")
        return
    if args.model:
        raise UsageError("-m and -hf are both given: use only one of them")
    repo = args.hf_repo.removeprefix("hf:")
    model = f"hf:{repo.partition(':')[0]}/{args.hf_file}" if args.hf_file is not None else f"hf:{repo}"
    args.model = [model] if isinstance(args.model, list) else model


def add_pooling(group: Group) -> None:
    """Adds --pooling."""
    group.add_argument("--pooling", metavar="HOW", type=Choice(JOINED), help=POOLING)


def add_threads(group: Group, *, several: bool = False) -> None:
    """Adds -t; with ``several``, a list of numbers."""
    if several:
        group.add_argument(
            "-t", "--threads", metavar="N,...", type=Numbers(), default=[0], help="CPU threads; 0 = one per core"
        )
        return
    number = whole(0, note="0 uses every core")
    group.add_argument("-t", "--threads", metavar="N", type=number, default=0, help="CPU threads; 0 = one per core")


def add_device(group: Group, text: str, default: str = "auto") -> None:
    """Adds --device and --gpu-memory."""
    group.add_argument("-dev", "--device", metavar="NAME", default=default, help=text)
    group.add_argument("--gpu-memory", metavar="SIZE", type=partial(memory_size, "--gpu-memory"), help=GPU_MEMORY)


def add_division(group: Group) -> None:
    """Adds -ngl, -ncmoe, -cmoe and -ot, which divide a model between a GPU and the CPU, and -sm and -ts, which divide it
    between several GPUs; ``division_options`` reads them."""
    add = group.add_argument
    add("-ngl", "--gpu-layers", "--n-gpu-layers", metavar="N", type=_layers, help=GPU_LAYERS)
    add("-ncmoe", "--n-cpu-moe", metavar="N", type=whole(0), default=0, help=CPU_MOE)
    every = "keep all mixtures of experts on the CPU"
    add("-cmoe", "--cpu-moe", action="store_const", const=ALL_LAYERS, dest="n_cpu_moe", help=every)
    add("-ot", "--override-tensor", metavar="REGEX=DEVICE,...", type=_overrides, help=OVERRIDE_TENSOR)
    add(
        "-sm", "--split-mode", metavar="HOW", type=Choice(("layer", "tensor", "none")), default="layer", help=SPLIT_MODE
    )
    add("-ts", "--tensor-split", metavar="X,...", default="", help=TENSOR_SPLIT)


def division_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of ``engine.load`` that divide a model."""
    return {
        "n_gpu_layers": args.gpu_layers,
        "n_cpu_moe": args.n_cpu_moe,
        "override_tensor": args.override_tensor or "",
        "split_mode": args.split_mode,
        "tensor_split": args.tensor_split,
    }


def _overrides(text: str) -> str:
    """The text itself.  Raises UsageError unless it places tensors."""
    from engine.models.division import parse_overrides  # which is slow to import

    parse_overrides(filled("write it as REGEX=CPU")(text))
    return text


def _layers(text: str) -> int | None:
    if text in ("all", "auto", "-1"):
        return None
    try:
        return int(whole(0)(text))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be 0, all, auto or a number of layers, not {text!r}") from None


def settle_device(args: argparse.Namespace) -> None:
    """Selects the CPU if -ngl is 0.  Raises UsageError for a device that does not exist by name, or that -ngl contradicts."""
    gpu = all(parse_device(name) is not None for name in parse_devices(args.device))
    if args.gpu_layers == 0:
        if gpu and args.device != "auto":
            raise UsageError(f"-ngl 0 selects the CPU and --device selects {args.device}: use only one of them")
        args.device = "cpu"


def about(args: argparse.Namespace) -> bool:
    """Prints the version or the devices if --version or --list-devices asks for them; returns whether one of them does."""
    if args.version:
        from engine.version import ARITHMETIC, __version__

        print(f"bitmirror {__version__}, arithmetic {ARITHMETIC}")
    elif args.list_devices:
        from engine.cli.table import print_table
        from engine.devices import describe_devices

        print_table(("device", "description"), describe_devices())
    return bool(args.version or args.list_devices)


def add_batch_size(group: Group, text: str = BATCH_SIZE) -> None:
    """Adds -b."""
    note = "0 leaves the choice to the device"
    group.add_argument("-b", "--batch-size", metavar="N", type=whole(0, MOST_BATCH, note), default=0, help=text)


def add_context(group: Group, text: str) -> None:
    """Adds -c."""
    group.add_argument("-c", "--ctx-size", metavar="N", type=whole(0), default=0, help=text)


def add_cache_types(group: Group, *, separate: bool = True) -> None:
    """Adds --cache-type and, if ``separate``, the types of keys and of values."""
    kind: dict[str, Any] = {"type": Choice(CACHE_TYPES), "metavar": "TYPE"}
    group.add_argument("-ct", "--cache-type", **kind, help=CACHE_TYPE)
    if separate:
        group.add_argument("-ctk", "--cache-type-k", **kind, help="element type of the keys, if different")
        group.add_argument("-ctv", "--cache-type-v", **kind, help="element type of the values, if different")


def add_kv_budget(group: Group) -> None:
    """Adds --kv-budget."""
    note = f"it is at least {LEAST_KV_BUDGET}, or 0 for all"
    group.add_argument("--kv-budget", metavar="N", type=whole(0, 2**31 - 1, note), default=0, help=KV_BUDGET)


def add_ds4_rounding(group: Group) -> None:
    """Adds --ds4-rounding."""
    group.add_argument("--ds4-rounding", action="store_true", help=DS4_ROUNDING)


def add_draft_model(group: Group, text: str) -> None:
    """Adds -md and --no-mtp."""
    add_network(group, text)
    text = "do not use the model's own layer for drafting (multi-token prediction), if it has one"
    group.add_argument("--no-mtp", action="store_true", help=text)


def add_network(group: Group, text: str) -> None:
    """Adds -md."""
    name = filled("leave it out to draft without another model")
    names = ("-md", "--draft-model", "--model-draft")
    group.add_argument(*names, metavar="MODEL", type=name, dest="draft_model", help=text)


def add_other(group: Group, verbose: str = "show the traceback of an error") -> None:
    """Adds --verbose, which does what ``verbose`` says, and --help."""
    group.add_argument("-v", "--verbose", action="store_true", help=verbose)
    add_help(group)
