"""Every flag of llama.cpp is a flag here, or is answered; and what answers advise exists."""

import re
from collections.abc import Callable

import pytest

from engine import bench
from engine.cli import flags, llama_cpp, llama_server, serve_flags
from engine.cli.llama_cpp import ANY, SWITCH, Flag, Other
from engine.cli.parser import Parser
from engine.errors import UsageError

# The names that common/arg.cpp of llama.cpp (October 2026) gives to flags of llama-cli and llama-completion, and some that
# earlier versions had.
LLAMA_CLI = """
-mmdev --mmproj-device -h --help --usage --version -cl --cache-list --completion-bash --server-base --verbose-prompt
--display-prompt --no-display-prompt -co --color -t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range
--cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch
-c --ctx-size -n --predict --n-predict -b --batch-size -ub --ubatch-size --keep --swa-full -ctxcp --ctx-checkpoints
--swa-checkpoints -cram --cache-ram --context-shift --no-context-shift -fa --flash-attn -p --prompt -sys
--system-prompt --perf --no-perf --show-timings --no-show-timings -f --file -sysf --system-prompt-file -bf
--binary-file -e --escape --no-escape -ptc --print-token-count --prompt-cache --prompt-cache-all --prompt-cache-ro
-r --reverse-prompt -sp --special -cnv --conversation -no-cnv --no-conversation -st --single-turn -i --interactive
-if --interactive-first -mli --multiline-input --in-prefix-bos --in-prefix --in-suffix --warmup --no-warmup
--dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --xtc-probability
--xtc-threshold --samplers -s --seed --sampler-seq --sampling-seq --ignore-eos --temp --temperature --top-k --top-p --min-p
--top-nsigma --top-n-sigma --typical --typical-p --repeat-last-n --repeat-penalty --presence-penalty
--frequency-penalty --adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr
--mirostat-ent -l --logit-bias --grammar --grammar-file -j --json-schema -jf --json-schema-file -bs
--backend-sampling --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor
--yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -gan --grp-attn-n -gaw --grp-attn-w -kvo --kv-offload -nkvo
--no-kv-offload --repack -nr --no-repack --no-host -ctk --cache-type-k -ctv --cache-type-v -dt --defrag-thold -np
--parallel -mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload
--no-mmproj-offload --image --audio --video --image-min-tokens --image-max-tokens --video-fps
--video-timestamp-interval --video-ffmpeg-dir --rpc -lm --load-mode -lzm --lazy-mode --numa -dev --device
--list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -ncffn --n-cpu-ffn -ngl --gpu-layers
--n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu -fit --fit -fitt --fit-target -fitc --fit-ctx
--check-tensors --override-kv --op-offload --no-op-offload --lora --lora-scaled --control-vector
--control-vector-scaled --control-vector-layer-range -m --model -mu --model-url -dr --docker-repo -hf -hfr --hf-repo
-hff --hf-file -hft --hf-token -o --output --output-file --chat-template-kwargs --jinja --no-jinja
--reasoning-format -rea --reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message
--reasoning-preserve --no-reasoning-preserve --chat-template --chat-template-file --skip-chat-parsing
--no-skip-chat-parsing --simple-io --log-disable --log-file --log-jsonl --no-log-jsonl --log-prompts-dir
--log-colors -v --verbose --log-verbose --offline -lv --verbosity --log-verbosity --log-prefix --no-log-prefix
--log-timestamps --no-log-timestamps --spec-draft-hf -hfd -hfrd --hf-repo-draft --spec-draft-threads -td
--threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd --cpu-mask-draft
--spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio
--prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft
--spec-draft-poll-batch --poll-batch-draft --spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd
--cache-type-v-draft --spec-draft-override-tensor -otd --override-tensor-draft --spec-draft-cpu-moe -cmoed
--cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft --spec-draft-n-max
--spec-draft-n-min --spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split --spec-draft-p-min
--draft-p-min --spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-device -devd
--device-draft --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-model -md --model-draft
--spec-type --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n
--spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m
--spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits
--draft --draft-n --draft-max --draft-min --draft-n-min --gpt-oss-20b-default --gpt-oss-120b-default
--vision-gemma-4b-default --vision-gemma-12b-default --spec-default --mlock --mmap --no-mmap -dio --direct-io -ndio
--no-direct-io -ld -cb --cont-batching
"""

