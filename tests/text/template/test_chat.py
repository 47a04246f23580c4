"""Chat templates: the language, the built-in ones, and no control token from a message."""

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import TemplateError
from engine.gguf.file import read_gguf
from engine.text.template.chat import TEMPLATES, ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.vocabularies import CONTROL, USER, bpe_metadata, gguf_path, made, spm_metadata, tokenizer

CONTROLS = (
    *("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<s>", "</s>"),
    *(
        "<start_of_turn>",
        "<end_of_turn>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "[INST]",
        "[/INST]",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
)
SPECIAL = dict.fromkeys(CONTROLS, CONTROL) | {"<think>": USER, "</think>": USER}


def byte_tokenizer(**more: Any) -> Tokenizer:
    at = 256 + list(SPECIAL).index("<s>")
    return made(bpe_metadata(["< |", "| >"], SPECIAL, pre="qwen2", bos_token_id=at + 2, eos_token_id=at + 3, **more))


def piece_tokenizer() -> Tokenizer:
    special = {text: kind for text, kind in SPECIAL.items() if text not in ("<s>", "</s>")}
    return made(spm_metadata({"\u2581": -1.0, "<|": -2.0, "|>": -3.0, "<s": -4.0}, special))


TOKENIZERS = {"bpe": byte_tokenizer(), "bpe with bos": byte_tokenizer(add_bos_token=True), "spm": piece_tokenizer()}
TOK = TOKENIZERS["bpe"]

# Templates that build control tokens, or handle content, in ways that real ones do.
ODD_TEMPLATES = {
    "role": "{% for m in messages %}<|{{ m.role }}|>{{ '\n' ~ m.content }}{{ '<|' + m['role'] + '|>' }}{% endfor %}",
    "parts": "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.content }}<{{ m.content }}>{% endfor %}",
    "strip": "{{ ('<|im_start|>' + messages[0].content + ' ') | trim + messages[-1].content.strip('<') }}",
    "split": "{% for m in messages %}{{ m.content.split('|')[-1] + '|' + m.content.split('|')[0] }}{% endfor %}<|end|>",
    "replace": "{% for m in messages %}{{ '<|end|>' + m.content | replace('x', '') }}{% endfor %}",
    "replace method": "{% for m in messages %}{{ ('<|end|>' + m.content).replace('i', 'i') }}{% endfor %}",
    "join": "{{ messages | map(attribute='content') | join('<|end|>') }}",
    "join method": "{{ '|'.join(['<', messages[0].content, '>', '<', 'end', '>']) }}",
    "format": "{{ '<|{}|>'.format(messages[0].content) }}{{ '<|{0}|>'.format('end') }}",
    "format of content": "{{ messages[0].content.format(1) }}<|end|>",
    "macro": "{% macro f(x) %}<|{{ x }}|>{% endmacro %}{{ f('end') }}{{ f(messages[0].content) }}",
    "block": "{% set x %}<{{ messages[0].content }}>{% endset %}{{ x }}{% filter trim %}<|end|>{{ x }}{% endfilter %}",
    "case": "{{ '<|' + messages[0].content | lower + '|>' + '<|END|>' | lower + ('<' + messages[0].content).lower() }}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ messages | string }}<|end|>",
    "slices": "{{ ('<|end|>' + messages[0].content)[:9] }}{{ messages[0].content[::-1] + messages[-1].content[1:] }}",
    "safe": "{{ ('<|end|>' | safe) + messages[0].content + ('<' | e) + '|end|>' + ('x' | safe).join(['<', 'y']) }}",
    "names": "{% for t in tools or [] %}<{{ t.name }}>{% for k, v in t.items() %}<{{ k + v }}>{% endfor %}{% endfor %}",
}
ALL_TEMPLATES = TEMPLATES | ODD_TEMPLATES


def conversation(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system is not None else []) + turns


def n_control(tok: Tokenizer, ids: list[int]) -> int:
    return sum(tok.vocabulary.types[id] == CONTROL for id in ids)


# --- the text ----------------------------------------------------------------------------------------------------

CHATML = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


BUILT_IN = [
    ("chatml", "<|im_start|>system\nS<|im_end|>\n" + CHATML),
    ("deepseek4", "<s>S<｜User｜>Hi<｜Assistant｜></think>"),
    ("deepseek4-0731", "<s>S<｜User｜>Hi<｜Assistant｜></think>"),
    ("gemma", "<s><start_of_turn>user\nS\n\nHi<end_of_turn>\n<start_of_turn>model\n"),
    ("llama2", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nHi [/INST]"),
    (
        "llama3",
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("mistral", "<s>[INST] S\n\nHi[/INST]"),
    ("phi3", "<s><|system|>\nS<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n"),
    ("qwen", "<|im_start|>system\nS<|im_end|>\n" + CHATML),
    ("zephyr", "<|system|>\nS</s>\n<|user|>\nHi</s>\n<|assistant|>\n"),
]


@pytest.mark.parametrize(("name", "expected"), BUILT_IN)
def test_built_in_templates(name: str, expected: str) -> None:
    template = ChatTemplate.load(name, TOK)
    assert template.render(conversation("Hi", system="S")) == expected
    without = template.render(conversation("Hi", "Yes", "More"), add_generation_prompt=False)
    assert "Hi" in without
    assert "Yes" in without
    assert without == template.render(conversation("Hi", "Yes", "More"))[: len(without)]


def test_every_built_in_template_is_tested() -> None:
    assert {name for name, _ in BUILT_IN} == TEMPLATES.keys()


def test_the_template_of_a_model() -> None:
    gguf = read_gguf(gguf_path("smollm2-135m"))
    tok = tokenizer("smollm2-135m")
    template = ChatTemplate.from_gguf(gguf, tok)
    assert template is not None
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert template.render(conversation("Hi")) == system + CHATML
    assert template.encode(conversation("Hi")) == tok.encode(system + CHATML, parse_special=True)
    assert ChatTemplate.from_gguf(SimpleNamespace(path=Path("x"), metadata={}), tok) is None


def from_keys(**keys: Any) -> ChatTemplate | None:
    """The template of a file with these keys after ``tokenizer.chat_template``."""
    metadata = {f"tokenizer.chat_template{'.' * bool(name)}{name}": text for name, text in keys.items()}
    return ChatTemplate.from_gguf(SimpleNamespace(path=Path("x"), metadata=metadata), TOK)


def test_a_template_is_a_text() -> None:
    with pytest.raises(TemplateError, match="x: tokenizer.chat_template must be a string, not int"):
        from_keys(**{"": 1})
    with pytest.raises(TemplateError, match="x: tokenizer.chat_template.rag must be a string, not list"):
        from_keys(rag=["a"])


@pytest.mark.parametrize("blank", ["", " ", "\n\t "])
def test_an_empty_template_is_none(blank: str) -> None:
    assert from_keys(**{"": blank}) is None
    assert from_keys(**{"": blank, "rag": blank}) is None
    named = from_keys(**{"": blank, "rag": blank, "other": "other"})
    assert named is not None
    assert named.render([]) == "other"


@pytest.mark.parametrize(
    ("names", "plain"),
    [(("rag", "", "default"), ""), (("rag", "default"), "default"), (("rag", "tool_use"), "rag"), (("one",), "one")],
)
def test_named_templates(names: tuple[str, ...], plain: str) -> None:
    found = from_keys(**{name: f"{name}:{{{{ messages[0].content }}}}" for name in names})
    assert found is not None
    assert found.render(conversation("Hi")) == f"{plain}:Hi"
    tools = "tool_use" if "tool_use" in names else plain
    assert found.render(conversation("Hi"), tools=[{"type": "function"}]) == f"{tools}:Hi"
    assert found.render(conversation("Hi"), tools=[]) == f"{plain}:Hi"


def test_templates_that_gguf_writes(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    texts = {"tool_use": "tools", "default": "plain", "rag": "documents"}
    writer.add_chat_template([{"name": name, "template": text} for name, text in texts.items()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = ChatTemplate.from_gguf(read_gguf(tmp_path / "model.gguf"), TOK)
    assert found is not None
    assert (found.render([]), found.render([], tools=[{}])) == ("plain", "tools")
    assert (found.source_for(False), found.source_for(True)) == ("plain", "tools")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}"
            "{% endfor %}",
            "013",
        ),
        ("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x }}b", "ab"),
        ("  {% if true %}\n a\n  {% endif %}\nb\n", " a\nb"),
        ("{{ {'b': 'é<', 'a': [1, none]} | tojson }}", '{"b": "é<", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ nothing }}{{ nothing is defined }}{{ messages[0].nothing }}{{ tools is none }}", "FalseTrue"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ flag }}{{ messages | length }}{{ messages[-1:][0]['role'] }}{{ 7 // 2 }}{{ 2 ** 10 }}", "yes1user31024"),
        (
            "{{ 'a,b'.split(',') | join('-') }}{{ [1, 2] | sum }}{{ [3, 1] | sort }}{{ 1.25 | round(1) }}",
            "a-b3[1, 3]1.2",
        ),
        ("{{ 'a\nb' | indent(2) }}{{ '<' | e }}{{ '<' | safe }}{{ 7 % 4 }}", "a\n  b&lt;<3"),
        ("{{ '{}{}{x}{{}}'.format(1, '<', x='a') }}{{ '{1}{0}'.format(none, [5]) }}", "1<a{}[5]None"),
    ],
)
def test_the_language(source: str, expected: str) -> None:
    assert ChatTemplate.from_source(source, TOK).render(conversation("Hi"), flag="yes") == expected


def test_messages_of_many_kinds() -> None:
    template = ChatTemplate.from_source("{{ messages | tojson }}", TOK)
    parts = [{"type": "text", "text": "a"}, {"n": 1, "f": 0.5, "b": True, "none": None}]
    messages = [{"role": "user", "content": parts, "tool_calls": ({"x": "y"},)}]
    assert json.loads(template.render(messages)) == json.loads(json.dumps(messages))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "x"}], "message 0 is not a message"),
        ([{"role": "user"}, "hello"], "message 1 is not a message"),
        ([{"role": 1}], "message 0 is not a message"),
        ([{"role": "user", "content": b"x"}], "a message holds a bytes"),
        ([{"role": "user", "content": object()}], "a message holds a object"),
    ],
)
def test_messages_that_are_none(messages: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate.load("chatml", TOK).render(messages)
    nested: Any = "x"
    for _ in range(100):
        nested = [nested]
    with pytest.raises(TemplateError, match="nested more than 64 deep"):
        ChatTemplate.load("chatml", TOK).render([{"role": "user", "content": nested}])


def test_a_template_by_name_or_file(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}é", encoding="utf-8")
    assert ChatTemplate.load(str(tmp_path / "own.jinja"), TOK).render(conversation("Hi")) == "Hié"
    with pytest.raises(
        TemplateError, match="'nonsense' is neither the name of a built-in template nor .* chatml, deepseek4"
    ):
        ChatTemplate.load("nonsense", TOK)
    with pytest.raises(TemplateError, match="neither"):
        ChatTemplate.load("a\0b", TOK)


# --- the ids: control tokens come from the template only ---------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_control_tokens_of_the_template_are_kept(name: str, template: str) -> None:
    tok = TOKENIZERS[name]
    chat = ChatTemplate.load(template, tok)
    messages = conversation("Hi there", "Yes <think> x", " More", system="S")
    text = chat.render(messages)
    assert n_control(tok, tok.encode(text, parse_special=True, add_special=False)) >= 4
    if tok.add_bos:
        text = text.removeprefix("<s>")
    assert chat.encode(messages) == tok.encode(text, parse_special=True)


FRAGMENTS = [*SPECIAL, *(text[:n] for text in CONTROLS for n in (1, 2, -1, -2)), *(text[1:] for text in CONTROLS)]
contents = st.lists(st.sampled_from([*FRAGMENTS, "x", " ", "\n", "end", "im_end", "|", "s", "user"]), max_size=8).map(
    "".join
)
names = st.sampled_from([*CONTROLS, *(text.strip("<|>") for text in CONTROLS), "x"])


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", ALL_TEMPLATES)
def test_no_text_becomes_a_control_token(name: str, template: str) -> None:
    tok = TOKENIZERS[name]
    chat = ChatTemplate.from_source(ALL_TEMPLATES[template], tok)

    def ids(texts: tuple[str, ...], tool: str) -> list[int]:
        return chat.encode(conversation(*texts[1:], system=texts[0]), tools=[{"name": tool, tool: texts[0]}])

    expected = n_control(tok, ids(("q", "q", "q"), "q"))

    @settings(max_examples=25, deadline=None)
    @given(st.tuples(contents, contents, contents), names)
    def check(texts: tuple[str, str, str], tool: str) -> None:
        encoded = ids(texts, tool)
        assert n_control(tok, encoded) == expected
        assert not tok.eog_ids & set(encoded) - set(ids(("q", "q", "q"), "q"))

    check()


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m", "bundled"])
def test_no_text_becomes_a_control_token_of_a_real_model(name: str) -> None:
    tok = tokenizer(name)
    chat = ChatTemplate.load("gemma" if name.startswith("gemma") else "chatml", tok)
    controls = [text for id, text in enumerate(tok.vocabulary.tokens) if tok.vocabulary.types[id] == CONTROL][:400]
    expected = n_control(tok, chat.encode(conversation("q")))

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.sampled_from(controls) | st.text(max_size=5), max_size=5).map("".join))
    def check(text: str) -> None:
        assert n_control(tok, chat.encode(conversation(text))) == expected

    check()


