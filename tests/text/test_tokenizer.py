"""Tokenizers against llama.cpp's ids, against plain restatements of the algorithms, and against their own contract."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from engine.errors import TokenizerError
from engine.text.bpe import PRE_TOKENIZERS
from engine.text.tokenizer import Tokenizer
from tests.conftest import golden
from tests.vocabularies import CONTROL, NORMAL, UNUSED, USER, bpe_metadata, made, metadata, spm_metadata, tokenizer

DENSE, GEMMA4 = "pycoder-dense-Q4_K_M.gguf", "pycoder-gemma4-Q4_K_M.gguf"
GOLDENS = {
    "smollm2-135m": ("golden", "smollm2-135m.json"),
    "gemma3-270m": ("golden", "gemma3-270m.json"),
    DENSE: ("models", "golden", "tokenize-pycoder-dense.json"),
    GEMMA4: ("models", "golden", "tokenize-pycoder-gemma4.json"),
}
TRAINED = ["dense", "draft", "hybrid-mtp", "moe-mtp", "gemma4"]

# The building blocks of text, as far as pre-tokenizer expressions distinguish them; assigned in Unicode for many years.
SYMBOLS = (
    *" \t\n\r\u00a0\u3000\u2028\u200b\ufeff\x00\x7f\x85",
    *"aZéñÀß日本語ひカ한ПрعहиLſ\U00020000𝔘",
    *"0159½²①Ⅳ१",
    *".,;:!?'\"-_()[]{}<>|/\\…“”、。",
    *"$+=^`~©™€🙂\U0001f3fd\u200d\ufe0f",
    *"\u0301\u093f\u0e34",
    *("'s", "'T", "'ll", "'RE", "  ", "\n\n", "\r\n", " the", "Hello", "1234567"),
)
texts = st.lists(st.sampled_from(SYMBOLS), max_size=30).map("".join) | st.text(max_size=40)


# --- llama.cpp ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDENS)
def test_same_ids_as_llama_cpp(name: str) -> None:
    tok, data = tokenizer(name), golden(*GOLDENS[name])
    for case in data["tokenize"]:
        text = case["text"]
        assert tok.encode(text, add_special=False, parse_special=True) == case["ids"], text
        assert tok.encode(text, parse_special=True) == case["ids_with_special"], text
        assert tok.decode(case["ids"], special=True) == case["detokenized"], text
    for case in data["greedy"]:
        assert tok.encode(case["prompt"], parse_special=True) == case["prompt_ids"]
        assert tok.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("name", TRAINED)
def test_same_prompt_ids_as_llama_cpp(name: str) -> None:
    tok = tokenizer(f"pycoder-{name}-Q4_K_M.gguf")
    for case in golden("models", "golden", f"pycoder-{name}-Q4_K_M.json")["items"]:
        assert tok.encode(case["prompt"]) == case["prompt_tokens"]
        assert tok.decode(case["greedy_tokens"]) == case["greedy_text"]


@pytest.mark.parametrize(
    ("name", "eog", "bos", "eos", "add_bos"),
    [
        ("smollm2-135m", {"<|im_end|>", "<|endoftext|>", "<reponame>"}, "<|im_start|>", "<|im_end|>", False),
        ("gemma3-270m", {"<eos>", "<end_of_turn>"}, "<bos>", "<eos>", True),
        ("bundled", {"<|im_end|>", "<|endoftext|>"}, "<|endoftext|>", "<|endoftext|>", False),
        (GEMMA4, {"<eos>"}, "<bos>", "<eos>", True),
    ],
)
def test_special_ids(name: str, eog: set[str], bos: str, eos: str, add_bos: bool) -> None:
    tok = tokenizer(name)
    assert {tok.vocabulary.tokens[id] for id in tok.eog_ids} == eog
    assert (tok.bos_id, tok.eos_id) == (tok.token_id(bos), tok.token_id(eos))
    assert tok.add_bos is add_bos
    assert tok.add_eos is False


# --- the algorithms, restated ------------------------------------------------------------------------------------


def merge_all(symbols: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Merges the adjacent pair of the lowest rank, the leftmost of equals, until no pair has one."""
    while True:
        ranks = [(r, i) for i in range(len(symbols) - 1) if (r := rank(symbols[i], symbols[i + 1])) is not None]
        if not ranks:
            return symbols
        at = min(ranks)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


