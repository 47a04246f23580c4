"""``POST /slots/{id}?action=...``: slots are saved, taken up and erased in llama-server's words, and nobody reads or writes
files elsewhere."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from engine.serving.app import app
from engine.serving.served import Spec
from tests.serving.bundled import bundled

pytestmark = pytest.mark.together("serving")

opened = partial(bundled, parallel=2, n_ctx=256)
IDS = [*range(400, 550)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TestClient]:
    with TestClient(app([Spec("pycoder", opened)], slot_folder=folder), "http://localhost") as client:
        yield client


def act(client: TestClient, slot: object, action: str, status: int = 200, **fields: Any) -> Any:
    # As escapes, a name may have half a character.
    headers = {"content-type": "application/json"}
    answer = client.post(f"/slots/{slot}?action={action}", content=json.dumps(fields), headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]["message"]


def complete(client: TestClient, slot: int, ids: list[int] = IDS, key: str = "") -> tuple[Any, int]:
    """The tokens of an answer in a slot, and how many of the prompt the cache held."""
    body = {"prompt": ids, "n_predict": 20, "id_slot": slot, "seed": 7, "return_tokens": True, "ignore_eos": True}
    answer = client.post("/completion", json=body, headers={"authorization": f"Bearer {key}"} if key else {})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["id_slot"] == slot
    return found["tokens"], found["timings"]["cache_n"]


@pytest.mark.first
def test_a_slot_is_saved_erased_and_restored(client: TestClient, folder: Path) -> None:
    ids, _ = complete(client, 1)
    saved = act(client, 1, "save", filename="one.bin")
    n_bytes = (folder / "one.bin").stat().st_size
    assert saved.pop("timings")["save_ms"] > 0
    assert saved == {"id_slot": 1, "filename": "one.bin", "n_saved": 169, "n_written": n_bytes}
    assert act(client, 1, "erase") == {"id_slot": 1, "n_erased": 169}
    assert act(client, 1, "erase") == {"id_slot": 1, "n_erased": 0}
    assert complete(client, 1) == (ids, 0)
    for slot in (0, 1):
        act(client, slot, "erase")
    restored = act(client, 0, "restore", filename="one.bin")
    assert restored.pop("timings")["restore_ms"] > 0
    assert restored == {"id_slot": 0, "filename": "one.bin", "n_restored": 169, "n_read": n_bytes}
    assert complete(client, 0) == (ids, 149)


def test_an_erased_slot_without_a_body(client: TestClient) -> None:
    complete(client, 0)
    answer = client.post("/slots/0?action=erase")
    assert answer.json() == {"id_slot": 0, "n_erased": 169}


def test_what_another_slot_uses_is_not_erased(client: TestClient) -> None:
    ids, _ = complete(client, 0)
    assert complete(client, 1)[1] == 128  # whole pages of the other slot
    act(client, 0, "erase")
    assert complete(client, 1) == (ids, 149)


def test_an_empty_slot(client: TestClient) -> None:
    act(client, 0, "erase")
    assert act(client, 0, "save", filename="empty")["n_saved"] == 0
    complete(client, 0)
    assert act(client, 0, "restore", filename="empty")["n_restored"] == 0
    assert act(client, 0, "erase")["n_erased"] == 0


def test_a_damaged_file_is_read_again(client: TestClient, folder: Path) -> None:
    ids, _ = complete(client, 0)
    act(client, 0, "save", filename="damaged")
    data = bytearray((folder / "damaged").read_bytes())
    data[-100] ^= 1
    (folder / "damaged").write_bytes(data)
    act(client, 0, "erase")
    assert act(client, 0, "restore", filename="damaged")["n_restored"] == 169
    assert complete(client, 0) == (ids, 149)


@pytest.mark.parametrize(
    "name", ["", "a/b", "../a", "..", ".a", "a\\b", "/etc/passwd", "c:a", "a\0", "a\n", " a", "x" * 256, "\ud800", 5]
)
def test_names_that_are_refused(client: TestClient, folder: Path, name: Any) -> None:
    before = sorted(folder.parent.rglob("*"))
    for action in ("save", "restore"):
        message = act(client, 0, action, 400, filename=name)
        assert message.startswith("filename ") and message.endswith(".") and str(folder) not in message
    assert sorted(folder.parent.rglob("*")) == before


def test_mistakes(client: TestClient, folder: Path) -> None:
    assert act(client, 0, "restore", 400, filename="missing").startswith(
        "the state cannot be read from missing: No such"
    )
    (folder / "no state").write_text("hello")
    message = act(client, 0, "restore", 400, filename="no state")
    assert message.startswith("no state is not a saved state") and str(folder) not in message
    assert act(client, 0, "save", 400) == "filename is missing."
    assert act(client, 0, "forget", 400, filename="a").startswith("action must be save, restore or erase, not 'forget'")
    for slot in (2, -1, "x", 10**30, "²"):
        assert "slots 0 to 1" in act(client, slot, "save", 400, filename="a")
    answer = client.post("/completion", json={"prompt": IDS, "id_slot": 2})
    assert answer.status_code == 400 and "id_slot must be a whole number, -1 to 1" in answer.text


def test_a_server_without_a_folder() -> None:
    with TestClient(app([Spec("pycoder", opened)], preload=False), "http://localhost") as client:
        answer = client.post("/slots/0?action=save", json={"filename": "a"})
        assert answer.status_code == 501 and answer.json()["error"]["type"] == "not_supported_error"
        assert "--slot-save-path" in answer.json()["error"]["message"]


def test_keys_do_not_see_the_slots_of_others(folder: Path) -> None:
    with TestClient(
        app([Spec("pycoder", opened)], keys=["one", "two"], slot_folder=folder), "http://localhost"
    ) as client:
        headers = [{"authorization": f"Bearer {key}"} for key in ("one", "two")]
        complete(client, 0, key="one")
        found = [client.post("/slots/0?action=save", json={"filename": "key"}, headers=each) for each in headers[::-1]]
        assert [each.status_code for each in found] == [400, 200]
        assert "another API key" in found[0].json()["error"]["message"]
        assert client.post("/slots/0?action=erase", headers=headers[1]).status_code == 400
        found = [
            client.post("/slots/1?action=restore", json={"filename": "key"}, headers=each) for each in headers[::-1]
        ]
        assert [each.status_code for each in found] == [400, 200]
        assert "another API key" in found[0].json()["error"]["message"]
        assert complete(client, 1, key="one")[1] == 149