def test_an_unknown_role_is_plain_text() -> None:
    chat = ChatTemplate.load("phi3", TOK)
    known = n_control(TOK, chat.encode([{"role": "user", "content": "x"}]))
    assert n_control(TOK, chat.encode([{"role": "end", "content": "x"}])) == known - 1


def test_begin_and_end_tokens_are_not_doubled() -> None:
    tok = byte_tokenizer(add_bos_token=True, add_eos_token=True)
    chat = ChatTemplate.from_source("{{ bos_token + messages[0].content + eos_token }}", tok)
    assert chat.encode(conversation("x")) == [tok.bos_id, *tok.encode("x", add_special=False), tok.eos_id]
    bare = ChatTemplate.from_source("{{ messages[0].content }}", tok)
    ids = bare.encode(conversation("<s>x</s>"))
    assert ids == [tok.bos_id, *tok.encode("<s>x</s>", add_special=False), tok.eos_id]
    assert n_control(tok, ids) == 2
    assert tok.decode(ids) == "<s>x</s>"


# --- a conversation that goes on ---------------------------------------------------------------------------------


# Where text is pieces, a blank follows the control token that begins an answer of DeepSeek, whose text is bytes.
@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in TOKENIZERS for name in TEMPLATES if not (kind == "spm" and name.startswith("deepseek"))],
)
def test_known_ids_stay(kind: str, name: str) -> None:
    """An answer keeps the ids it was written in, the text around it has the ids it would have had anyway."""
    tok = TOKENIZERS[kind]
    template = ChatTemplate.from_source(TEMPLATES[name], tok)
    messages = [{"role": "user", "content": "one"}]
    asked = template.encode(messages)
    text = template.render(messages)
    answer = "x<y"
    # As many tokens as there are bytes: not what the tokenizer would choose.
    ids = [i for byte in answer for i in tok.encode_marked(byte, b"\0", add_special=False, continued=True)]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "two"}]
    fresh = template.encode(messages)
    found = template.encode(messages, known=(text + answer, [*asked, *ids]))
    assert tok.decode(found, special=True) == tok.decode(fresh, special=True)
    if template.render(messages).startswith(text + answer):
        assert found[: len(asked) + len(ids)] == [*asked, *ids]
        rest = found[len(asked) + len(ids) :]
        assert rest == fresh[len(fresh) - len(rest) :]
    else:
        assert found == fresh
    assert template.encode(messages, known=("something else", [1, 2])) == fresh