def spm_ids(tok: Tokenizer, text: str) -> list[int]:
    """SentencePiece's BPE, one merge at a time."""
    vocabulary = tok.vocabulary
    scores = vocabulary.scores
    assert scores is not None

    def rank(left: str, right: str) -> float | None:
        id = vocabulary.index.get(left + right)
        return -float(scores[id]) if id is not None and vocabulary.types[id] in (NORMAL, USER) else None

    ids: list[int] = []
    for piece in merge_all(list(text.replace(" ", "\u2581")), rank):
        id = vocabulary.index.get(piece)
        if id is not None and vocabulary.types[id] in (NORMAL, USER):
            ids.append(id)
        else:
            ids += [vocabulary.index[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids


@settings(max_examples=60, deadline=None)
@given(texts)
def test_spm_is_the_best_score_first(text: str) -> None:
    tok = tokenizer("gemma3-270m")
    parts = tok._special.split(text, b"")
    expected = [id for part in parts for id in ([part] if isinstance(part, int) else spm_ids(tok, part))]
    assert tok.encode(text, add_special=False) == expected


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.text("ab\u2581é", min_size=2, max_size=5), st.integers(-3, 3), max_size=12),
    st.text("ab é", max_size=14),
)
def test_spm_with_equal_scores(scores: dict[str, int], text: str) -> None:
    pieces = dict.fromkeys("ab\u2581", -9.0) | {piece: float(score) for piece, score in scores.items()}
    tok = made(spm_metadata(pieces, add_space_prefix=False))
    assert tok.encode(text, add_special=False) == spm_ids(tok, text)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(("ab", "ba", "bb", "aab", "abb", "abab", "bab", "abba")), max_size=8, unique=True), texts
)
def test_bpe_is_the_best_rank_first(products: list[str], text: str) -> None:
    known, merges = {"a", "b"}, []
    for product in products:
        splits = [(product[:i], product[i:]) for i in range(1, len(product))]
        usable = [f"{left} {right}" for left, right in splits if {left, right} <= known]
        known |= {product} if usable else set()
        merges += usable
    tok = made(bpe_metadata(merges))
    text = "".join("ab"[ord(symbol) % 2] for symbol in text)
    rank = {tuple(merge.split()): i for i, merge in enumerate(merges)}
    expected = merge_all(list(text), lambda left, right: rank.get((left, right)))
    assert [tok.vocabulary.tokens[id] for id in tok.encode(text)] == expected


