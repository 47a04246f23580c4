"""The fields that each route accepts: those it obeys, those it refuses, and those that change no answer here.

A field that is in no table is ignored and named in the line of the log.
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from engine.serving.fields import Fields


class Effect(Enum):
    """What a route does with a field."""

    OBEYED = "obeyed"
    REFUSED = "refused"
    IDLE = "without effect"


EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
"""Values with which a field asks for nothing."""

UNSUPPORTED = "is not supported by this server: leave it out"


class Rule(NamedTuple):
    """What a route does with a field: its effect and, for one that is refused, the problem and the values that are not
    refused because they ask for nothing."""

    effect: Effect
    problem: str = UNSUPPORTED
    off: tuple[Any, ...] = EMPTY


Table = Mapping[str, Rule]

FORM = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("grammar", "json_schema"),
)
"""Fields that say what an answer may be: vLLM's and llama-server's."""

RARE = (
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("xtc_probability", "xtc_threshold", "min_tokens", "stop_token_ids", "allowed_token_ids"),
)
"""DRY, XTC, and which tokens may come: fields that every route reads."""

PENALTIES = ("typical_p", "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")
"""Fields of sampling that every route reads under these names."""

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "ignore_eos", "seed", "logit_bias", "repetition_penalty"),
    *PENALTIES,
    *RARE,
)
"""Fields of sampling that all routes but ``/completion`` read in the same way."""

COMMON = ("model", "stream", "cache_salt")
"""Fields of every route."""

OFF: Mapping[str, tuple[Any, ...]] = {
    "mirostat": (0, False),
    "best_of": (1,),
    "tfs_z": (0, 1),
    "top_n_sigma": (-1, 0),
    "adaptive_target": (-1,),
    "dynatemp_range": (0,),
    "thinking_budget_tokens": (-1,),
    "reasoning_budget": (-1,),
    "t_max_predict_ms": (-1, 0),
    "prompt_logprobs": (),
    "modalities": (["text"],),
}
"""Values that switch a field off, where they are not those of :data:`EMPTY`."""

PROBLEMS = {
    "modalities": 'must be ["text"]: this server answers in text only',
    "best_of": "is not supported by this server: ask for n answers, and choose one of them",
}

CHANGING = (
    *FORM,
    *("mirostat", "tfs_z", "top_n_sigma", "dynatemp_range", "adaptive_target", "samplers", "lora", "n_indent"),
    *("t_max_predict_ms", "post_sampling_probs", "response_fields", "thinking_budget_tokens", "reasoning_budget"),
    *("bad_words", "best_of", "use_beam_search", "include_stop_str_in_output", "prompt_logprobs", "logits_processors"),
    *("truncate_prompt_tokens", "guided_whitespace_pattern", "thinking_token_budget", "documents"),
    *("chat_template", "input_prefix", "input_suffix", "repetition_detection", "return_token_ids"),
    "receipt",
)
"""Fields that change an answer where they are known: a route that does not obey them refuses them."""

IDLE = (
    *("mirostat_tau", "mirostat_eta", "mirostat_lr", "mirostat_ent", "dynatemp_exponent", "adaptive_decay"),
    *("guided_decoding_backend", "priority", "request_id", "cache_prompt", "id_slot", "n_keep", "timings_per_token"),
)
"""Fields that change no answer on any route; the first line depends on fields that are refused."""


def _table(
    obeyed: Iterable[str], refused: Iterable[str] = (), idle: Iterable[str] = (), changing: Iterable[str] = CHANGING
) -> dict[str, Rule]:
    obeyed, idle = tuple(obeyed), (*idle, *IDLE)
    table = {name: Rule(Effect.OBEYED) for name in obeyed}
    for name in (*refused, *changing):
        rule = Rule(Effect.REFUSED, PROBLEMS.get(name, UNSUPPORTED), OFF.get(name, EMPTY))
        table.setdefault(name, rule)
    return table | {name: Rule(Effect.IDLE) for name in idle if name not in table}


OPENAI_IDLE = (
    *("user", "metadata", "store", "service_tier", "verbosity", "prediction", "prompt_cache_key", "safety_identifier"),
    *("prompt_cache_options", "prompt_cache_retention", "moderation", "web_search_options", "add_generation_prompt"),
    *("length_penalty", "skip_special_tokens", "spaces_between_special_tokens"),
)

CHAT = _table(
    (
        *(*COMMON, *SAMPLING, *FORM, "messages", "tools", "tool_choice", "parallel_tool_calls"),
        *("continue_final_message", "reasoning_effort", "response_format", "chat_template_kwargs", "logprobs"),
        *("top_logprobs", "max_completion_tokens", "max_tokens", "n_predict", "n", "stop", "stream_options"),
        *("add_generation_prompt", "receipt"),
    ),
    ("modalities", "audio", "functions", "function_call", "echo"),
    OPENAI_IDLE,
)

COMPLETIONS = _table(
    (
        *(*COMMON, *SAMPLING, *FORM, "prompt", "response_format", "n", "best_of", "logprobs", "echo", "max_tokens"),
        *("n_predict", "stop", "stream_options", "receipt"),
    ),
    ("tools", "messages"),
    OPENAI_IDLE,
) | {
    "suffix": Rule(Effect.REFUSED, "is not supported by this server, which continues texts at their end: leave it out")
}

STORED = "refers to what a service has stored, and this server stores nothing: "

RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "n_predict": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": 'include: ["message.output_text.logprobs"]',
}
"""Fields of ``/v1/chat/completions`` that have another name in ``/v1/responses``."""

RESPONSES = (
    _table(
        (
            *(*COMMON, *SAMPLING, *FORM, "input", "instructions", "include", "text", "reasoning", "tools"),
            *("tool_choice", "parallel_tool_calls", "chat_template_kwargs", "top_logprobs", "max_output_tokens"),
            *("stop", "metadata", "user", "safety_identifier", "prompt_cache_key", "store", "truncation", "receipt"),
        ),
        idle=(
            *("access_programs", "background_options", "context_management", "image", "max_tool_calls", "moderation"),
            *("personality", "prompt_cache_options", "prompt_cache_retention", "service_tier", "stream_options"),
        ),
    )
    | {
        "previous_response_id": Rule(Effect.REFUSED, f"{STORED}send the whole conversation as input", ()),
        "conversation": Rule(Effect.REFUSED, f"{STORED}send the whole conversation as input", ()),
        "prompt": Rule(Effect.REFUSED, f"{STORED}send its text as instructions and input", ()),
        "background": Rule(
            Effect.REFUSED, "is not supported, because this server stores no responses: use stream instead"
        ),
        "n": Rule(Effect.REFUSED, "is not supported by /v1/responses: send several requests", (1,)),
    }
    | {
        name: Rule(Effect.REFUSED, f"is a field of /v1/chat/completions: /v1/responses calls it {here}", ())
        for name, here in RENAMED.items()
    }
)

MESSAGES = _table(
    (
        *(*COMMON, *SAMPLING, "max_tokens", "messages", "system", "tools", "tool_choice", "thinking", "stop_sequences"),
        *("output_config", "receipt"),
    ),
    ("output_format", "mcp_servers"),
    ("cache_control", "container", "context_management", "inference_geo", "metadata", "service_tier", "speed"),
)

COMPLETION = _table(
    (
        *(*COMMON, *FORM, *PENALTIES, *RARE, "prompt", "parse_special", "n_predict", "max_tokens", "n_probs"),
        *("seed", "temperature", "top_k", "top_p", "min_p", "ignore_eos", "logit_bias", "stop", "return_tokens"),
        *("return_progress", "id_slot"),
    )
)

OPTIONS = _table(
    (*SAMPLING, "num_ctx", "num_predict", "stop"),
    idle=(
        *("numa", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "f16_kv", "use_mmap", "use_mlock"),
        *("vocab_only", "logits_all", "embedding_only", "num_keep", "draft_num_predict"),
    ),
)
"""The object ``options`` of Ollama's requests."""

