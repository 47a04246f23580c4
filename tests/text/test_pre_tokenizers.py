"""Pre-tokenizers cut text as those that the models were published with, on text in 36 scripts (``scripts.txt``).

``PUBLISHED`` has the member ``pre_tokenizer`` of each model's ``tokenizer.json`` (for Kimi and Hunyuan the expression of the
model's tokenizer for tiktoken), which the ``tokenizers`` library executes.  The engine's expressions are written in another
way: without ``(?i:)``, intersections of classes, possessive repetition, and without the library's own steps for digits and
for GPT-2's expression.
"""

from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import PreTokenizedString, Regex, pre_tokenizers

from engine.errors import TokenizerError
from engine.text import bpe
from engine.text.bpe import PRE_TOKENIZERS
from tests.growth import FACTOR, MOST, growth
from tests.tiers import examples
from tests.vocabularies import bpe_metadata, made

CORPUS = (Path(__file__).parent / "scripts.txt").read_bytes().decode("utf-8")
BLOCKS = [block for block in CORPUS.split("=== ") if block]

# Bytes without an expression; with GPT-2's expression.
BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
GPT2: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "isolated", "invert": False}


def removed(pattern: str) -> dict[str, Any]:
    """What does not match is removed: the form into which vocabularies of tiktoken are converted."""
    return {"type": "Split", "pattern": pattern, "behavior": "removed", "invert": True}