def gemma4_ids(tok: Tokenizer, text: str) -> list[int]:
    """Gemma 4's BPE over characters: lines and runs of newlines separately, bytes for what is not a token."""
    vocabulary = tok.vocabulary
    rank = {tuple(rule.split(" ", 1)): i for i, rule in enumerate(vocabulary.merges)}
    ids: list[int] = []
    for piece in re.findall("\n+|[^\n]+", text.replace(" ", "\u2581")):
        whole = piece[0] == "\n" and piece in vocabulary.index
        for symbol in [piece] if whole else merge_all(list(piece), lambda left, right: rank.get((left, right))):
            id = vocabulary.index.get(symbol)
            ids += [id] if id is not None else [vocabulary.index[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


@settings(max_examples=60, deadline=None)
@given(texts)
def test_gemma4_is_the_best_rank_first(text: str) -> None:
    tok = tokenizer(GEMMA4)
    parts = tok._special.split(text, b"")
    expected = [id for part in parts for id in ([part] if isinstance(part, int) else gemma4_ids(tok, part))]
    assert tok.encode(text, add_special=False) == expected


def test_tokens_of_gemma4_that_end_an_answer_and_tokens_that_show() -> None:
    """Vocabularies as llama.cpp converts them: tokens of tool calls are user-defined, so that an answer shows them, except
    the one that ends it; ``</s>`` is text."""
    special = {"<eos>": CONTROL, "<bos>": CONTROL, "<turn|>": CONTROL, "<|tool_response>": USER, "<|tool_call>": USER}
    tokens = {"a": NORMAL, "\n": NORMAL, "\n\n": NORMAL, "</s>": NORMAL} | special
    tok = made(metadata("gemma4", tokens, merges=[], bos_token_id=5, eos_token_id=4, add_space_prefix=False))
    assert tok.eog_ids == {tok.token_id(text) for text in ("<eos>", "<turn|>", "<|tool_response>")}
    ids = tok.encode("a<|tool_call>a<turn|>", parse_special=True)
    assert ids == [5, 0, tok.token_id("<|tool_call>"), 0, tok.token_id("<turn|>")]
    assert tok.decode(ids) == "a<|tool_call>a"
    assert tok.token_id("<turn|>") not in tok.encode("a<turn|>")
    assert tok.encode("\n\na\n\n\n") == [5, 2, 0, 1, 1, 1]


def pieces(patterns: tuple[str, ...], text: str) -> list[str]:
    """Text cut by each expression in turn, gaps between matches being pieces, with another engine of expressions."""
    parts = [text] if text else []
    for pattern in patterns:
        cut = []
        for part in parts:
            at = 0
            for match in regex.finditer(pattern, part):
                cut += [part[at : match.start()], match.group()]
                at = match.end()
            cut.append(part[at:])
        parts = [part for part in cut if part]
    return parts


@pytest.mark.parametrize("name", [name for name in PRE_TOKENIZERS if name != "gemma4"])
def test_pre_tokenizer_cuts_where_its_expressions_say(name: str) -> None:
    tok = made(bpe_metadata([], pre=name, add_bos_token=False))
    cutter = tok._model.tokenizer.pre_tokenizer  # type: ignore[union-attr]
    # The engines disagree whether a word ends before these.
    unclear = "²½①Ⅳ\u200d" if any(r"\b" in each for each in PRE_TOKENIZERS[name].patterns) else ""
    symbols = [symbol for symbol in SYMBOLS if symbol not in unclear]

    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.sampled_from(symbols), max_size=30).map("".join))
    def check(text: str) -> None:
        found = [text[start:end] for _, (start, end) in cutter.pre_tokenize_str(text)]
        assert found == pieces(PRE_TOKENIZERS[name].patterns, text)

    check()


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "don't 1234  x", ["don", "'t", " 1234", " ", " x"]),
        ("gpt-2", "DON'T", ["DON", "'", "T"]),
        ("default", "a,b 1234", ["a", ",", "b", " ", "123", "4"]),
        ("smollm", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "DON'T 1234567\n\n x", ["DON", "'T", " ", "123", "456", "7", "\n\n", " x"]),
        ("qwen2", "x=12 \n y", ["x", "=", "1", "2", " \n", " y"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),
        ("qwen35", "हिन्दी", ["हिन्दी"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
    ],
)
def test_pre_tokenizer_examples(name: str, text: str, expected: list[str]) -> None:
    tok = made(bpe_metadata([], pre=name, add_bos_token=False))
    spans = tok._model.tokenizer.pre_tokenizer.pre_tokenize_str(text)  # type: ignore[union-attr]
    assert [text[start:end] for _, (start, end) in spans] == expected


def test_whole_pieces_need_no_merges() -> None:
    special = {"hello": NORMAL}
    assert (
        made(bpe_metadata([], special, pre="qwen2")).decode(made(bpe_metadata([], special)).encode("hello")) == "hello"
    )
    whole = made(bpe_metadata([], special, pre="llama-bpe", add_bos_token=False))
    assert whole.encode("hello") == [whole.token_id("hello")]
    assert len(made(bpe_metadata([], special, pre="qwen2")).encode("hello")) == 5


# --- ids to text -------------------------------------------------------------------------------------------------

ROUND_TRIP = ["bundled", "gemma3-270m", GEMMA4]


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_any_text_comes_back(name: str) -> None:
    tok = tokenizer(name)

    @settings(max_examples=80, deadline=None)
    @given(texts)
    def check(text: str) -> None:
        # U+2581 is how these vocabularies write a blank, so it is decoded as one.
        expected = text if tok.vocabulary.model == "gpt2" else text.replace("\u2581", " ")
        assert tok.decode(tok.encode(text)) == expected

    check()


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", ["smollm2-135m", *ROUND_TRIP])
def test_stream_is_decode(name: str, special: bool) -> None:
    tok = tokenizer(name)
    # Bytes and control tokens more often than a uniform draw would give them.
    kinds = np.frombuffer(tok.vocabulary.types, np.uint8)
    rare = [int(id) for id in np.flatnonzero(kinds != NORMAL)][:300]
    short = [id for id, text in enumerate(tok.vocabulary.tokens) if len(text) == 1]
    one = st.integers(0, tok.n_vocab - 1) | st.sampled_from(short) | st.sampled_from(rare)

    @settings(max_examples=80, deadline=None)
    @given(st.lists(one, max_size=30))
    def check(ids: list[int]) -> None:
        stream = tok.stream(special=special)
        parts = [stream.feed(id) for id in ids] + [stream.flush()]
        data = b"".join(tok.token_bytes(id, special=special) for id in ids)
        assert "".join(parts) == tok.decode(ids, special=special) == data.decode("utf-8", errors="replace")

    check()


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(3, 8191), max_size=30))
def test_decode_as_the_tokenizers_library(ids: list[int]) -> None:
    tok = tokenizer("bundled")
    assert tok.decode(ids) == decoders.ByteLevel().decode([tok.vocabulary.tokens[id] for id in ids])


