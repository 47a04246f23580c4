"""The same requests to servers, alone and at the same time: each must get the same answer.

``python -m tests.served MODEL ... -n 64 --device cuda`` sends random requests one after another, all at once, in reverse
order, after a restart, and to a server that drafts, and compares texts, calls and log-probabilities, which CI does only on a
CPU.
Calls are asked for only if there is a chat template: ``--chat-template chatml`` gives one to the bundled model.
``python -m tests.served pycoder pycoder-moe-mtp -n 128 -np 128`` lets the server compute 128 answers at once.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine.synthetic.model import make_model

N_CTX = 512

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Takes {field}.",
            "parameters": {"type": "object", "properties": {field: kind}, "required": [field]},
        },
    }
    for name, field, kind in (
        ("read_file", "path", {"type": "string", "maxLength": 12}),
        ("wait", "seconds", {"type": "integer"}),
        ("sort", "words", {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4}),
    )
]

FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
    },
}


def bodies(n: int, n_vocab: int, chats: bool, seed: int = 0) -> list[dict[str, Any]]:
    """Random requests, some of which begin alike; ``chats``: every second one is a conversation with tools, a schema or
    both, whose answer may be cut off."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, n_vocab, (4, 300)).tolist()
    made = []
    for i in range(n):
        prompt = texts[int(rng.integers(4))][: int(rng.integers(1, 300))]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": int(rng.integers(1, 48)), "seed": i, "ignore_eos": True}
        body |= {"temperature": float(rng.choice([0, 0.8, 1.3])), "top_k": int(rng.choice([0, 40]))}
        body |= {"repeat_penalty": float(rng.choice([1.0, 1.2]))}
        if i % 3 == 0:
            body["logprobs"] = 2
        if chats and i % 2:
            del body["prompt"], body["ignore_eos"]
            body.pop("logprobs", None)
            body["messages"] = [{"role": "user", "content": f"Wait {i} seconds. " * int(rng.integers(1, 9))}]
            kind = i // 2 % 4
            if kind < 3:
                body |= {"tools": TOOLS, "tool_choice": "auto" if kind == 2 else "required"}
            if kind > 1:
                body["response_format"] = FORM
            if kind == 0:
                body |= {"max_tokens": 150, "parallel_tool_calls": False}
        made.append(body)
    return made


@contextmanager
def server(model: str, flags: Sequence[str]) -> Iterator[str]:
    """The address of a server that answers."""
    words = [sys.executable, "-m", "engine.serve", "-m", model, "-c", str(N_CTX), "--port", "0", *flags]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        while (found := re.search(r"listening on (http://\S+)", line := process.stderr.readline())) is None:
            if not line:
                raise SystemExit("the server has ended before it listened")
        with ThreadPoolExecutor(1) as pool:
            log = pool.submit(process.stderr.read)  # it must not fill the pipe
            try:
                yield found[1]
            except OSError as error:
                process.terminate()
                ended = process.wait()
                raise SystemExit(f"{error!r}; the server ended with status {ended}:\n{log.result()[-4000:]}") from error
            finally:
                process.terminate()
    finally:
        process.kill()
        process.wait()


def answer(url: str, body: dict[str, Any]) -> Any:
    """What the server answers, without what differs by design."""
    route = "chat/completions" if "messages" in body else "completions"
    request = urllib.request.Request(
        f"{url}/v1/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"]


def differing(model: str, name: str, args: argparse.Namespace) -> bool:
    """Print how many answers of a server differ from those alone, of each run; returns whether any does.

    model: the file, or what the catalog calls it; name: what it is called here.
    """
    flags = ["--device", args.device, "-np", str(args.np), "--queue", str(args.n)]
    if args.chat_template:
        flags += ["--chat-template", args.chat_template]
    begun = time.perf_counter()

    def at_once(url: str, asked: list[dict[str, Any]]) -> list[Any]:
        with ThreadPoolExecutor(args.n) as pool:
            return list(pool.map(lambda body: answer(url, body), asked))

    with server(model, flags) as url:
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            n_vocab = json.load(response)["data"][0]["meta"]["n_vocab"]
        with urllib.request.urlopen(f"{url}/props") as response:
            chats = not args.no_chats and bool(json.load(response).get("chat_template"))
        asked = bodies(args.n, n_vocab, chats)
        alone = [answer(url, body) for body in asked]
        found = {"all at once": at_once(url, asked), "in reverse order": at_once(url, asked[::-1])[::-1]}
    with server(model, flags) as url:
        found["after a restart"] = at_once(url, asked)
    with server(model, [*flags, "--draft-lookup"]) as url:
        found["with drafts"] = at_once(url, asked)
    wrong = {name: sum(a != b for a, b in zip(alone, own, strict=True)) for name, own in found.items()}
    ends = Counter(choice["finish_reason"] for choices in alone for choice in choices)
    calls = sum(bool(choice.get("message", {}).get("tool_calls")) for choices in alone for choice in choices)
    print(f"{name}: {args.n} answers, of which {calls} have calls; they end by {dict(ends)}")
    print(
        f"{name}: of {args.n} answers differ from those alone: "
        + ", ".join(f"{run} {count}" for run, count in wrong.items())
        + f"; {time.perf_counter() - begun:.0f} s",
        flush=True,
    )
    return any(wrong.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Print how many answers differ of each run; exit status 1 if any does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="a file or a name, or NAME:QUANT of a random model")
    parser.add_argument("-n", type=int, default=64, help="the number of requests")
    parser.add_argument("-np", type=int, default=32, help="answers that the server computes at once")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chat-template", help="that of the server, for a model that has none")
    parser.add_argument(
        "--no-chats", action="store_true", help="no conversations: a small vocabulary makes them too long"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        failed = False
        for name in args.models:
            shape, _, quant = name.partition(":")
            path = make_model(Path(folder) / f"{shape}.gguf", shape, quant) if quant else name
            failed = differing(str(path), name, args) or failed
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
