"""llama.cpp's flags that this program spells differently or lacks, and the message for each.

A flag of llama-cli, llama-completion or llama-bench is a flag here, under the same name or another one, or it raises an error
with one sentence that says what to use instead.  A flag that requests what is always the case here is accepted: ``--jinja``,
``--mirostat 0``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import UsageError
from engine.sampling.chain import ORDER, ORDERS

ANY = "*"
"""``Flag.holds``: every value requests what is always the case here."""

SWITCH = -1
"""``Flag.values``: one value may follow, of ``SWITCH_VALUES``; older versions of llama.cpp take none."""

SWITCH_VALUES = ("on", "off", "auto", "0", "1", "true", "false", "enabled", "disabled")


@dataclass(frozen=True)
class Other:
    """Other names, separated by spaces, of one flag; in ``means``, ``{}`` is the value if it takes one."""

    names: str
    means: str


@dataclass(frozen=True)
class Flag:
    """A flag that does not exist here.

    names: its names, separated by spaces.
    values: number of values that follow it.
    answer: what to do instead, as a clause that follows the name of the flag.
    holds: values, separated by spaces, that request what is always the case here and are accepted.
    """

    names: str
    values: int
    answer: str
    holds: str = ""


ONE_GPU = "a model runs on GPUs of this machine, or on one and the CPU; choose them with --device cuda:0,cuda:1"
MAPPED = "the model's file is always mapped into memory; leave this flag out"
READS_TEXT = "only text input is supported; leave this flag out"
FROM_THE_FILE = "the rotation of positions follows the model's file; change its metadata with gguf-new-metadata"
REPORTS = "reports are lines on stderr; store them with 2>FILE, or hide them with 2>/dev/null"
NOT_ALONE = "drafts use the same threads as the model, which -t sets"
NO_SCHEDULER = "the operating system schedules the threads; start the program with taskset, nice or numactl"
ONE_SEQUENCE = "this command computes one answer at a time; engine.load(parallel=...) in Python computes several"
FIXED_ORDER = f"samplers always run in the order {ORDER}; each can be switched off with its flag, such as --top-k 0"
NO_SAMPLER = "this sampler is not supported; use --temp, --top-p and --min-p"
NO_SERVER = "this command has no server; use `bitmirror serve`, which has the flags of llama-server"
TEMPLATE = "the chat template determines the text around a message; choose another one with --chat-template"
DRAFT_DEVICE = "all layers of a draft model run on one device; choose cpu or cuda:N with --device-draft"
DRAFT_CACHE = "the cache of a draft model has the same types as that of the model, which -ctk and -ctv set"
LOOKUP = "--draft-lookup chooses the length of a match itself; limit the number of drafts with --draft-max"
NO_VECTOR = "control vectors are not supported; describe the style with --sys"
NO_ADAPTER = "adapters are not supported; merge it into the model with llama-export-lora, and give the result with -m"
MEMORY = "the context and the batch size are always fitted to the free memory; set them with -c and -b"

RUN: tuple[Other | Flag, ...] = (
    # The model and where it runs.
    Other("-mg --main-gpu", "--device=cuda:{}"),
    Flag("-ncffn --n-cpu-ffn", 1, "place networks with -ot, such as -ot ffn_=CPU", holds="0"),
    Flag("--rpc", 1, ONE_GPU),
    Flag("-kvo --kv-offload --op-offload --no-op-offload --no-host", 0, ONE_GPU, holds=ANY),
    Flag("-nkvo --no-kv-offload", 0, "the cache is always on the model's device; use --device cpu for both"),
    Flag("-fa --flash-attn", SWITCH, "attention never stores a matrix of scores", holds=ANY),
    Flag("--mmap --repack --warmup", 0, "this is always the case", holds=ANY),
    Flag("--no-mmap -dio --direct-io", 0, MAPPED),
    Flag("-ndio --no-direct-io", 0, MAPPED, holds=ANY),
    Flag("-nr --no-repack", 0, "weights are always arranged for the device; leave this flag out"),
    Flag("--mlock", 0, "the operating system keeps the file in memory while there is room; leave this flag out"),
    Flag("-lm --load-mode", 1, MAPPED, holds="auto mmap"),
    Flag("-lzm --lazy-mode", 1, MAPPED, holds="auto"),
    Flag("-fit --fit", SWITCH, MEMORY, holds="on"),
    Flag("-fitt --fit-target -fitc --fit-ctx", 1, MEMORY),
    Flag("--check-tensors", 0, "check a named model with `bitmirror models verify`; for other files compare checksums"),
    Flag("--override-kv", 1, "metadata cannot be overridden; write a copy of the file with gguf-new-metadata"),
    Flag("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale", 1, FROM_THE_FILE),
    Flag("--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast", 1, FROM_THE_FILE),
    Flag("-gan --grp-attn-n -gaw --grp-attn-w", 1, FROM_THE_FILE),
    Flag("--lora --lora-scaled", 1, NO_ADAPTER),
    Flag("--control-vector --control-vector-scaled", 1, NO_VECTOR),
    Flag("--control-vector-layer-range", 2, NO_VECTOR),
    Flag("-mu --model-url", 1, "download the file and give its path with -m, or download from Hugging Face with -hf"),
    Flag("-dr --docker-repo", 1, "this source is not supported; use a file, a name from `bitmirror models`, or -hf"),
    Flag("-hft --hf-token", 1, "set the environment variable HF_TOKEN instead"),
    Flag("--offline", 0, "give the path of a file with -m: then nothing is downloaded"),
    Flag("-cl --cache-list", 0, "use `bitmirror models`, which lists the named models and where they are"),
    Flag("--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default", 0, "name the model with -m or -hf"),
    Flag("--vision-gemma-12b-default", 0, "name the model with -m or -hf"),
    Flag("-mm --mmproj -mmu --mmproj-url -mmdev --mmproj-device --image --audio --video", 1, READS_TEXT),
    Flag("--image-min-tokens --image-max-tokens --mtmd-batch-max-tokens", 1, READS_TEXT),
    Flag("--video-fps --video-timestamp-interval --video-ffmpeg-dir", 1, READS_TEXT),
    Flag("--mmproj-auto --mmproj-offload", 0, READS_TEXT),
    Flag("--no-mmproj --no-mmproj-auto --no-mmproj-offload", 0, READS_TEXT, holds=ANY),
    # Threads, context and cache.
    Flag("-tb --threads-batch", 1, "-t sets the number of threads for both prompts and answers"),
    Flag("-ub --ubatch-size", 1, "-b sets the number of tokens per pass, which is not divided further"),
    Flag("-C --cpu-mask -Cr --cpu-range --cpu-strict", 1, NO_SCHEDULER),
    Flag("-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch", 1, NO_SCHEDULER),
    Flag("--prio --prio-batch", 1, NO_SCHEDULER, holds="0"),
    Flag("--poll --poll-batch --numa", 1, NO_SCHEDULER),
    Flag("--keep", 1, "nothing is removed from the context without asking", holds=ANY),
    Flag("--no-context-shift", 0, "an answer ends when the context is full", holds=ANY),
    Flag("--context-shift", 0, "an answer ends when the context is full; choose a larger context with -c"),
    Flag("--swa-full", 0, "a sliding window stores only what later tokens can see; leave this flag out"),
    Flag("-ctxcp --ctx-checkpoints --swa-checkpoints", 1, "set the memory for saved states with --cache-ram"),
    Flag("-cms --checkpoint-min-step", 1, "set the memory for saved states with --cache-ram"),
    Flag("-dt --defrag-thold", 1, "the cache has no gaps", holds=ANY),
    Flag("-np --parallel", 1, ONE_SEQUENCE, holds="1 -1"),
    Flag("-cb --cont-batching", 0, ONE_SEQUENCE),
    Flag("-nocb --no-cont-batching", 0, ONE_SEQUENCE, holds=ANY),
    Flag("--prompt-cache", 1, "the cache is not stored between runs; a conversation keeps it"),
    Flag("--prompt-cache-all --prompt-cache-ro", 0, "the cache is not stored between runs; a conversation keeps it"),
    # The prompt and the conversation.
    Other("-i --interactive -if --interactive-first", "--cnv"),
    Flag("-bf --binary-file", 1, "a prompt must be UTF-8 text; give it with -f"),
    Flag("--in-prefix --in-suffix", 1, TEMPLATE),
    Flag("--in-prefix-bos", 0, TEMPLATE),
    Flag("-mli --multiline-input", 0, 'in a conversation, """ begins and ends a message of many lines'),
    Flag("--jinja", 0, "chat templates are Jinja", holds=ANY),
    Flag("--no-jinja", 0, "chat templates are always Jinja; use --no-cnv to disable the template"),
    Flag("-rea --reasoning", SWITCH, "the chat template decides whether the model thinks", holds="auto"),
    Flag("--reasoning-effort --chat-template-kwargs", 1, TEMPLATE),
    Flag("--reasoning-format", 1, "an answer is printed as generated, including the reasoning", holds="none"),
    Flag("--reasoning-budget", 1, "reasoning is not limited separately; limit the whole answer with -n", holds="-1"),
    Flag("--reasoning-budget-message", 1, "reasoning is not limited separately; limit the whole answer with -n"),
    Flag("--reasoning-preserve --skip-chat-parsing", 0, "messages are kept as generated", holds=ANY),
    Flag("--no-reasoning-preserve --no-skip-chat-parsing", 0, "messages are kept as generated; leave this flag out"),
    Flag("--server-base", 1, NO_SERVER),
    Flag("--host --port --api-key", 1, NO_SERVER),
    # Sampling.
    Flag("--samplers", 1, FIXED_ORDER, holds=" ".join(ORDERS)),
    Flag("--sampler-seq --sampling-seq", 1, FIXED_ORDER, holds="edkypmxt edskypmxt"),
    Flag("--mirostat", 1, NO_SAMPLER, holds="0"),
    Flag("--mirostat-lr --mirostat-ent", 1, NO_SAMPLER),
    Flag("--dynatemp-range", 1, NO_SAMPLER, holds="0"),
    Flag("--dynatemp-exp --adaptive-decay", 1, NO_SAMPLER),
    Flag("--adaptive-target --top-nsigma --top-n-sigma", 1, NO_SAMPLER, holds="-1"),
    Other("-jf --json-schema-file", "--json-schema={}"),
    Other("--grammar-file", "--grammar={}"),
    Flag("-bs --backend-sampling", 0, "tokens are chosen where the model runs", holds=ANY),
    # Drafts.
    Other("--draft --draft-n --spec-draft-n-max", "--draft-max={}"),
    Other("--draft-n-min --spec-draft-n-min", "--draft-min={}"),
    Other("--spec-draft-p-min", "--draft-p-min={}"),
    Other("--spec-draft-model", "--draft-model={}"),
    Other("--spec-draft-device", "--device-draft={}"),
    Other("-hfd -hfrd --hf-repo-draft --spec-draft-hf", "--draft-model=hf:{}"),
    Flag("-ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl", 1, DRAFT_DEVICE, holds="all auto -1 99 999"),
    Flag("-otd --override-tensor-draft --spec-draft-override-tensor", 1, DRAFT_DEVICE),
    Flag("-cmoed --cpu-moe-draft --spec-draft-cpu-moe", 0, DRAFT_DEVICE),
    Flag("-ncmoed --n-cpu-moe-draft --spec-draft-ncmoe --spec-draft-n-cpu-moe", 1, DRAFT_DEVICE, holds="0"),
    Flag("-ctkd --cache-type-k-draft --spec-draft-type-k", 1, DRAFT_CACHE),
    Flag("-ctvd --cache-type-v-draft --spec-draft-type-v", 1, DRAFT_CACHE),
    Flag("-td --threads-draft -tbd --threads-batch-draft", 1, NOT_ALONE),
    Flag("--spec-draft-threads --spec-draft-threads-batch", 1, NOT_ALONE),
    Flag("-Cd --cpu-mask-draft -Crd --cpu-range-draft --cpu-strict-draft --prio-draft --poll-draft", 1, NOT_ALONE),
    Flag("--spec-draft-cpu-mask --spec-draft-cpu-range --spec-draft-cpu-strict --spec-draft-prio", 1, NOT_ALONE),
    Flag("-Cbd --cpu-mask-batch-draft -Crbd --cpu-range-batch-draft --cpu-strict-batch-draft", 1, NOT_ALONE),
    Flag("--spec-draft-cpu-mask-batch --spec-draft-cpu-range-batch --spec-draft-cpu-strict-batch", 1, NOT_ALONE),
    Flag("--prio-batch-draft --spec-draft-prio-batch --poll-batch-draft", 1, NOT_ALONE),
    Flag("--spec-draft-poll --spec-draft-poll-batch", 1, NOT_ALONE),
    Flag("--draft-p-split --spec-draft-p-split", 1, "drafts do not branch; use --draft-p-min to end them earlier"),
    Flag("--spec-type", 1, "drafts come from -md, --draft-lookup or the model's own layer; --no-spec disables them"),
    Flag("--spec-default", 0, "drafts come from -md, --draft-lookup or the model's own layer"),
    Flag("--spec-draft-backend-sampling", 0, "tokens are chosen where the model runs", holds=ANY),
    Flag("--no-spec-draft-backend-sampling", 0, "tokens are chosen where the model runs; leave this flag out"),
    Flag(
        "--spec-synth-len --spec-synth-rates", 1, "synthetic acceptance is not supported; limit drafts with --draft-max"
    ),
    Flag("--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match", 1, LOOKUP),
    Flag("--spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits", 1, LOOKUP),
    Flag("--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits", 1, LOOKUP),
    Flag("--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits", 1, LOOKUP),
    # What is written where.
    Other("--usage", "--help"),
    Other("--log-verbose --verbose-prompt", "--verbose"),
    Flag("-lv --verbosity --log-verbosity", 1, "use --verbose to write more to stderr"),
    Flag("--no-display-prompt", 0, "only the answer is written to stdout", holds=ANY),
    Flag("--display-prompt", 0, "only the answer is written to stdout; --json includes the prompt"),
    Flag("--perf --show-timings", 0, "the report on stderr ends with the rates", holds=ANY),
    Flag("--no-perf --no-show-timings -ld --log-disable", 0, REPORTS),
    Flag("--log-file --log-prompts-dir", 1, REPORTS),
    Flag("--log-jsonl --log-prefix --log-timestamps", 0, REPORTS),
    Flag("--no-log-jsonl --no-log-prefix --no-log-timestamps", 0, REPORTS, holds=ANY),
    Flag("-co --color --log-colors", SWITCH, "terminals get colours; set TERM=dumb to disable them", holds="auto on"),
    Flag("--simple-io", 0, "set TERM=dumb for plain lines without progress bars and colours"),
    Flag("-sp --special", 0, "control tokens are not printed; --json lists the ids of all tokens"),
    Flag("-ptc --print-token-count", 1, "terminals show the number of tokens during an answer; leave this flag out"),
    Flag("-o --output --output-file", 1, "only the answer is written to stdout; store it with >FILE"),
    Flag("--completion-bash", 0, "shell completion is not supported; --help lists every flag"),
)
"""The flags of llama-cli and llama-completion that ``bitmirror run`` spells differently or lacks."""