def test_stream_holds_a_character_back_until_it_is_complete() -> None:
    tok = made(bpe_metadata([]))
    ids = tok.encode("é🙂!")
    stream = tok.stream()
    assert [stream.feed(id) for id in ids] == ["", "é", "", "", "", "🙂", "!"]
    assert [stream.feed(id) for id in ids[2:5]] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert [stream.feed(id) for id in (ids[2], ids[6])] == ["", "\ufffd!"]
    assert stream.flush() == ""


def test_control_tokens_are_hidden_and_do_not_break_characters() -> None:
    tok = made(bpe_metadata([], {"<|end|>": CONTROL, "<tag>": USER, "[PAD1]": UNUSED}))
    end, tag, pad = (tok.token_id(text) for text in ("<|end|>", "<tag>", "[PAD1]"))
    assert end is not None
    assert tag is not None
    assert pad is not None
    first, second = tok.encode("é")
    assert tok.decode([first, end, second, tag, pad]) == "é<tag>"
    assert tok.decode([tag, end, pad], special=True) == "<tag><|end|>[PAD1]"


def test_suppressed_tokens() -> None:
    values = bpe_metadata([])
    assert made(values).suppressed_ids == frozenset()
    for ids in ([3, 255, 3], []):
        array = np.array(ids, np.int32)
        assert made(values | {"tokenizer.ggml.suppress_tokens": array}).suppressed_ids == frozenset(ids)


@pytest.mark.parametrize("id", [-1, 256, 10**9])
def test_ids_outside_the_vocabulary(id: int) -> None:
    tok = made(bpe_metadata([]))
    with pytest.raises(TokenizerError, match=f"token id {id} is outside the vocabulary of 256 tokens"):
        tok.decode([id])
    with pytest.raises(TokenizerError, match="outside"):
        tok.stream().feed(id)


def test_space_prefix() -> None:
    tok = made(spm_metadata({"\u2581": -1.0, "a": -2.0, "\u2581a": 1.0}, {"<x>": CONTROL}))
    bos, x, a = 1, tok.token_id("<x>"), tok.token_id("\u2581a")
    assert tok.encode("a") == [bos, a]
    assert tok.encode("a<x>a", parse_special=True) == [bos, a, x, a]
    assert tok.encode("") == [bos]
    assert tok.decode(tok.encode("a a")) == "a a"
    assert tok.decode(tok.encode(" a")) == " a"
    # An answer continues where the prompt ended, so its first blank is its own.
    assert a is not None
    stream = tok.stream()
    assert stream.feed(a) + stream.flush() == " a"


# --- special tokens in text --------------------------------------------------------------------------------------


def test_the_longest_special_token_takes_its_share_first() -> None:
    tok = made(bpe_metadata([], {"ab": USER, "bcd": USER}))
    assert tok.encode("abcd") == [*tok.encode("a"), tok.token_id("bcd")]
    assert tok.encode("abab") == [tok.token_id("ab")] * 2


def test_control_tokens_only_where_asked_for() -> None:
    tok = made(bpe_metadata([], {"<c>": CONTROL, "<u>": USER}))
    c, u = tok.token_id("<c>"), tok.token_id("<u>")
    text = "<c>x<u><c>"
    assert tok.encode(text, parse_special=True) == [c, *tok.encode("x"), u, c]
    plain = tok.encode(text)
    assert c not in plain
    assert plain.count(u or 0) == 1
    assert tok.decode(plain) == text
    marked = tok.encode_marked(text, b"\1\1\1" + bytes(len(text) - 3))
    assert marked[0] == c
    assert marked.count(c or 0) == 1
    assert c not in tok.encode_marked(text, b"\1\1\0" + bytes(len(text) - 3))
    with pytest.raises(ValueError, match="2 marks for 10 characters"):
        tok.encode_marked(text, b"\1\1")


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_merges_make_no_control_token(pre: str) -> None:
    values = bpe_metadata(["a b", "ab c"], pre=pre, add_bos_token=False)
    kinds = values["tokenizer.ggml.token_type"]
    kinds[values["tokenizer.ggml.tokens"].index("abc")] = CONTROL
    tok = made(values)
    assert [tok.vocabulary.tokens[id] for id in tok.encode("abc")] == ["ab", "c"]
    assert tok.encode("abc", parse_special=True) == [tok.token_id("abc")]