# The names in the help of llama-bench of the same version, and two that earlier versions had.
LLAMA_BENCH = """
-h --help --numa -r --repetitions --prio --delay -o --output -oe --output-err --list-devices -v --verbose --progress
--no-warmup -fitt --fit-target -fitc --fit-ctx -rpc --rpc -m --model -hf -hfr --hf-repo -hff --hf-file -hft --hf-token
--offline -p --n-prompt -n --n-gen -pg -d --n-depth -b --batch-size -ub --ubatch-size -ctk --cache-type-k -ctv
--cache-type-v -t --threads -C --cpu-mask --cpu-strict --poll -ngl --n-gpu-layers -ncmoe --n-cpu-moe -sm --split-mode
-mg --main-gpu -nkvo --no-kv-offload -fa --flash-attn -dev --device -lm --load-mode -lzm --lazy-mode -embd --embeddings
-ts --tensor-split -ot --override-tensor -nopo --no-op-offload --no-host --repack -mmp --mmap -dio --direct-io
"""

# The names in the help of llama-server of the same version, without those that drafts of llama-cli have, too.
LLAMA_SERVER = """
-h --help --usage --version -cl --cache-list --completion-bash -t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range
--cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch
-c --ctx-size -n --predict --n-predict -b --batch-size -ub --ubatch-size --keep --swa-full -fa --flash-attn --perf
--no-perf -e --escape --no-escape --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx
--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -kvo --kv-offload -nkvo --no-kv-offload --repack
-nr --no-repack --no-host -ctk --cache-type-k -ctv --cache-type-v -dt --defrag-thold --rpc -lm --load-mode -lzm
--lazy-mode --numa -dev --device --list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe
--moe-cache-mib -ncffn --n-cpu-ffn -ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu
-fit --fit -fitt --fit-target -fitc --fit-ctx --check-tensors --override-kv --op-offload --no-op-offload --lora
--lora-scaled --control-vector --control-vector-scaled --control-vector-layer-range -m --model -mu --model-url -dr
--docker-repo -hf -hfr --hf-repo -hff --hf-file -hft --hf-token --log-disable --log-file --log-jsonl --no-log-jsonl
--log-colors -v --verbose --log-verbose --offline -lv --verbosity --log-verbosity --log-prefix --no-log-prefix
--log-timestamps --no-log-timestamps --spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd
--cache-type-v-draft --samplers -s --seed --sampler-seq --sampling-seq --ignore-eos --temp --temperature --top-k --top-p
--min-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n
--repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length
--dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp
--mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file -j --json-schema -jf
--json-schema-file -bs --backend-sampling -lcs --lookup-cache-static -lcd --lookup-cache-dynamic
--kv-unified-per-slot -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -cram --cache-ram -kvu
--kv-unified -no-kvu --no-kv-unified --cache-idle-slots --no-cache-idle-slots --context-shift --no-context-shift -r
--reverse-prompt -sp --special --warmup --no-warmup --spm-infill --pooling -np --parallel -cb --cont-batching -nocb
--no-cont-batching -mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload
--no-mmproj-offload -mmdev --mmproj-device --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps
--video-timestamp-interval --video-ffmpeg-dir -a --alias --tags --embd-normalize --host --port --reuse-port --path
--cors-origins --cors-methods --cors-headers --cors-credentials --no-cors-credentials --api-prefix --ui-config
--webui-config --ui-config-file --webui-config-file --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy
--no-webui-mcp-proxy --tools --tools-runtime --mcp-servers-config --mcp-servers-json -ag --agent -no-ag --no-agent --ui
--webui --no-ui --no-webui --embedding --embeddings --rerank --reranking --api-key --api-key-file --ssl-key-file
--ssl-cert-file --chat-template-kwargs -to --timeout --sse-ping-interval --threads-http --cache-prompt
--no-cache-prompt --cache-reuse --metrics --props --slots --no-slots --slot-save-path --media-path --models-dir
--models-preset --models-max --models-autoload --no-models-autoload --jinja --no-jinja --reasoning-format -rea
--reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message --reasoning-preserve
--no-reasoning-preserve --chat-template --chat-template-file --sleep-idle-seconds -md --model-draft --draft-max
--draft-min --draft-p-min -devd --device-draft -ngld --gpu-layers-draft
"""

TOOLS = {
    "serve": (serve_flags.parser, llama_server.SERVE, LLAMA_SERVER),
    "run": (flags.parser, llama_cpp.RUN, LLAMA_CLI),
    "bench": (bench.parser, llama_cpp.BENCH, LLAMA_BENCH),
}
ENTRIES = [(tool, entry) for tool, (_, table, _) in TOOLS.items() for entry in table]


