"""llama-server's flags that ``bitmirror serve`` spells differently or lacks, and the message for each.

Flags that llama-server shares with llama-cli have the entries of ``engine/cli/llama_cpp.py``, unless their advice is meant
for one answer on the command line.
"""

from engine.cli.llama_cpp import ANY, RUN, SWITCH, Flag, Other

SAMPLING = "this is set in a request; --temp, --top-p and their like set what counts for requests that do not say"
GRAMMAR = "each request has its own grammar, as response_format, grammar or json_schema"
PER_REQUEST = "each request says so itself, in chat_template_kwargs or reasoning_effort; leave this flag out"
THOUGHTS = "thoughts are always reasoning_content; leave this flag out"
NO_BUDGET = "reasoning is not limited separately; limit the whole answer with max_tokens in the request"
NO_TOOLS = "the server runs no tools; the program that asks runs them"
PAGE = "the page at / is there unless --no-webui is given; leave this flag out"
NO_CONFIG = "the page at / keeps its settings in the browser; leave this flag out"
CORS = "the methods and headers of the routes are always allowed to --cors-origins; leave this flag out"
SHARED = "texts that begin alike always share what the cache holds; leave this flag out"
POOL = "all slots share the memory of one cache; set the context of each with -c"

OWN: tuple[Other | Flag, ...] = (
    # Answers: a request says what llama-server has as defaults.
    Flag("-n --predict --n-predict", 1, "limit an answer with max_tokens in its request", holds="-1"),
    Flag("-s --seed -l --dry-sequence-breaker", 1, SAMPLING),
    Flag("--samplers --sampler-seq --sampling-seq", 1, SAMPLING),
    Flag("--mirostat --dynatemp-range", 1, SAMPLING, holds="0"),
    Flag("--mirostat-lr --mirostat-ent --dynatemp-exp --adaptive-decay", 1, SAMPLING),
    Flag("--adaptive-target --top-nsigma --top-n-sigma", 1, SAMPLING, holds="-1"),
    Flag("--ignore-eos", 0, "set ignore_eos in a request"),
    Flag("-r --reverse-prompt", 1, "set stop in a request"),
    Flag("-e --escape", 0, "requests are JSON, which has its own escapes", holds=ANY),
    Flag("--no-escape", 0, "requests are JSON, which has its own escapes; leave this flag out"),
    Flag("--grammar --grammar-file -j --json-schema -jf --json-schema-file", 1, GRAMMAR),
    Flag("-sp --special", 0, "control tokens are not sent as text; /tokenize and /detokenize show them"),
    Flag("--spm-infill", 0, "filling in the middle is not supported; leave this flag out"),
    # Thoughts and templates.
    Flag("--reasoning-effort --chat-template-kwargs", 1, PER_REQUEST),
    Flag("-rea --reasoning", SWITCH, PER_REQUEST, holds="auto"),
    Flag("--reasoning-format", 1, THOUGHTS, holds="auto deepseek"),
    Flag("--reasoning-budget", 1, NO_BUDGET, holds="-1"),
    Flag("--reasoning-budget-message", 1, NO_BUDGET),
    Flag("--no-jinja", 0, "chat templates are always Jinja; continue a bare text with /v1/completions"),
    # The cache.
    Flag("-cb --cont-batching", 0, "answers are always computed together", holds=ANY),
    Flag(
        "-nocb --no-cont-batching",
        0,
        "answers are computed together, and are the same alone; use -np 1 for one at a time",
    ),
    Flag("--cache-prompt", 0, SHARED, holds=ANY),
    Flag("--no-cache-prompt", 0, "separate requests with cache_salt; no answer depends on what the cache holds"),
    Flag("--cache-reuse", 1, SHARED, holds="0"),
    Flag("--cache-idle-slots", 0, "what idle slots hold is always kept while there is room", holds=ANY),
    Flag("--no-cache-idle-slots", 0, "what idle slots hold is kept while there is room; leave this flag out"),
    Flag("-kvu --kv-unified", 0, POOL, holds=ANY),
    Flag("-no-kvu --no-kv-unified", 0, POOL),
    Flag("--kv-unified-per-slot", 1, POOL),
    Flag("-sps --slot-prompt-similarity", 1, SHARED),
    Flag(
        "--moe-cache-mib", 1, "all layers run on one device; choose it with --device cpu or --device cuda:N", holds="0"
    ),
    Flag(
        "-lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
        1,
        "--draft-lookup uses the texts of this process only",
    ),
    Flag(
        "--control-vector --control-vector-scaled",
        1,
        "control vectors are not supported; describe the style in a message",
    ),
    Flag("--control-vector-layer-range", 2, "control vectors are not supported; describe the style in a message"),
    Flag(
        "--lora-init-without-apply", 0, "adapters are not supported; merge them into the model with llama-export-lora"
    ),
    # The server.
    Flag("--sse-ping-interval", 1, "silent streams always get a comment now and then; leave this flag out", holds="30"),
    Flag("--threads-http", 1, "one thread serves all connections; leave this flag out", holds="-1"),
    Flag("--reuse-port", 0, "one process has a port; serve several models with several -m"),
    Flag("--path", 1, "the server reads no files for its clients; serve them with another program"),
    Flag("--api-prefix", 1, "the routes have no prefix; add one in a proxy"),
    Flag("--cors-methods --cors-headers", 1, CORS),
    Flag("--cors-credentials", 0, "keys are sent in headers, which --cors-origins allows; leave this flag out"),
    Flag("--no-cors-credentials", 0, "credentials of browsers are never allowed", holds=ANY),
    Flag("--metrics --slots", 0, "this route is always there", holds=ANY),
    Flag("--no-slots", 0, "/slots shows no texts; protect it with --api-key"),
    Flag("--props", 0, "properties do not change while the server runs; set them with flags"),
    Flag("--ui --webui", 0, PAGE, holds=ANY),
    Flag("--ui-config --webui-config --ui-config-file --webui-config-file", 1, NO_CONFIG),
    Flag("--no-ui-mcp-proxy --no-webui-mcp-proxy -no-ag --no-agent", 0, NO_TOOLS, holds=ANY),
    Flag("--ui-mcp-proxy --webui-mcp-proxy -ag --agent", 0, NO_TOOLS),
    Flag("--tools-runtime --mcp-servers-config --mcp-servers-json", 1, NO_TOOLS),
    Flag("--media-path", 1, "only text input is supported; leave this flag out"),
    Flag("--embedding --embeddings --rerank --reranking", 0, "the routes are always there", holds=ANY),
    Flag("--embd-normalize", 1, "vectors are always divided by their length; leave this flag out", holds="2"),
    Flag("--tags", 1, "models have no tags; name them with --alias"),
    Flag("--models-preset", 1, "all models have the same flags; name their files with -m or --models-dir"),
    Flag("--models-autoload", 0, "models are always opened when they are asked for", holds=ANY),
    Flag("--no-models-autoload", 0, "models are opened when they are asked for; leave this flag out"),
    Flag(
        "--sleep-idle-seconds", 1, "a server without work gives memory back by itself; leave this flag out", holds="-1"
    ),
)
"""The flags that only llama-server has, and those that mean something else for a server."""

HERE = """
-np --host --server-base -i -bf -mli -o -ptc --no-display-prompt --display-prompt --in-prefix --in-prefix-bos --prompt-cache
--prompt-cache-all --simple-io
"""
"""One flag each of the entries for ``bitmirror run`` that ``serve`` has, or that llama-server lacks."""

_REPLACED = {name for entry in OWN for name in entry.names.split()} | set(HERE.split())

SERVE = (*(entry for entry in RUN if not _REPLACED & set(entry.names.split())), *OWN)
"""The flags of llama-server that ``bitmirror serve`` spells differently or lacks."""