def test_scores_make_no_control_or_byte_token() -> None:
    scores = {piece: float(len(piece)) for piece in ("<", "s", ">", "<s", "0", "x", "A", "<0", "<0x", "<0xA", "<0xAA")}
    tok = made(spm_metadata(scores, add_space_prefix=False, add_bos_token=False))
    assert [tok.vocabulary.tokens[id] for id in tok.encode("<s><0xAA>")] == ["<s", ">", "<0xAA", ">"]


def test_tokens_known_by_their_text_are_control_tokens() -> None:
    tok = made(bpe_metadata([], {"<|im_end|>": NORMAL, "<|fim_pad|>": USER, "<|fim_prefix|>": USER, "</s>": USER}))
    assert tok.eog_ids == {tok.token_id("<|im_end|>"), tok.token_id("<|fim_pad|>")}
    ids = tok.encode("<|im_end|><|fim_pad|><|fim_prefix|></s>")
    assert [id for id in ids if id >= 256] == [tok.token_id("</s>")]
    harmony = made(bpe_metadata([], dict.fromkeys(("<|end|>", "<|return|>", "<|call|>"), CONTROL)))
    assert harmony.eog_ids == {harmony.token_id("<|return|>"), harmony.token_id("<|call|>")}


@pytest.mark.parametrize("name", ["bundled", "gemma3-270m"])
def test_lone_surrogates_are_replaced(name: str) -> None:
    tok = tokenizer(name)
    assert tok.decode(tok.encode("a\ud800b")) == "a\ufffdb"


def test_a_byte_without_a_token_is_left_out_but_divides() -> None:
    values = bpe_metadata(["a b"])
    at = values["tokenizer.ggml.tokens"].index("!")
    del values["tokenizer.ggml.tokens"][at]
    values["tokenizer.ggml.token_type"] = np.delete(values["tokenizer.ggml.token_type"], at)
    tok = made(values)
    assert [tok.vocabulary.tokens[id] for id in tok.encode("ab a!b")] == ["ab", "Ġ", "a", "b"]


def test_unknown_characters_without_byte_tokens() -> None:
    tokens = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, "a": NORMAL}
    scores = np.zeros(4, np.float32)
    assert made(metadata("llama", tokens, scores=scores, add_space_prefix=False)).encode("aéa") == [1, 3, 0, 3]


# --- malformed vocabularies --------------------------------------------------------------------------------------

Values = dict[str, Any]


def change(**changes: Any) -> Callable[[Values], None]:
    def apply(values: Values) -> None:
        for key, value in changes.items():
            values[f"tokenizer.ggml.{key}"] = value

    return apply


def drop(key: str) -> Callable[[Values], None]:
    return lambda values: values.pop(f"tokenizer.ggml.{key}")