BENCH: tuple[Other | Flag, ...] = (
    Other("-mg --main-gpu", "--device=cuda:{}"),
    Flag("-rpc --rpc", 1, ONE_GPU),
    Flag("-ncffn --n-cpu-ffn", 1, "place networks with -ot, such as -ot ffn_=CPU", holds="0"),
    Flag("-nkvo --no-kv-offload", 1, "the cache is always on the model's device; use --device cpu for both", holds="0"),
    Flag("-nopo --no-op-offload --no-host", 1, ONE_GPU, holds="0 1"),
    Flag("-fa --flash-attn", SWITCH, "attention never stores a matrix of scores", holds=ANY),
    Flag("-mmp --mmap", 1, MAPPED, holds="1"),
    Flag("-dio --direct-io", 1, MAPPED, holds="0"),
    Flag("-lm --load-mode", 1, MAPPED, holds="auto mmap"),
    Flag("-lzm --lazy-mode", 1, MAPPED, holds="auto"),
    Flag("--repack", 1, "weights are always arranged for the device; leave this flag out", holds="1"),
    Flag("-ub --ubatch-size", 1, "-b sets the number of tokens per pass, which is not divided further"),
    Flag("-pg", 1, "prompts and answers are measured separately; give both lengths with -p and -n, and depths with -d"),
    Flag("-embd --embeddings", 1, "embeddings are not supported; leave this flag out", holds="0"),
    Flag("-oe --output-err", 1, "there is only one output; choose its format with -o"),
    Flag("-fitt --fit-target -fitc --fit-ctx", 1, "the context is always as large as -p, -n and -d need"),
    Flag("-C --cpu-mask --cpu-strict --poll --numa", 1, NO_SCHEDULER),
    Flag("--prio", 1, NO_SCHEDULER, holds="0"),
    Flag("--delay", 1, "tests run without pauses; leave this flag out"),
    Flag("--progress", 0, "terminals always show progress", holds=ANY),
    Flag("-hft --hf-token", 1, "set the environment variable HF_TOKEN instead"),
    Flag("--offline", 0, "give the path of a file with -m: then nothing is downloaded"),
    Flag("--list-devices", 0, "use `bitmirror run --list-devices`"),
)
"""The flags of llama-bench that ``bitmirror bench`` spells differently or lacks."""


