"""The flags of ``bitmirror serve``."""

import argparse
import os
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from engine.checks import shown
from engine.cli import llama_server, model_flags, shared
from engine.cli.parser import Parser, filled, real, whole
from engine.cli.sampling import Given
from engine.cli.sampling_flags import add_sampling
from engine.errors import UsageError
from engine.limits import MOST_PARALLEL
from engine.serving.limits import Limits
from engine.text.template.builtin import TEMPLATES

USAGE = "%(prog)s [-m MODEL]... [flags]"

DESCRIPTION = """\
Serves models over HTTP, with the interfaces of OpenAI, Anthropic, llama-server and Ollama.

  bitmirror serve                                      a small model that chats, on port 8080 of this machine
  bitmirror serve -m model.gguf -np 32                 a file, and up to 32 answers at once
  bitmirror serve -m qwen3-0.6b -m smollm2-135m        two models, each opened when it is asked for
  curl localhost:8080/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "def add(a, b):", "max_tokens": 16}'

An answer depends on its request only, not on other requests, on drafts or on the device. Ctrl-C or
SIGTERM ends the server when its answers are complete, or after --drain-seconds; a second one ends
it at once."""

MODEL = shared.MODEL.replace("the bundled model", "smollm2-135m, if it may be downloaded, else the\nbundled model")
MODEL += "; may be repeated"

SLOTS = 16

PARALLEL = """\
the most answers per model that are computed at the same time; others wait. Each has a context of -c
tokens; they share the memory of the cache; -1 = the default"""

HOST = """\
address to listen on; others than those of this machine need --api-key, and accept requests from
everywhere"""

API_KEY = """\
a key that every request must have, but those to /health and for the page at /; may be repeated:
requests with different keys share nothing that the cache holds"""

API_KEY_FILE = """\
a file with further keys, one a line; empty lines and those that begin with # are left out"""

CORS_ORIGINS = """\
origins of web sites whose pages may read answers, such as https://chat.example; localhost = pages of
this machine, * = all; default: none"""

SSL_CERT_FILE = """\
a certificate in PEM format, with those that signed it: the server then speaks HTTPS only; needs
--ssl-key-file"""

MODELS_DIR = """\
a folder whose GGUF files are offered, too, by their names without .gguf"""

CACHE_DISK = """\
GiB of files for texts that the cache has held, so that a prompt that begins like one of them is read
from there, also after a restart; 0 = none"""

CACHE_DISK_PATH = """\
the folder for --cache-disk; default: one in the user's cache"""

SLOT_SAVE_PATH = """\
a folder in which clients may save what slots hold, by POST /slots/N?action=save, and take it up
again; default: they may not"""

TIMEOUT = """\
time in seconds for a client to send a body, or to go on reading its answer: sets --body-seconds and
--reader-seconds unless they are given"""

SAMPLING = """\
The values for requests that give none. Without a flag, they are what the model's file recommends, or
else the defaults here; Ollama's interface has other defaults."""

LIMITS: dict[str, tuple[str, str]] = {
    "header_seconds": ("X", "most seconds in which the header of a request must arrive"),
    "body_bytes": ("N", "most bytes of a request's body"),
    "body_seconds": ("X", "most seconds in which a body must arrive"),
    "json_depth": ("N", "most levels of nesting in a body"),
    "json_items": ("N", "most commas and opening brackets in a body, those in texts included"),
    "messages": ("N", "most messages of a conversation"),
    "tools": ("N", "most tools of a request"),
    "stop": ("N", "most stop texts of a request"),
    "logit_bias": ("N", "most tokens in logit_bias"),
    "prompts": ("N", "most prompts of a request"),
    "n": ("N", "most answers to one prompt"),
    "top_logprobs": ("N", "most log-probabilities per token"),
    "schema_bytes": ("N", "most bytes of a schema or a grammar"),
    "queue": ("N", "most requests that wait; further ones are answered with status 503"),
    "reader_seconds": ("X", "seconds after which a client that reads nothing is disconnected"),
    "backlog": ("N", "tokens of an answer that wait for a slow client, after which its computation pauses"),
}
"""The metavar and the help of the flag of each limit; the flag of ``n`` is --most-n, the others are named as the limit."""


def limit_flag(name: str) -> str:
    """The flag of a limit."""
    return "--most-n" if name == "n" else "--" + name.replace("_", "-")