_OLLAMA = (*COMMON, "options", "format", "think", "logprobs", "top_logprobs", "keep_alive")

API_CHAT = _table((*_OLLAMA, "messages", "tools"), ("_debug_render_only",), ("truncate", "shift"), FORM)

API_GENERATE = _table(
    (*_OLLAMA, "prompt", "system", "raw"),
    ("suffix", "template", "context", "images", "_debug_render_only"),
    ("truncate", "shift"),
    FORM,
)

SCORE = _table((*COMMON, "input", "top_logprobs"), ("truncate_prompt_tokens",), ("user",), changing=()) | {
    name: Rule(Effect.REFUSED, "is a field of rerankers: send a query and documents to /v1/rerank", ())
    for name in ("text_1", "text_2", "query", "documents")
}

ROUTES: Mapping[str, Table] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/completion": COMPLETION,
    "/api/chat": API_CHAT,
    "/api/generate": API_GENERATE,
}
"""The fields of each route that answers."""


def _reading(table: Table, *obeyed: str) -> dict[str, Rule]:
    """The fields of a route that only reads the prompt of another one, whose fields these are: ``obeyed`` concern the prompt,
    and the others that are obeyed there are without effect."""
    idle = Rule(Effect.IDLE)
    return {name: idle if rule.effect is Effect.OBEYED and name not in obeyed else rule for name, rule in table.items()}


