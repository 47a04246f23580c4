"""What a vocabulary lacks and nothing needs is ignored with a warning: special ids, and the name of a pre-tokenizer."""

from typing import Any

import pytest

from engine.errors import TokenizerError
from engine.text.tokenizer import Tokenizer
from tests.vocabularies import CONTROL, bpe_metadata, made, spm_metadata

END = {"<|im_end|>": CONTROL}
UNUSED = ("padding", "unknown", "eot", "eom", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")


def bpe(**more: Any) -> Tokenizer:
    return made(bpe_metadata(["a b"], END, **more))


def spm(**more: Any) -> Tokenizer:
    return made(spm_metadata({"a": 1.0}, **more))


@pytest.mark.parametrize("value", [32_000, -1, 2**32 - 1])
@pytest.mark.parametrize("make", [bpe, spm])
@pytest.mark.parametrize("name", UNUSED)
def test_what_nothing_uses_is_ignored(name: str, make: Any, value: int) -> None:
    plain, odd = make(), make(**{f"{name}_token_id": value})
    n = plain.n_vocab
    assert odd.warnings == [
        f"tokenizer.ggml.{name}_token_id is {value}, outside the vocabulary of {n} tokens: it is ignored."
    ]
    assert plain.warnings == []
    assert (odd.eog_ids, odd.bos_id, odd.eos_id) == (plain.eog_ids, plain.bos_id, plain.eos_id)
    assert odd.encode("ab c\U0001f600", parse_special=True) == plain.encode("ab c\U0001f600", parse_special=True)


def test_bos_that_no_text_begins_with_is_ignored() -> None:
    for tokenizer in (bpe(bos_token_id=999), bpe(bos_token_id=999, add_bos_token=False)):
        assert tokenizer.bos_id is None
        assert [warning.split()[0] for warning in tokenizer.warnings] == ["tokenizer.ggml.bos_token_id"]
        assert tokenizer.encode("ab") == [256]
    assert spm(bos_token_id=999, add_bos_token=False).bos_id is None


def test_eos_is_ignored_beside_another_end() -> None:
    tokenizer = bpe(eos_token_id=999)
    assert tokenizer.eos_id is None
    assert tokenizer.eog_ids == {tokenizer.token_id("<|im_end|>")}
    assert len(tokenizer.warnings) == 1
    # The </s> of this vocabulary is a control token.
    assert spm(eos_token_id=999).eog_ids == {2}


def test_a_pad_between_parts_of_code_ends_no_answer() -> None:
    values = bpe_metadata([], {"<|fim_pad|>": CONTROL}, eos_token_id=999)
    with pytest.raises(TokenizerError, match=r"eos_token_id is 999, .*and no other token ends an answer; convert"):
        made(values)


def test_default_of_sentencepiece_does_not_replace_bos() -> None:
    """The file asks for a token before every text, and 1 would be a guess."""
    with pytest.raises(TokenizerError, match="bos_token_id is 999, outside .* but add_bos_token asks for it; convert"):
        spm(bos_token_id=999)


def test_a_missing_pre_tokenizer_is_told() -> None:
    for pre, told in ((None, "is missing"), ("", "is missing"), ("default", "is 'default'")):
        (warning,) = bpe(pre=pre).warnings
        assert warning.startswith(f"tokenizer.ggml.pre {told}, so text is cut into tokens by a rule that may not")
        assert warning.endswith("; convert the model again.")
    assert bpe(pre="gpt-2").warnings == spm(pre="default").warnings == []