BAD_ANY: dict[str, tuple[Callable[[Values], None], str]] = {
    "no model": (drop("model"), "model is missing"),
    "model of another kind": (change(model="rwkv"), "model is 'rwkv', which this engine does not know; it knows gpt2"),
    "model is a number": (change(model=3), "model must be of type str, not int"),
    "no tokens": (drop("tokens"), "tokens is missing"),
    "empty tokens": (change(tokens=[], token_type=None, scores=None), "tokens is empty"),
    "tokens are numbers": (change(tokens=np.arange(3)), "tokens must be an array of strings"),
    "a token is bytes": (change(tokens=[b"a"]), "tokens must be an array of strings"),
    "type of text": (change(token_type=["a"]), "token_type must be an array of integers"),
    "type of float": (change(token_type=np.ones(3, np.float32)), "token_type must be an array of integers"),
    "too few types": (change(token_type=np.ones(3, np.int32)), r"token_type has 3 elements where .*tokens has \d+"),
    "too few scores": (change(scores=np.ones(3, np.float32)), "scores has 3 elements"),
    "bos outside": (
        change(bos_token_id=100_000, add_bos_token=True),
        r"bos_token_id is 100000, outside the vocabulary of \d+ tokens, but add_bos_token asks for it; convert",
    ),
    "added eos outside": (
        change(eos_token_id=100_000, eot_token_id=5, add_eos_token=True),
        r"eos_token_id is 100000, outside the vocabulary of \d+ tokens, but add_eos_token asks for it; convert",
    ),
    "pad is text": (change(padding_token_id="0"), "padding_token_id must be of type int, not str"),
    "bos is a bool": (change(bos_token_id=True), "bos_token_id must be of type int, not bool"),
    "add_bos is a number": (change(add_bos_token=1), "add_bos_token must be of type bool, not int"),
    "suppressed outside": (change(suppress_tokens=np.array([1, 99_999])), "suppress_tokens has 99999, outside"),
    "suppressed negative": (change(suppress_tokens=np.array([-1])), "suppress_tokens has -1, outside"),
    "suppressed are text": (change(suppress_tokens=["a"]), "suppress_tokens must be an array of integers"),
    "add_eos without eos": (change(add_eos_token=True, add_bos_token=False), "eos_token_id is missing"),
}
BAD_BPE = {
    "no merges": (drop("merges"), "merges is missing"),
    "merges are numbers": (change(merges=np.arange(3)), "merges must be an array of strings"),
    "merge of an unknown token": (change(merges=["a b", "b c"]), "merges has a rule, number 1, for 'bc', which is no"),
    "merge of one token": (change(merges=["ab"]), "merges has a rule, number 0"),
    "empty merge": (change(merges=[""]), "merges has a rule, number 0"),
    "unknown pre-tokenizer": (
        change(pre="klingon"),
        "pre is 'klingon', a pre-tokenizer this engine does not know; .*qwen2",
    ),
    "add_bos without bos": (change(add_bos_token=True), "bos_token_id is missing"),
    "eos negative": (
        change(eos_token_id=-1),
        r"eos_token_id is -1, outside the vocabulary of \d+ tokens, and no other token ends an answer; convert",
    ),
}
BAD_SPM = {
    "no scores": (drop("scores"), "scores is missing"),
    "scores of text": (change(scores=["a"]), "scores must be an array of numbers"),
    "a score is not a number": (lambda values: values["tokenizer.ggml.scores"].__setitem__(5, np.nan), "not finite"),
    "a byte that is none": (
        lambda values: values["tokenizer.ggml.token_type"].__setitem__(1, 6),
        "calls token 1 a byte",
    ),
    "type out of range": (lambda values: values["tokenizer.ggml.token_type"].__setitem__(1, 7), r"outside 0\.\.6"),
    "a token twice": (lambda values: values["tokenizer.ggml.tokens"].__setitem__(5, "<s>"), "text of token 1 twice"),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("bpe", name) for name in (BAD_ANY | BAD_BPE)] + [("spm", name) for name in (BAD_ANY | BAD_SPM)],
)
def test_malformed_vocabulary(kind: str, name: str) -> None:
    if kind == "spm" and name == "add_eos without eos":
        pytest.skip("this kind has a default")
    values = bpe_metadata(["a b"]) if kind == "bpe" else spm_metadata({"a": 1.0})
    apply, message = (BAD_ANY | (BAD_BPE if kind == "bpe" else BAD_SPM))[name]
    made(values)
    apply(values)
    for key in [key for key, value in values.items() if value is None]:
        del values[key]
    with pytest.raises(TokenizerError, match=rf"^tiny\.gguf: tokenizer\.ggml\..*{message}"):
        made(values)


def test_odd_but_usable_vocabularies() -> None:
    assert made(bpe_metadata(["a b", "a b"])).encode("ab")  # the same rule twice
    empty = made(bpe_metadata([], {"": NORMAL}))
    assert empty.vocabulary.tokens[-1] == "[EMPTY_256]"
    blank = metadata(
        "gemma4", {" ": NORMAL, "b": NORMAL, " b": NORMAL, "<bos>": CONTROL}, merges=["  b"], bos_token_id=3
    )
    assert made(blank).encode("b") == [3, 1]  # the left part of the rule is itself a blank
    assert made(blank | {"tokenizer.ggml.add_bos_token": False}).add_bos
