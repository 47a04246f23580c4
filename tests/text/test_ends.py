"""Which tokens end an answer, in vocabularies with the special tokens of each family, as llama.cpp converts them.

The rules are those of ``src/llama-vocab.cpp`` of llama.cpp: the tokens that keys name (eos, eot, eom, padding and
separators of fill-in-the-middle), and tokens with certain texts.
"""

import pytest

from engine.text.tokenizer import Tokenizer
from tests.vocabularies import CONTROL, NORMAL, UNUSED, USER, bpe_metadata, made, spm_metadata

HARMONY = "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>"
GLM = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> </think> <|code_prefix|>"
APERTUS = (
    "<s> </s> <pad> <|system_start|> <|system_end|> <|developer_start|> <|developer_end|> <|user_start|> <|user_end|>"
    " <|assistant_start|> <|assistant_end|> <|inner_prefix|> <|inner_suffix|>"
)
CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
QWEN = f"{CHATML} <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"

# name: special tokens; keys with the text of their token; the tokens at which an answer ends
FAMILIES: dict[str, tuple[str, dict[str, str], str]] = {
    "gpt-oss": (HARMONY, {"eos": "<|return|>", "padding": "<|endoftext|>"}, "<|return|> <|call|> <|endoftext|>"),
    "solar-open": (
        "<|endoftext|> <|end|> <|flush|> <|calls|>",
        {"eos": "<|flush|>"},
        "<|flush|> <|calls|> <|endoftext|>",
    ),
    "glm4moe": (
        GLM,
        {"eos": "<|endoftext|>", "eot": "<|user|>", "eom": "<|observation|>"},
        "<|endoftext|> <|user|> <|observation|>",
    ),
    "minimax-m2": ("]!p~[ ]~!b[ ]~b] [e~[ <think> </think>", {"bos": "]~!b[", "eos": "[e~["}, "[e~["),
    "minimax-m2 with another eos": ("]!p~[ ]~!b[ ]~b] [e~[", {"eos": "]!p~["}, "[e~[ ]!p~["),
    "granite": (
        "<|end_of_text|> <|start_of_role|> <|end_of_role|> <|tool_call|> <fim_prefix> <fim_pad> <reponame>",
        {"bos": "<|end_of_text|>", "eos": "<|end_of_text|>", "padding": "<|end_of_text|>"},
        "<|end_of_text|> <fim_pad> <reponame>",
    ),
    "apertus": (APERTUS, {"bos": "<s>", "eos": "<|assistant_end|>", "padding": "<pad>"}, "<|assistant_end|> </s>"),
    "apertus, base model": (APERTUS, {"bos": "<s>", "eos": "</s>", "padding": "<pad>"}, "</s>"),
    "exaone4": (
        "[PAD] [BOS] [EOS] [UNK] [|system|] [|user|] [|assistant|] [|endofturn|] [|tool|]",
        {"bos": "[BOS]", "eos": "[|endofturn|]", "padding": "[PAD]"},
        "[|endofturn|] [EOS] [PAD]",
    ),
    "phi-4": (f"{CHATML} <|im_sep|>", {"bos": "<|endoftext|>", "eos": "<|im_end|>"}, "<|im_end|> <|endoftext|>"),
    "phi-4-mini": (
        "<|endoftext|> <|assistant|> <|end|> <|user|> <|system|> <|tool|> <|/tool|>",
        {"eos": "<|endoftext|>"},
        "<|end|> <|endoftext|>",
    ),
    "hunyuan-moe": (
        "<|startoftext|> <|endoftext|> <|extra_0|> <|extra_4|> <|eos|> <|pad|>",
        {"bos": "<|startoftext|>", "eos": "<|eos|>", "padding": "<|pad|>"},
        "<|eos|> <|endoftext|>",
    ),
    "hunyuan-dense": (
        "<｜hy_begin▁of▁sentence｜> <｜hy_User｜> <｜hy_Assistant｜> <｜hy_place▁holder▁no▁2｜> <｜hy_place▁holder▁no▁3｜>",
        {"bos": "<｜hy_begin▁of▁sentence｜>", "eos": "<｜hy_place▁holder▁no▁2｜>"},
        "<｜hy_place▁holder▁no▁2｜>",
    ),
    "mistral": ("<unk> <s> </s> [INST] [/INST] [TOOL_CALLS] [SYSTEM_PROMPT]", {"bos": "<s>", "eos": "</s>"}, "</s>"),
    "seed-oss": (
        "<seed:bos> <seed:pad> <seed:eos> <seed:think> </seed:think>",
        {"bos": "<seed:bos>", "eos": "<seed:eos>"},
        "<seed:eos>",
    ),
    "smollm3": (
        "<|begin_of_text|> <|end_of_text|> <|im_start|> <|im_end|> <think> </think>",
        {"eos": "<|im_end|>"},
        "<|im_end|> <|end_of_text|>",
    ),
    "olmo2": ("<|endoftext|> <|pad|>", {"bos": "<|endoftext|>", "eos": "<|endoftext|>"}, "<|endoftext|>"),
    "kimi-k2": (
        "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_middle|> [EOT] [PAD]",
        {"bos": "[BOS]", "eos": "<|im_end|>"},
        "<|im_end|> [EOS] [EOT] [PAD]",
    ),
    "qwen3": (QWEN, {"eos": "<|im_end|>"}, "<|im_end|> <|endoftext|> <|fim_pad|> <|repo_name|> <|file_sep|>"),
    "llama 3": (
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|>",
        {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"},
        "<|eot_id|> <|eom_id|> <|end_of_text|>",
    ),
}
KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "eot": "eot_token_id", "eom": "eom_token_id"}


