"""The model hub: references, and the hub's own client against a small server that answers as the hub does."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from engine.errors import FetchError
from engine.hub.repository import Reference, choose
from tests.conftest import REPOSITORY

FILES = {
    "someone/model-GGUF": {
        "README.md": b"text",
        "mmproj-model-f16.gguf": b"GGUF vision",
        "model-Q4_K_M.gguf": b"GGUF q4",
        "model-Q4_K.gguf": b"GGUF q4k",
        "big/model-Q8_0-00001-of-00002.gguf": b"GGUF first",
        "big/model-Q8_0-00002-of-00002.gguf": b"GGUF second",
    },
    "someone/plain": {"model.safetensors": b"no"},
}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that its client uses to list and download files."""

    def respond(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if "someone/gated" in path:
            self.respond(403, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted.")
            return
        if "someone/busy" in path:
            self.respond(429)
            return
        for name, files in FILES.items():
            if path in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
                listed = {"id": name, "sha": "0" * 40, "siblings": [{"rfilename": file} for file in files]}
                self.respond(200, json.dumps(listed).encode(), Content_Type="application/json")
                return
            if path.startswith(f"/api/models/{name}/tree/main"):
                tree = [{"type": "file", "path": file, "size": len(data), "oid": "1"} for file, data in files.items()]
                self.respond(200, json.dumps(tree).encode(), Content_Type="application/json")
                return
            if path.startswith(f"/{name}/resolve/main/"):
                body = files.get(path.removeprefix(f"/{name}/resolve/main/"))
                if body is None:
                    self.respond(404, X_Error_Code="EntryNotFound", X_Repo_Commit="0" * 40)
                else:
                    self.respond(200, body, ETag=f'"{hash(body):x}"', X_Repo_Commit="0" * 40)
                return
        self.respond(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


PROGRAM = """
import json, sys, time
time.sleep = lambda seconds: None  # the client waits longer and longer between its tries
from engine.errors import FetchError
from engine.hub.resolve import resolve
for name in sys.argv[1:]:
    try:
        print(json.dumps(resolve(name).read_bytes().decode()))
    except FetchError as error:
        print(json.dumps(f"error: {error}"))
"""


def fetched(endpoint: str, folder: Path, *names: str) -> list[str]:
    """What each reference fetches: the contents of the file, or the error."""
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder),
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_ETAG_TIMEOUT": "2",
    }
    command = [sys.executable, "-c", PROGRAM, *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_files_of_the_hub(hub: str, tmp_path: Path) -> None:
    answers = fetched(
        hub,
        tmp_path,
        "hf:someone/model-GGUF",
        "hf:someone/model-GGUF:q4_k",
        "hf:someone/model-GGUF:Q8_0",
        "hf:someone/model-GGUF/model-Q4_K.gguf",
        "hf:someone/model-GGUF:Q2_K",
        "hf:someone/model-GGUF/model-Q2_K.gguf",
        "hf:someone/plain",
        "hf:someone/gated:Q4_K_M",
        "hf:someone/busy",
        "hf:no/body",
    )
    assert answers[:4] == ["GGUF q4", "GGUF q4k", "GGUF first", "GGUF q4k"]
    # Every part of a split file is there.
    assert {path.name for path in tmp_path.rglob("*-of-00002.gguf")} == {
        "model-Q8_0-00001-of-00002.gguf",
        "model-Q8_0-00002-of-00002.gguf",
    }
    for answer, words in zip(
        answers[4:],
        (
            "has no file for Q2_K",
            "no such file",
            "no GGUF file",
            "accept the terms",
            "wait a few minutes",
            "no such repository",
        ),
        strict=True,
    ):
        assert answer.startswith("error: hf:"), answer
        assert words in answer, answer
        assert "\n" not in answer


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    for answer in fetched("http://127.0.0.1:9", tmp_path, "hf:a/b/c.gguf", "hf:a/b"):
        assert answer.startswith("error: hf:a/b")
        assert "check the network" in answer
        assert "\n" not in answer


@pytest.mark.parametrize(
    "text",
    [
        "",
        "owner",
        "/repo/file.gguf",
        "owner//file.gguf",
        "owner/repo/",
        "owner/repo:",
        "owner/repo:Q4_0/a.gguf",
        "a:b/c",
    ],
)
def test_references_that_name_nothing(text: str) -> None:
    with pytest.raises(FetchError, match="write hf:owner/repo:QUANT or hf:owner/repo/file.gguf"):
        Reference.parse(text)


def test_which_file_a_quantization_means() -> None:
    files = ["a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "a-IQ4_XS.gguf", "sub/a-q8_0.gguf", "a.imatrix", "a-UD-Q4_K_XL.gguf"]
    for quant, file in (("", files[0]), ("q4_k_s", files[1]), ("IQ4_XS", files[2]), ("Q8_0", files[3])):
        assert choose(Reference("o/r", "", quant), files) == file
    with pytest.raises(
        FetchError, match=r"has no file for Q4_K: write hf:o/r/ and one of a-IQ4_XS.gguf, a-Q4_K_M.gguf"
    ):
        choose(Reference("o/r", "", "Q4_K"), files)
    with pytest.raises(FetchError, match="has several such files"):
        choose(Reference("o/r", "", ""), ["a-Q5_0.gguf", "a-Q6_K.gguf"])
    assert choose(Reference("o/r", "", ""), ["a.gguf", "mmproj.gguf"]) == "a.gguf"