READING: Mapping[str, Table] = {
    "/v1/messages/count_tokens": _reading(
        MESSAGES, "model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"
    ),
    "/v1/responses/input_tokens": _reading(
        RESPONSES,
        *(*FORM, "model", "input", "instructions", "text", "reasoning", "tools", "tool_choice", "chat_template_kwargs"),
        "parallel_tool_calls",
    ),
    "/v1/chat/completions/input_tokens": _reading(
        CHAT,
        *(*FORM, "response_format", "model", "messages", "tools", "tool_choice", "parallel_tool_calls"),
        *("continue_final_message", "add_generation_prompt", "reasoning_effort", "chat_template_kwargs"),
    ),
    "/apply-template": _reading(
        CHAT,
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"),
        "chat_template_kwargs",
    )
    | {
        "add_generation_prompt": Rule(Effect.OBEYED),
        "continue_final_message": Rule(Effect.REFUSED, "is not supported by /apply-template: leave it out"),
    },
    "/tokenize": _table(
        ("model", "content", "add_special", "parse_special", "with_pieces", "prompt", "add_special_tokens"),
        ("return_token_strs",),
        changing=(),
    )
    | {"messages": Rule(Effect.REFUSED, "are no text: send them to /apply-template first", ())},
    "/detokenize": _table(("model", "tokens"), changing=()),
}
"""The fields of each route that reads a prompt or a text, and answers nothing."""


EMBEDDINGS = _table(
    ("model", "input", "encoding_format", "dimensions", "truncate_prompt_tokens"),
    ("messages", "embd_normalize", "normalize"),
    ("user", "add_special_tokens"),
    changing=(),
) | {
    "normalize": Rule(Effect.REFUSED, "must be true: vectors are always divided by their length", (True,)),
    "embd_normalize": Rule(Effect.REFUSED, "must be 2: vectors are always divided by their length", (2,)),
}

RERANK = _table(
    (
        *("model", "query", "documents", "texts", "top_n", "return_documents", "return_text", "truncate"),
        "truncate_prompt_tokens",
    ),
    ("instruction",),
    ("user", "max_tokens_per_doc", "truncation_direction"),
    changing=(),
) | {"raw_scores": Rule(Effect.REFUSED, "is not supported by this server: leave it out", (False,))}

POOLED: Mapping[str, Table] = {
    "/v1/embeddings": EMBEDDINGS,
    "/v1/rerank": RERANK,
    "/v1/reranking": RERANK,
    "/api/embed": _table(("model", "input", "truncate", "dimensions", "keep_alive"), idle=("options",), changing=()),
    "/api/embeddings": _table(("model", "prompt", "keep_alive"), idle=("options",), changing=()),
}
"""The fields of each route that turns texts into vectors or scores."""


TRACE = _reading(
    CHAT,
    *(*FORM, "response_format", "model", "messages", "tools", "tool_choice", "parallel_tool_calls"),
    *("continue_final_message", "add_generation_prompt", "reasoning_effort", "chat_template_kwargs", "cache_salt"),
    "top_logprobs",
) | {name: Rule(Effect.OBEYED) for name in ("input", "answer", "token", "drafts")}

EVIDENCE: Mapping[str, Table] = {
    "/v1/score": SCORE,
    "/v1/verify": _table(("model", "receipt"), changing=()),
    "/v1/trace": TRACE,
}
"""The fields of each route that says how probable a text is, whether an answer is true, or how a token was computed."""

_TABLES: Mapping[str, Table] = {**ROUTES, **READING, **POOLED, **EVIDENCE}


SLOTS = _table(("model", "filename", "cache_salt"), changing=())
"""The fields of what is done with a slot."""


def table_of(path: str) -> Table:
    """The fields of a route, whose path may lack the ``/v1`` of OpenAI's."""
    if path.startswith("/slots/"):
        return SLOTS
    return _TABLES[path if path in _TABLES else "/v1" + path]


def check(fields: Fields, table: Table) -> None:
    """Refuse what a table refuses, and take note of what is without effect."""
    for name, value in fields.values.items():
        rule = table.get(name)
        if rule is None or rule.effect is Effect.OBEYED:
            continue
        fields.ignore(name)
        if rule.effect is Effect.REFUSED and value is not None and value not in rule.off:
            raise fields.refuse(name, rule.problem)