def names(parser: Parser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_flag_is_here_or_is_answered(tool: str) -> None:
    parser, table, text = TOOLS[tool]
    theirs = text.split()
    assert len(theirs) == len(set(theirs)) > 80
    answered = [name for entry in table for name in entry.names.split()]
    assert len(answered) == len(set(answered))
    ours = names(parser())
    assert not ours & set(answered), "a flag of this program hides an answer"
    assert not set(theirs) - ours - set(answered)


@pytest.mark.parametrize(("tool", "entry"), ENTRIES, ids=lambda value: getattr(value, "names", value))
def test_an_answer_is_one_sentence_and_advises_what_exists(tool: str, entry: Flag | Other) -> None:
    parser = TOOLS[tool][0]
    text = entry.means if isinstance(entry, Other) else entry.answer
    assert "\n" not in text and not text.endswith(".") and ". " not in text
    # A flag of another command is quoted with its name.
    for command, quoted in re.findall(r"`bitmirror (\w+)([^`]*)`", text):
        if command in TOOLS:
            assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", quoted)) <= names(TOOLS[command][0]())
    own = re.sub(r"`[^`]*`", "", text)
    assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", own)) <= names(parser()), text


@pytest.mark.parametrize(("tool", "entry"), ENTRIES, ids=lambda value: getattr(value, "names", value))
def test_every_name_of_an_entry(tool: str, entry: Flag | Other) -> None:
    """Values are consumed, what holds is accepted, and the rest of the line is parsed as usual."""
    parser = TOOLS[tool][0]
    for name in entry.names.split():
        if isinstance(entry, Other):
            if name == "--usage":
                continue  # it exits
            value = ["1"] if "{}" in entry.means else []
            expected = parser().parse_args([entry.means.format(*value), "-v"])
            assert parser().parse_args([name, *value, "-v"]) == expected
            continue
        values = ["on"] if entry.values == SWITCH else ["7"] * entry.values
        plain = parser().parse_args(["-v"])
        if entry.holds == ANY:
            assert parser().parse_args([name, *values, "-v"]) == plain
            continue
        for held in entry.holds.split():
            assert parser().parse_args([name, held, "-v"]) == plain
            assert parser().parse_args([f"{name}={held}", "-v"]) == plain
        refused = ["off"] if entry.values == SWITCH else values
        with pytest.raises(UsageError) as caught:
            parser().parse_args([name, *refused, "-v"])
        assert str(caught.value) == f"{' '.join([name, *refused])}: {entry.answer}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--mirostat"], "--mirostat needs a value"),
        (["--control-vector-layer-range", "1"], "--control-vector-layer-range needs 2 values"),
        (["--jinja=yes"], "--jinja takes no value"),
    ],
)
def test_a_value_is_missing_or_too_much(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        flags.parser().parse_args(words)


def parsed(*words: str, parser: Callable[[], Parser] = flags.parser) -> dict[str, object]:
    """The arguments that differ from the defaults."""
    default = vars(parser().parse_args([]))
    return {name: value for name, value in vars(parser().parse_args(list(words))).items() if value != default[name]}


def test_models_of_the_hub() -> None:
    for name in ("-hf", "-hfr", "--hf-repo"):
        assert parsed(name, "a/b:Q4_K_M")["model"] == "hf:a/b:Q4_K_M"
    assert parsed("-hf", "a/b")["model"] == "hf:a/b"
    assert parsed("-hf", "a/b:Q8_0", "-hff", "c-Q4_0.gguf")["model"] == "hf:a/b/c-Q4_0.gguf"
    assert parsed("-hf", "a/b", parser=bench.parser)["model"] == ["hf:a/b"]
    assert parsed("-hfd", "a/b:Q8_0") == {"draft_model": "hf:a/b:Q8_0"}


def test_layers_on_a_gpu() -> None:
    for name in ("-ngl", "--gpu-layers", "--n-gpu-layers"):
        assert parsed(name, "0") == {"gpu_layers": 0, "device": "cpu"}
        for everything in ("all", "auto", "-1"):
            assert parsed(name, everything) == {}
        assert parsed(name, "99") == {"gpu_layers": 99}
    assert parsed("-mg", "1") == {"device": "cuda:1"}
    words = "-ngl", "99", "-fa", "-sm", "none", "-mg", "0", "--jinja"
    assert parsed(*words) == {"gpu_layers": 99, "split_mode": "none", "device": "cuda:0"}
    assert parsed("-sm", "layer", "-ts", "3,1") == {"tensor_split": "3,1"}
    assert parsed("-ngl", "99", "-mmp", "1", "-fa", "1", parser=bench.parser) == {"gpu_layers": 99}


def test_a_switch_takes_a_value_only_if_one_follows() -> None:
    for words in (["-fa"], ["-fa", "on"], ["--flash-attn", "auto"], ["--flash_attn=off"]):
        assert parsed(*words, "Hello") == {"words": "Hello", "prompt": "Hello"}


def test_underscores_are_dashes() -> None:
    assert parsed("--ctx_size", "64", "--no_context_shift", "--chat_template=a_b") == {
        "ctx_size": 64,
        "chat_template": "a_b",
    }


def test_interactive_is_a_conversation() -> None:
    for name in ("-i", "--interactive", "-if", "--interactive-first"):
        assert parsed(name) == {"cnv": True}