def parser(prog: str = "bitmirror serve") -> Parser:
    """The command line as an argparse parser; building it imports nothing that is slow to import."""
    top = Parser(
        prog,
        usage=USAGE,
        description=DESCRIPTION,
        foreign=llama_server.SERVE,
        positional="name the model with -m",
        finish=settle,
    )
    model_flags.add_model(top, MODEL, repeated=True)
    model_flags.add_speculation(top)
    number: dict[str, Any] = {"metavar": "N"}
    group = top.add_argument_group("server")
    add = group.add_argument
    add("-np", "--parallel", **number, type=_slots, default=SLOTS, help=PARALLEL)
    add("--host", metavar="ADDRESS", default="127.0.0.1", type=filled("give an address"), help=HOST)
    add("--port", **number, type=whole(0, 65535), default=8080, help="port to listen on; 0 = a free one")
    add("--api-key", metavar="KEY", action="append", default=[], type=filled("give a key"), help=API_KEY)
    add("--api-key-file", metavar="FILE", type=filled("name a file"), help=API_KEY_FILE)
    add("--cors-origins", metavar="ORIGIN,...", type=_origins, default=[], help=CORS_ORIGINS)
    pem: dict[str, Any] = {"metavar": "FILE", "type": filled("name a PEM file")}
    add("--ssl-cert-file", "--ssl-certfile", **pem, dest="ssl_cert_file", help=SSL_CERT_FILE)
    add("--ssl-key-file", "--ssl-keyfile", **pem, dest="ssl_key_file", help="the private key of --ssl-cert-file")
    aliases: dict[str, Any] = {"metavar": "NAME", "action": "append", "default": []}
    add(
        "-a",
        "--alias",
        "--served-model-name",
        **aliases,
        dest="alias",
        help="names of the first model, with commas: the first one is its name in answers",
    )
    shared.add_pooling(group)
    add("--chat-template", metavar="NAME", help=f"the chat template: {', '.join(TEMPLATES)}, or a Jinja file")
    add("--chat-template-file", metavar="FILE", help="a Jinja file with the chat template")
    add("--no-webui", "--no-ui", dest="webui", action="store_false", help="offer no page for conversations at /")
    add("--cache-disk", **number, type=whole(0), default=0, help=CACHE_DISK)
    add("--cache-disk-path", metavar="FOLDER", type=filled("name a folder"), help=CACHE_DISK_PATH)
    add("--slot-save-path", metavar="FOLDER", type=filled("name a folder"), help=SLOT_SAVE_PATH)
    add("--models-dir", metavar="FOLDER", help=MODELS_DIR)
    add("--models-max", **number, type=whole(1), default=4, help="most models that are open at the same time")
    add("-to", "--timeout", metavar="X", type=real(0, above=True), help=TIMEOUT)
    add("--drain-seconds", metavar="X", type=real(0), default=30.0, help="time for answers to end when the server ends")
    add_sampling(partial(top.add_argument_group("sampling", SAMPLING).add_argument, action=Given))
    add = top.add_argument_group("limits of a request").add_argument
    for limit in fields(Limits):
        metavar, text = LIMITS[limit.name]
        kind = whole(1) if metavar == "N" else real(0, above=True)
        add(
            limit_flag(limit.name),
            dest=f"limit_{limit.name}",
            metavar=metavar,
            type=kind,
            default=limit.default,
            help=text,
        )
    group = top.add_argument_group("other")
    group.add_argument("--version", action="store_true", help="print the version and exit")
    shared.add_other(group, "log every request, and show the traceback of an error")
    return top


def settle(args: argparse.Namespace) -> None:
    """Combines the flags that have one meaning; raises UsageError if they contradict one another."""
    from engine.serving.hosts import is_loopback

    shared.settle_model(args)
    shared.settle_device(args)
    args.alias = [name for names in args.alias for name in names.split(",") if name]
    if args.timeout is not None:
        for limit in ("limit_body_seconds", "limit_reader_seconds"):
            if getattr(args, limit) == getattr(Limits, limit.removeprefix("limit_")):
                setattr(args, limit, args.timeout)
    if args.api_key_file is not None:
        args.api_key = [*args.api_key, *_keys(args.api_key_file)]
    if args.chat_template_file is not None:
        if args.chat_template is not None:
            raise UsageError("--chat-template and --chat-template-file are both given: use only one of them")
        # With a folder, a name is never that of a built-in template.
        args.chat_template = os.path.abspath(args.chat_template_file)
    if (args.ssl_cert_file is None) != (args.ssl_key_file is None):
        raise UsageError("HTTPS needs a certificate and its key: give both --ssl-cert-file and --ssl-key-file")
    if not is_loopback(args.host) and not args.api_key:
        raise UsageError(f"--host {args.host} can be reached by others: protect the server with --api-key KEY")
    if args.cache_disk_path is not None and not args.cache_disk:
        raise UsageError(
            "--cache-disk-path is the folder of a cache on disk: say how large that is with --cache-disk N"
        )
    if len(args.model) > 1 and args.draft_model:
        raise UsageError("a draft model drafts for one model: give one -m, or leave out --draft-model")


def _keys(path: str) -> list[str]:
    """The API keys in a file.  Raises UsageError if it cannot be read, or holds none."""
    try:
        lines = [line.strip() for line in Path(path).expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~name of an unknown user
        problem = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise UsageError(f"the keys in {shown(path)} cannot be read ({problem}): give another --api-key-file") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"{shown(path)} holds no keys: write one a line, or leave out --api-key-file")
    return keys


def _slots(text: str) -> int:
    """A number of slots; -1 stands for the default, as in llama-server."""
    return SLOTS if text == "-1" else int(whole(1, MOST_PARALLEL, "-1 leaves the choice to the server")(text))


def _origins(text: str) -> list[str]:
    """Origins from a list with commas."""
    from engine.serving.hosts import is_origin

    found = [each.strip().rstrip("/") for each in text.split(",")]
    for each in found:
        if not is_origin(each):
            raise argparse.ArgumentTypeError(
                f"must be origins such as https://chat.example, localhost or *, not {each!r:.80}"
            )
    return found


def limits(args: argparse.Namespace) -> Limits:
    """The limits that the flags set."""
    return Limits(**{limit.name: getattr(args, f"limit_{limit.name}") for limit in fields(Limits)})
