"""Run clients against a server: ``python -m tests.clients openai_agents --url http://127.0.0.1:8080``."""

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clients.case import Case
from tests.clients.trial import Failed, tried

NAMES = (
    "claude_code",
    "codex",
    "guidance",
    "instructor",
    "langchain",
    "openai_agents",
    "outlines",
    "pydantic_ai",
    "vercel_ai",
)
"""The clients, each a module of this package."""


def versions(client: Any, node: Path) -> str:
    """The packages of a client with their versions.  Raises LookupError if one is not installed."""
    found = []
    for name in getattr(client, "PACKAGES", ()):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            raise LookupError(f"pip install {' '.join(client.PACKAGES)} jsonschema") from None
    for name in getattr(client, "NODE_PACKAGES", ()):
        path = node / "node_modules" / name / "package.json"
        if not path.exists():
            raise LookupError(f"npm install {' '.join(client.NODE_PACKAGES)}, and give the folder as --node")
        found.append(f"{name} {json.loads(path.read_text(encoding='utf-8'))['version']}")
    return ", ".join(found)


def end_of(url: str) -> int:
    """The token that ends an answer."""
    with urllib.request.urlopen(f"{url}/tokenizer_info") as response:
        text = json.load(response)["eos_token"]
    body = json.dumps({"content": text, "parse_special": True}).encode()
    request = urllib.request.Request(f"{url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return int(json.load(response)["tokens"][0])


def main(argv: Sequence[str] | None = None) -> int:
    """Print what came of each trial; exit status 1 if one failed."""
    parser = argparse.ArgumentParser("python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"the clients, by default all: {', '.join(NAMES)}")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server")
    parser.add_argument("--node", type=Path, default=Path(), help="a folder with node_modules")
    parser.add_argument("--turns", type=int, default=6, help="of a conversation with a program")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"there is no client {min(unknown)!r}: the names are {', '.join(NAMES)}")
    with urllib.request.urlopen(f"{args.url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    end = end_of(args.url)
    failed = 0
    for name in args.names or NAMES:
        client = import_module(f"tests.clients.{name}")
        try:
            print(f"{name}: {versions(client, args.node)}")
        except LookupError as error:
            print(f"{name}: skipped, not installed: {error}")
            continue
        for trial in client.trials():
            begun = time.monotonic()
            try:
                with TemporaryDirectory(prefix="clients-", ignore_cleanup_errors=True) as folder:
                    result = tried(trial, Case(args.url, model, args.node.absolute(), Path(folder), end, args.turns))
            except Failed as error:
                failed += 1
                result = f"FAILED: {error}"
            print(f"  {trial.name}: {result}; {time.monotonic() - begun:.0f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
