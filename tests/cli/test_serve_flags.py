"""The flags of ``bitmirror serve``: what they mean together, and mistakes in one sentence each."""

from pathlib import Path

import pytest

import engine
from engine.cli.serve_flags import limits, parser
from engine.errors import UsageError
from engine.serve import Opener, slot_folder
from engine.serving.limits import Limits


def test_keys_in_a_file_are_further_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# a comment\nfirst\n\n  second \n", encoding="utf-8")
    args = parser().parse_args(["--api-key", "zeroth", "--api-key-file", str(file)])
    assert args.api_key == ["zeroth", "first", "second"]
    # They protect an address that others reach.
    assert parser().parse_args(["--api-key-file", str(file), "--host", "0.0.0.0"]).api_key == ["first", "second"]


def test_a_template_in_a_file(tmp_path: Path) -> None:
    """It is a file even if it has the name of a template that is built in."""
    assert Path(parser().parse_args(["--chat-template-file", "chatml"]).chat_template).is_absolute()


def test_other_names_of_a_model_and_origins() -> None:
    args = parser().parse_args(["-a", "x,z", "--served-model-name", "y", "--cors-origins", "https://a.b:1/, localhost"])
    assert args.alias == ["x", "z", "y"]
    assert args.cors_origins == ["https://a.b:1", "localhost"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--api-key-file MISSING", "the keys in .*absent cannot be read .*--api-key-file"),
        ("--api-key-file EMPTY", "empty holds no keys: write one a line"),
        ("--api-key-file BINARY", "binary cannot be read .it is no text in UTF-8"),
        ("--cors-origins chat.example", "--cors-origins must be origins such as .*not 'chat.example'"),
        ("--ssl-cert-file a.pem", "give both --ssl-cert-file and --ssl-key-file"),
        ("--ssl-keyfile a.pem", "give both --ssl-cert-file and --ssl-key-file"),
        ("--chat-template chatml --chat-template-file a", "are both given: use only one of them"),
        ("--timeout 0", "--timeout must be above 0"),
        ("--no-slots", "--no-slots: /slots shows no texts; protect it with --api-key"),
        ("--props", "--props: properties do not change while the server runs; set them with flags"),
        ("--mirostat 2", "this is set in a request; --temp, --top-p and their like"),
        ("--no-cont-batching", "use -np 1 for one at a time"),
    ],
)
def test_a_mistake_is_one_sentence(words: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    names = {
        name: str(tmp_path / file) for name, file in (("MISSING", "absent"), ("EMPTY", "empty"), ("BINARY", "binary"))
    }
    with pytest.raises(UsageError, match=says) as caught:
        parser().parse_args([names.get(word, word) for word in words.split()])
    assert "\n" not in str(caught.value)


def test_a_timeout_is_that_of_bodies_and_readers() -> None:
    made = limits(parser().parse_args(["-to", "600"]))
    assert (made.body_seconds, made.reader_seconds, made.header_seconds) == (600, 600, Limits.header_seconds)
    made = limits(parser().parse_args(["--timeout", "600", "--reader-seconds", "5"]))
    assert (made.body_seconds, made.reader_seconds) == (600, 5)


def test_what_is_kept_on_disk(tmp_path: Path) -> None:
    args = parser().parse_args(["--slot-save-path", str(tmp_path), "--cache-disk", "3"])
    assert slot_folder(args) == tmp_path and slot_folder(parser().parse_args([])) is None
    with pytest.raises(UsageError, match="nowhere is not a folder: make it first, or give another one with --slot"):
        slot_folder(parser().parse_args(["--slot-save-path", str(tmp_path / "nowhere")]))
    with pytest.raises(UsageError, match="say how large that is with --cache-disk N"):
        parser().parse_args(["--cache-disk-path", str(tmp_path)])
    given: dict[str, object] = {}
    args = parser().parse_args(["--cache-disk", "3", "--cache-disk-path", str(tmp_path), "--no-warmup"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load", lambda path, **options: given.update(options))
        Opener(args, tmp_path / "m.gguf")()
    assert (given["cache_disk"], given["cache_disk_path"]) == (3 << 30, str(tmp_path))


def test_slots() -> None:
    default = parser().parse_args([])
    assert parser().parse_args(["-np", "-1"]) == default
    assert parser().parse_args(["--parallel", "3"]).parallel == 3
    for text in ("0", "-2", "x", "1000000"):
        with pytest.raises(UsageError, match="--parallel must be "):
            parser().parse_args(["--parallel", text])


def test_flags_of_llama_server_that_request_what_is_the_case() -> None:
    words = "-cb --metrics --slots --webui --cache-prompt --jinja -fa on -kvu --cache-reuse 0 --reasoning-format auto"
    assert parser().parse_args(words.split()) == parser().parse_args([])