def vocabulary(special: str, keys: dict[str, str], kind: int = CONTROL) -> Tokenizer:
    values = bpe_metadata([], dict.fromkeys(special.split(), kind), add_bos_token=False)
    tokens = values["tokenizer.ggml.tokens"]
    ids = {KEYS.get(name, f"{name}_token_id"): tokens.index(text) for name, text in keys.items()}
    return made(values | {f"tokenizer.ggml.{key}": id for key, id in ids.items()})


def ends(tok: Tokenizer) -> set[str]:
    return {tok.vocabulary.tokens[id] for id in tok.eog_ids}


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_that_end_an_answer(name: str) -> None:
    special, keys, expected = FAMILIES[name]
    tok = vocabulary(special, keys)
    assert ends(tok) == set(expected.split())
    # No text of a user becomes one of them, and none shows in an answer.
    assert not tok.eog_ids & set(tok.encode(special))
    assert tok.decode(sorted(tok.eog_ids)) == ""


@pytest.mark.parametrize("kind", [NORMAL, USER])
def test_tokens_with_the_text_of_an_end_are_control_tokens_in_any_file(kind: int) -> None:
    """Converters gave some of them other types."""
    tok = vocabulary("<|return|> <|call|> <|end|> [e~[ <|end_of_text|> <|user|>", {}, kind)
    assert ends(tok) == {"<|return|>", "<|call|>", "[e~[", "<|end_of_text|>"}
    assert all(tok.token_type(id) == CONTROL for id in tok.eog_ids)
    assert tok.token_type(tok.token_id("<|user|>") or 0) == kind


def test_end_of_a_message_ends_an_answer_unless_the_vocabulary_has_return_and_call() -> None:
    assert ends(vocabulary("<|end|> <|return|>", {})) == {"<|end|>", "<|return|>"}
    assert ends(vocabulary("<|end|> <|call|>", {})) == {"<|end|>", "<|call|>"}
    assert ends(vocabulary("<|end|> <|call|> <|return|>", {})) == {"<|call|>", "<|return|>"}
    # Even if a key names it.
    assert ends(vocabulary("<|end|> <|call|> <|return|>", {"eot": "<|end|>"})) == {"<|call|>", "<|return|>"}


def test_roles_end_an_answer_only_where_a_key_names_them() -> None:
    """As in llama.cpp: a file of GLM-4.5 without eot and eom continues after ``<|user|>``."""
    assert ends(vocabulary(GLM, {"eos": "<|endoftext|>"})) == {"<|endoftext|>"}


def test_unused_tokens_end_nothing() -> None:
    tok = made(bpe_metadata([], {"<|reserved_1|>": UNUSED, "<|pad|>": CONTROL}))
    assert ends(tok) == set()


def test_phi_3() -> None:
    """SentencePiece's vocabulary: ``</s>`` of the base vocabulary is a control token, ``<|end|>`` closes an answer."""
    special = dict.fromkeys(("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"), CONTROL)
    scores = {"a": -1.0}
    tok = made(spm_metadata(scores, special, eos_token_id=3 + 256 + 1, add_bos_token=True))
    assert ends(tok) == {"<|endoftext|>", "<|end|>", "</s>"}
    assert ends(made(spm_metadata(scores))) == {"</s>"}


def test_phi_3_sees_no_blanks_after_the_tokens_of_a_turn() -> None:
    """As the tokens with ``rstrip`` of its ``tokenizer_config.json``: its chat template ends these lines."""
    special = dict.fromkeys(("<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"), CONTROL)
    values = spm_metadata({"a": -1.0, "\u2581": -2.0}, special, add_space_prefix=False, add_bos_token=False)
    plain, phi3 = made(values), made(values | {"general.architecture": "phi3"})

    def texts(tok: Tokenizer, text: str) -> list[str]:
        return [tok.vocabulary.tokens[id] for id in tok.encode(text, parse_special=True)]

    text = "<|user|>\n \ta a<|end|>\n<|assistant|>\n"
    assert texts(phi3, text) == ["<|user|>", "a", "\u2581", "a", "<|end|>", "<|assistant|>"]
    assert texts(phi3, "<s> a<|endoftext|> a </s> a\n") == [
        *("<s>", "\u2581", "a", "<|endoftext|>", "\u2581", "a", "\u2581", "</s>", "a", "<0x0A>")
    ]
    # Text that only looks like a token keeps its blanks, and so do other models with these tokens.
    assert phi3.decode(phi3.encode(text)) == plain.decode(plain.encode(text)) == text
    assert texts(plain, "<|user|>\na") == ["<|user|>", "<0x0A>", "a"]