def find(table: Sequence[Other | Flag], name: str) -> Other | Flag | None:
    """The entry of a flag as the user wrote it, with dashes or underscores; None if there is none."""
    if name.startswith("--"):
        name = name.replace("_", "-")
    return next((entry for entry in table if name in entry.names.split()), None)


def replace(entry: Other | Flag, word: str, rest: list[str]) -> list[str]:
    """The words that replace ``word``, a flag of the entry; its values are removed from ``rest``.

    Raises UsageError with the message of the entry, unless the flag has another name or requests what is always the case.
    """
    name, equals, joined = word.partition("=")
    values = [joined] if equals else []
    wanted = int("{}" in entry.means) if isinstance(entry, Other) else entry.values
    if wanted == SWITCH:
        wanted = int(bool(values) or (rest != [] and rest[0] in SWITCH_VALUES))
    while len(values) < wanted:
        if not rest:
            raise UsageError(f"{name} needs {'a value' if wanted == 1 else f'{wanted} values'}")
        values.append(rest.pop(0))
    if len(values) > wanted:
        raise UsageError(f"{name} takes no value")
    if isinstance(entry, Other):
        return [entry.means.format(*values)]
    if entry.holds == ANY or (values and any(_equal(values[0], value) for value in entry.holds.split())):
        return []
    raise UsageError(f"{' '.join([name, *values])}: {entry.answer}")


def _equal(value: str, other: str) -> bool:
    """Whether two texts are equal, or the same number."""
    try:
        return float(value) == float(other)
    except ValueError:
        return value == other