def words(digits: str) -> str:
    """The expression of cl100k_base."""
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def cased(suffix: str, digits: str) -> str:
    """The expression of o200k_base, with which a word begins at a capital letter."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{suffix}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+{SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*{SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
DEEPSEEK_V3 = (
    split(r"\p{N}{1,3}"),
    split("[一-龥\u3040-ゟ゠-ヿ]+"),
    split(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    BYTES,
)
# Ranges of the alphabets with two cases, the published ones in both.
DEEPSEEK_LETTERS = PRE_TOKENIZERS["deepseek-llm"].patterns[1].removeprefix(r"\s?")
DEEPSEEK_LLM = (
    split(r"[\r\n]"),
    split(rf"\s?{DEEPSEEK_LETTERS}"),
    split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
    split(r"\s+$"),
    split("[一-龥\u0800-一가-\ud7ff]+"),
    DIGITS,
    BYTES,
)
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRIPLES = words(r"\p{N}{1,3}")

PUBLISHED: dict[str, tuple[str, tuple[dict[str, Any], ...]]] = {
    "bailingmoe": ("inclusionAI/Ling-lite", (split(BAILING), BYTES)),
    "bailingmoe2": ("inclusionAI/Ling-mini-base-2.0", (split(BAILING), BYTES)),
    "chatglm-bpe": ("zai-org/glm-4-9b-chat", (split(TRIPLES), BYTES)),
    "cohere2moe": (
        "CohereLabs/tiny-aya-base and North-Mini-Code-1.0, as llama.cpp quotes them",
        (split(r"\d{1,3}(?=(?:\d{3})*\b)"), split(cased(SUFFIX, r"\p{N}{1,3}")), BYTES),
    ),
    "command-r": ("CohereLabs/c4ai-command-r-v01", (DIGITS, GPT2)),
    "dbrx": ("databricks/dbrx-base, microsoft/phi-4, allenai/OLMo-2-1124-7B", (removed(TRIPLES), BYTES)),
    "deepseek-llm": ("deepseek-ai/deepseek-llm-7b-base", DEEPSEEK_LLM),
    "deepseek-r1-qwen": ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", (split(words(r"\p{N}")), BYTES)),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", DEEPSEEK_V3),
    "exaone": ("LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct", (DIGITS, GPT2)),
    "exaone-moe": ("LGAI-EXAONE/K-EXAONE-236B-A23B", (split(EXAONE_MOE), BYTES)),
    "exaone4": ("LGAI-EXAONE/EXAONE-4.0-32B", (GPT2,)),
    "glm4": ("zai-org/GLM-4.5-Air", (split(TRIPLES), BYTES)),
    "gpt-2": ("openai-community/gpt2", (GPT2,)),
    "gpt-4o": ("openai/gpt-oss-20b", (split(cased(SUFFIX, r"\p{N}{1,3}")), BYTES)),
    "hunyuan": ("tencent/Hunyuan-A13B-Instruct", (split(words(r"\p{N}")),)),
    "hunyuan-dense": ("tencent/Hunyuan-4B-Instruct", DEEPSEEK_V3),
    "kimi-k2": ("moonshotai/Kimi-K2-Base", (split(KIMI),)),
    "llama-bpe": ("meta-llama/Meta-Llama-3-8B", (split(TRIPLES), BYTES)),
    "llama4": ("meta-llama/Llama-4-Scout-17B-16E-Instruct", (split(cased(SUFFIX, r"\p{N}{1,3}")), BYTES)),
    "minicpm5": ("openbmb/MiniCPM5-1B", (split(r"\p{N}{1,3}"), split(words(r"\p{N}+")), BYTES)),
    "minimax-m2": ("MiniMaxAI/MiniMax-M2", (split(cased(SUFFIX, r"\p{N}{1,3}")), BYTES)),
    "qwen2": ("Qwen/Qwen3-8B", (split(words(r"\p{N}")), BYTES)),
    "qwen35": ("Qwen/Qwen3.5-9B", (split(QWEN35), BYTES)),
    "refact": ("smallcloudai/Refact-1_6-base, ibm-granite/granite-3.3-2b-instruct", (DIGITS, GPT2)),
    "seed-coder": ("ByteDance-Seed/Seed-OSS-36B-Instruct", (split(SEED), BYTES)),
    "smaug-bpe": ("abacusai/Smaug-Llama-3-70B-Instruct, HuggingFaceTB/SmolLM3-3B", (split(TRIPLES), BYTES)),
    "smollm": ("HuggingFaceTB/SmolLM-135M", (DIGITS, GPT2)),
    "starcoder": ("bigcode/starcoder2-3b", (DIGITS, GPT2)),
    "tekken": ("mistralai/Mistral-Nemo-Base-2407, swiss-ai/Apertus-8B-2509", (split(cased("", r"\p{N}")), BYTES)),
}


def step(given: dict[str, Any]) -> Any:
    values = dict(given)
    kind = values.pop("type")
    if kind == "Split":
        return pre_tokenizers.Split(Regex(values["pattern"]), values["behavior"], values["invert"])
    return getattr(pre_tokenizers, kind)(**values)


def pieces(cutter: Any, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_text_is_cut_as_by_the_published_tokenizer(name: str) -> None:
    ours = made(bpe_metadata([], pre=name, add_bos_token=False))._model.tokenizer.pre_tokenizer  # type: ignore[union-attr]
    theirs = pre_tokenizers.Sequence([step(each) for each in PUBLISHED[name][1]])
    for text in (*BLOCKS, CORPUS):
        found = pieces(ours, text)
        assert found == pieces(theirs, text)
        assert "".join(found) == text


def test_corpus_tells_pre_tokenizers_apart() -> None:
    """No two of the expressions cut it in the same way, so a name that is assigned the wrong ones fails."""
    cutters = {}
    for name, pre in PRE_TOKENIZERS.items():
        if pre.patterns:
            tok = made(bpe_metadata([], pre=name, add_bos_token=False))
            cutters[pre.patterns] = tok._model.tokenizer.pre_tokenizer  # type: ignore[union-attr]
    assert len({tuple(pieces(cutter, CORPUS)) for cutter in cutters.values()}) == len(cutters)


def test_corpus_has_what_pre_tokenizers_distinguish() -> None:
    scripts = regex.findall(r"\w", CORPUS)
    names = [
        *("Latin", "Greek", "Cyrillic", "Armenian", "Georgian", "Hebrew", "Arabic", "Syriac", "Thaana", "Devanagari"),
        *(
            "Bengali",
            "Gurmukhi",
            "Gujarati",
            "Oriya",
            "Tamil",
            "Telugu",
            "Kannada",
            "Malayalam",
            "Sinhala",
            "Thai",
            "Lao",
        ),
        *("Khmer", "Myanmar", "Tibetan", "Mongolian", "Ethiopic", "Cherokee", "Canadian_Aboriginal", "Tifinagh"),
        *("Hangul", "Han", "Hiragana", "Katakana", "Bopomofo", "Yi", "Deseret"),
    ]
    assert [name for name in names if not any(regex.match(rf"\p{{Script={name}}}", each) for each in scripts)] == []
    assert len(names) == 36
    for kind in (
        "Lu",
        "Ll",
        "Lt",
        "Lm",
        "Lo",
        "Mn",
        "Mc",
        "Me",
        "Nd",
        "Nl",
        "No",
        "Pc",
        "Pd",
        "Ps",
        "Sm",
        "Sc",
        "Sk",
        "So",
    ):
        assert regex.search(rf"\p{{{kind}}}", CORPUS), kind
    for text in (
        "\r\n",
        "\n\n\n",
        "\t\t",
        "  ",
        "\u00a0",
        "\u3000",
        "\u2028",
        "\u200d",
        "\ufe0f",
        "\U0001f3fd",
        "e\u0301",
        "'LL",
    ):
        assert text in CORPUS, repr(text)


RUNS = (
    *(" ", "\n", "\t", "\u00a0", " \n", "1", "\u00b2", "a", "A", "\u00aaA", "\u02b0", "e\u0301", "\u4e00", "\u304b"),
    *("!", "$", "'s", " a", "\u2028", "\U0001f600", "\x01"),
)
"""What is repeated to make an expression search in vain: characters of each class, alone and with those of another."""

LETTERS = st.sampled_from("ab\u4e00\u5b57A1\u00b2 \n\t.,\u3002\uff0c'!s\u0301\u00aa")


@pytest.mark.parametrize("name", [name for name, pre in PRE_TOKENIZERS.items() if pre.cut])
def test_a_long_text_can_be_cut_into_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut first, the whole text or its parts, makes no difference."""
    monkeypatch.setattr(bpe, "PART", 3)
    model = made(bpe_metadata([], pre=name, add_bos_token=False))._model
    assert isinstance(model, bpe.BPE)
    cutter = model.tokenizer.pre_tokenizer

    def check(text: str) -> None:
        assert [piece for part in model.parts(text) for piece in pieces(cutter, part)] == pieces(cutter, text)

    check(CORPUS)
    assert len(list(model.parts(CORPUS))) > 8
    examples(200, 10)(given(st.text(LETTERS, max_size=60))(check))()


DISTINCT = list({pre: name for name, pre in PRE_TOKENIZERS.items() if pre.patterns}.values())


@pytest.mark.parametrize("name", DISTINCT)
def test_long_runs_take_time_in_proportion_to_their_length(name: str) -> None:
    """Also such as end with a character of another class, after which an expression may try again from every place."""
    cutter = made(bpe_metadata([], pre=name, add_bos_token=False))._model.tokenizer.pre_tokenizer  # type: ignore[union-attr]

    def text(n: int) -> str:
        return "".join(run * (n // len(run)) + "\x01" for run in RUNS)

    assert growth(lambda text: cutter.pre_tokenize(PreTokenizedString(text)), text(1000), text(1000 * FACTOR)) < MOST


@pytest.mark.parametrize("name", ["gpt-5", "GPT-2", "tekken ", "no-such"])
def test_unknown_pre_tokenizers_are_refused_by_name(name: str) -> None:
    with pytest.raises(
        TokenizerError, match=rf"tokenizer\.ggml\.pre is '{name}', a pre-tokenizer this engine does not know"
    ):
        made(bpe_metadata([], pre=name))
