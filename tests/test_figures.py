"""Figures of the book: they are up to date, their facts are those of the files and the code, and pages show them."""

import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import gguf
import numpy as np
import pytest

from docs import figures
from engine.gguf.file import read_gguf
from engine.hub.resolve import resolve
from tests.conftest import REPOSITORY

NAMES = [*figures.FIGURES, *figures.PLOTS]
SVG = "{http://www.w3.org/2000/svg}"


@cache
def facts(name: str) -> Any:
    if name in ("step", "lanes", "warpgroup", "loads"):
        pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")
    if name in ("lanes", "warpgroup", "loads"):
        pytest.importorskip("greenlet", reason="the simulator needs the extra simulator")
    return figures.module(name).facts()


def written(path: Path) -> str:
    """The digest that an image carries."""
    found = re.search(r"<dc:description>facts (\w+),", path.read_text(encoding="utf-8"))
    assert found, f"{path.name} has no digest"
    return found[1]


@pytest.mark.parametrize("name", NAMES)
def test_an_image_shows_the_facts_of_today(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # facts do not need it
    monkeypatch.delitem(sys.modules, "docs.figures.style", raising=False)
    today = figures.digest(facts(name))
    for path in figures.files(name).values():
        assert written(path) == today, f"{path.name} is out of date; run: python -m docs.figures {name}"


def test_other_facts_have_another_digest() -> None:
    given = {"a": [1, 2.5], "b": {"c": "x"}}
    assert figures.digest(given) == figures.digest({"b": {"c": "x"}, "a": [1, 2.5]})
    assert figures.digest(given) != figures.digest({"b": {"c": "x"}, "a": [1, 2.25]})


@pytest.mark.parametrize("name", NAMES)
def test_text_is_text_on_the_page_and_large_enough_for_a_phone(name: str) -> None:
    for path in figures.files(name).values():
        root = ElementTree.parse(path).getroot()
        width, height = float(root.get("width", "0")), float(root.get("height", "0"))
        assert root.find(f".//{SVG}image") is None
        texts = root.findall(f".//{SVG}text")
        assert len(texts) > 10
        for text in texts:
            style = text.get("style", "")
            size = float(re.findall(r"([\d.]+)px", style)[0])
            # 340 pixels is the width of a page on a phone; figures of 360 almost keep their size there.
            assert size * min(1, 340 / width) > (11 if width <= 360 else 8.4), f"{path.name}: {text.text}"
            x, y = ([float(n) for n in re.findall(r"[-\d.]+", text.get("transform", ""))] + [0, 0])[:2]
            x, y = float(text.get("x", x)), float(text.get("y", y))
            wide = 0.5 * size * len(text.text or "")
            anchor = (re.findall(r"text-anchor: (\w+)", style) or ["start"])[0]
            left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
            assert left >= -1 and left + wide <= width + 1 and 0 < y < height, f"{path.name}: {text.text}"


def test_each_figure_is_in_a_chapter_and_each_picture_exists() -> None:
    shown = [
        name
        for page in (REPOSITORY / "docs").glob("*.md")
        for name in re.findall(r'src="images/([\w-]+)-light\.svg"|\(images/([\w-]+)\.svg\)', page.read_text("utf-8"))
    ]
    names = {a or b for a, b in shown}
    assert set(NAMES) <= names
    images = {path.stem for path in figures.IMAGES.glob("*.svg")}
    drawn = {path.stem for name in NAMES for path in figures.files(name).values()}
    assert images - drawn == names - set(NAMES)  # those made by hand
    assert drawn <= images


def test_pictures_made_by_hand_scroll_instead_of_shrinking() -> None:
    """By the style of the book, their text is then as large as that of other figures."""
    css = (REPOSITORY / "docs" / "_static" / "book.css").read_text(encoding="utf-8")
    least = re.search(r"img\.wide \{[^}]*min-width: (\d+)rem", css)
    assert least
    drawn = {path for name in NAMES for path in figures.files(name).values()}
    by_hand = sorted({*figures.IMAGES.glob("*.svg")} - drawn)
    assert by_hand
    for path in by_hand:
        root = ElementTree.parse(path).getroot()
        width = float(root.get("viewBox", "").split()[2])
        sizes = [float(element.get("font-size", 99)) for element in root.iter()]
        assert width > 480, f"{path.name} shrinks"
        assert min(sizes) * 16 * int(least[1]) / width > 11, path.name


@pytest.mark.thorough
def test_drawing_again_gives_the_same_file() -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
    from docs.figures.style import THEMES, Page

    module, found = figures.module("pages"), facts("pages")
    images = []
    for theme in ("light", "dark", "light"):
        page = Page(module.SIZE, theme)
        module.draw(found, page)
        images.append(page.svg(module.TITLE, found))
        assert THEMES[theme]["text"] in images[-1]
    assert images[0] == images[2] != images[1]


# --- facts -----------------------------------------------------------------------------------------------------


def test_the_file_is_that_of_another_reader() -> None:
    found, reader = facts("gguf-file"), gguf.GGUFReader(resolve(None))
    assert [(t.name, t.data_offset, t.n_bytes) for t in reader.tensors] == [
        (name, first, n_bytes) for name, _, _, first, n_bytes in found["tensors"]
    ]
    assert found["data"] == reader.data_offset and found["alignment"] == reader.alignment
    assert found["table"] == reader.tensors[0].field.offset
    last = reader.tensors[-1].field
    assert found["table_end"] == last.offset + sum(part.nbytes for part in last.parts)
    for key, _, count, first, end in found["arrays"]:
        # The field begins with its key and two types, and the next one begins with its own key.
        field = reader.fields[key]
        assert field.offset < first < end <= field.offset + sum(part.nbytes for part in field.parts) + 100
        assert len(field.data) == count


def test_the_layer_multiplies_every_matrix_of_the_file_once() -> None:
    found, tensors = facts("layer"), read_gguf(resolve(None)).tensors
    multiplied = [
        (name, rows, columns, kind) for call in found["calls"] for name, rows, columns, kind in call["matrices"]
    ]
    own = {
        name.removeprefix("blk.0."): t for name, t in tensors.items() if name.startswith("blk.0.") and len(t.shape) == 2
    }
    assert sorted(multiplied) == sorted(
        (name.removesuffix(".weight"), *t.shape, t.type.name) for name, t in own.items()
    )
    made = {0}
    for call in found["calls"]:
        assert set(call["in"]) <= made, "an operation reads what another one has made"
        made |= {number for number, _ in call["out"]}


def test_a_record_has_the_bytes_of_eight_blocks() -> None:
    found, reader = facts("record"), gguf.GGUFReader(resolve(None))
    (tensor,) = (tensor for tensor in reader.tensors if tensor.name == found["tensor"])
    blocks = np.array(found["blocks"])
    assert np.array_equal(blocks, tensor.data[:8, :144])
    pieces = [
        blocks[:, source + at : source + at + size].reshape(-1)
        for source, length, size in found["fields"]
        for at in range(0, length, size)
    ]
    assert np.concatenate(pieces).tolist() == found["record"]


def test_pages_hold_what_their_sequences_need() -> None:
    """Each sequence finds every position that a next token sees in its pages; whole chunks that are the same are shared."""
    found = facts("pages")
    for pages, tables, window in zip(found["pages"], found["tables"], (0, found["window"]), strict=True):
        for slot, (length, table) in enumerate(zip(found["lengths"], tables, strict=True)):
            text = [p if p < found["common"] else p + 1000 * slot for p in range(length)]
            held = dict(table)
            for chunk in range((max(0, length - window + 1) if window else 0) // 64, -(-length // 64)):
                tokens = text[64 * chunk : 64 * (chunk + 1)]
                assert pages[held[chunk]] == [tokens[0], len(tokens)]
        shared = set(dict(tables[0]).values()) & set(dict(tables[1]).values())
        assert shared == (set() if window else {dict(tables[0])[chunk] for chunk in range(found["common"] // 64)})
    assert found["found"] == [0, found["common"] // 64 * 64]


def test_chunks_join_to_one_softmax() -> None:
    """The weights of all chunks and the final sums are those of a softmax over all positions."""
    chunks = facts("chunks")["chunks"]
    end = chunks[-1]
    scaled = np.concatenate([np.array(chunk["weights"]) * np.exp(chunk["m"] - end["M"]) for chunk in chunks])
    assert scaled.sum() == pytest.approx(end["L"], rel=2e-3)
    assert end["M"] == max(chunk["m"] for chunk in chunks)
    assert all(max(chunk["weights"]) == 1 for chunk in chunks)


def test_probabilities_are_those_of_all_logits() -> None:
    from docs.figures import bundled

    found = facts("sampling")
    logits, _ = bundled.model().prefill(bundled.model().tokenize(found["prompt"]))
    p = np.sort(np.exp(logits - logits.max(), dtype=np.float64))[::-1]
    p /= p.sum()
    rows = found["rows"]
    assert [row["p"] for row in rows] == pytest.approx(p[: len(rows)], abs=1e-4)
    # Filters by their definitions: the k largest; as few as reach the mass; those near the largest.
    params, left = found["params"], p[: found["params"]["top_k"]]
    mass = np.cumsum(left / left.sum())
    left = left[: int(np.searchsorted(mass, params["top_p"])) + 1]
    left = left[left >= params["min_p"] * left[0]]
    assert [not row["dropped"] for row in rows] == [i < left.size for i in range(len(rows))]


def test_a_step_is_its_parts() -> None:
    found = facts("step")
    layers = found["n_layer"] * len(found["layer"])
    assert found["total"] == len(found["before"]) + layers + len(found["after"]) + len(found["choice"])
    multiplied = {name for *_, names in found["layer"] for name in names}
    assert multiplied == {f"attn_{n}" for n in ("q", "k", "v", "output")} | {f"ffn_{n}" for n in ("gate", "up", "down")}


def test_a_token_of_the_delta_rule() -> None:
    """By the formulas: M decays; then M k becomes v, as far as the strength says; what is orthogonal to k stays."""
    found = {name: np.array(value) for name, value in facts("delta-rule").items()}
    key, after = found["key"], found["after"]
    assert key @ key == pytest.approx(1, abs=1e-3)
    assert np.allclose(found["forgotten"], found["decay"] * found["before"], atol=1e-3)
    old = found["forgotten"] @ key
    assert np.allclose(after @ key, old + found["beta"] * (found["value"] - old), atol=1e-3)
    across = np.linalg.svd(key[None])[2][1:]
    assert np.allclose(after @ across.T, found["forgotten"] @ across.T, atol=1e-3)


def test_lanes_are_those_of_the_manual() -> None:
    """The formulas of the PTX ISA for mma.m16n8k32 with .s8: element i of the lane with group g and thread t in it."""
    found = facts("lanes")
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(16):
            row, position = g + 8 * (4 <= i < 8 or i >= 12), 4 * t + i % 4 + 16 * (i >= 8)
            assert tuple(found["weights"][row][position // 4]) == (lane, i // 4)
        for i in range(8):
            assert tuple(found["activations"][g][(4 * t + i % 4 + 16 * (i >= 4)) // 4]) == (lane, i // 4)
        for i in range(4):
            assert tuple(found["sums"][g + 8 * (i >= 2)][2 * t + i % 2]) == (lane, i)


def test_lanes_multiply_as_they_are_drawn() -> None:
    found = facts("lanes")
    from docs.figures.lanes import operands
    from engine.cuda.runtime.simulator import _mma_law

    rng = np.random.default_rng(0)
    a, b = (rng.integers(-128, 128, (rows, 32)).astype(np.int8) for rows in (16, 8))
    lanes = _mma_law(operands(a, b, found["weights"], found["activations"]))
    sums = [[int(lanes[lane][k]) for lane, k in line] for line in found["sums"]]
    assert sums == (a.astype(int) @ b.astype(int).T).tolist()


def test_warpgroups_have_the_sums_of_the_manual() -> None:
    """The formulas of the PTX ISA for the result of wgmma.m64nNk32; tests of the simulator have the core matrices."""
    found = facts("warpgroup")
    for row, line in enumerate(found["sums"]):
        for column, (lane, k) in enumerate(line):
            assert lane == 4 * (row % 8) + column % 8 // 2
            assert k == 4 * (column // 8) + 2 * (row // 8) + column % 2
    words = np.array(found["words"])
    assert sorted(words.reshape(-1)) == list(range(words.size))


def test_requests_share_slots_round_by_round() -> None:
    from docs.figures import bundled
    from docs.figures.batches import REQUESTS

    found = facts("batches")
    taken: set[tuple[int, int]] = set()
    for (name, arrival, did), (given, round_, count, prompt) in zip(found["requests"], REQUESTS, strict=True):
        assert (name, arrival) == (given, round_)
        assert sum(read for *_, read, _ in did) == len(bundled.model().tokenize(prompt))
        assert sum(tokens for *_, tokens in did) == count
        rounds = [at for at, *_ in did]
        assert rounds == list(range(rounds[0], rounds[0] + len(rounds))) and rounds[0] >= arrival
        assert len({slot for _, slot, *_ in did}) == 1
        places = {(at, slot) for at, slot, *_ in did}
        assert not places & taken, "two requests have the same slot"
        taken |= places
    assert {slot for _, slot in taken} == set(range(found["slots"]))
    assert any(did[0][0] > arrival for _, arrival, did in found["requests"])  # somebody waits
    for _, arrival, did in found["requests"]:
        for at in range(arrival, did[0][0]):
            assert {(at, slot) for slot in range(found["slots"])} <= taken, "a request waits although a slot is free"


def test_answers_part_because_of_sums() -> None:
    found = facts("parting")
    tree, loop = ([float(logit) for logit in found["logits"][name]] for name in ("tree", "loop"))
    assert tree[0] > tree[1] and loop[1] > loop[0]
    assert abs(tree[0] - loop[0]) < 0.1 and abs(tree[1] - loop[1]) < 0.1  # roundings, not another model
    assert found["tree"] != found["loop"] and found["parted"] > 0


def test_an_answer_begins_with_the_most_probable_token() -> None:
    from docs.figures import bundled
    from docs.figures.answer import PROMPT

    found, llm = facts("answer"), bundled.model()
    assert llm.detokenize(found["ids"]) == PROMPT and len(found["tokens"]) == len(found["ids"])
    first = llm.complete(PROMPT, max_tokens=1, temperature=0, logprobs=3).logprobs[0]
    shares = [f"{100 * np.exp(entry.logprob):.1f} %" for entry in first.top]
    assert found["best"] == [[bundled.piece(entry.id), share] for entry, share in zip(first.top, shares, strict=True)]
    assert found["answer"][0] == found["best"][0][0] and "".join(found["answer"]).strip("⏎") == "␣a␣+␣b"


def test_the_law_adds_in_the_orders_that_are_drawn() -> None:
    from docs.figures.orders import POSITIONS, UNITS

    found = facts("orders")
    assert sum(found["chains"], []) == list(range(UNITS)) and len(found["chains"]) == 8
    assert sum(found["groups"], []) == list(range(0, POSITIONS, 64))
    assert [chunks[0] for chunks in found["groups"]] == list(range(0, POSITIONS, 512))


def test_a_slot_is_used_again_as_soon_as_it_is_free() -> None:
    from docs.figures.timeline import REQUESTS, WAYS

    found, counts = facts("timeline"), list(REQUESTS.values())
    for way, steps in found.items():
        assert all(len(row) == WAYS[way][0] for row in steps)
        assert {name: sum(name in row for row in steps) for name in REQUESTS} == REQUESTS
    assert len(found["one"]) == sum(counts)
    assert len(found["fixed"]) == max(counts[:3]) + max(counts[3:])
    steps, waiting = found["continuous"], set(REQUESTS)
    for row in steps:
        waiting -= set(row)
        assert "" not in row or not waiting, "a request waits although a slot is free"
    assert len(steps) == max(counts)


def test_loads_of_a_warp() -> None:
    from docs.figures.loads import sectors

    one, two, three, four = facts("loads").values()
    blocks = [[first // 144 for first, _ in loads] for loads in (one, two, three, four)]
    assert [len(set(found)) for found in blocks] == [32, 32, 1, 4]
    assert sectors(one) == 32 * [1] and sectors(two) == 32 * [4]
    assert sum(sectors(three)) == 32 * 4 and sum(sectors(four)) == 32 * 16


# --- pages -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_page_shows_one_image_per_theme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("myst_parser", reason="the book is built by Sphinx with MyST")
    from sphinx.testing.util import SphinxTestApp

    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "_ext"))
    source = tmp_path / "source"
    (source / "images").mkdir(parents=True)
    for theme in ("light", "dark"):
        (source / "images" / f"one-{theme}.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (source / "conf.py").write_text('extensions = ["myst_parser", "figures"]\n')
    dark = '<source media="(prefers-color-scheme: dark)" srcset="images/one-dark.svg">'
    good = f'<picture>\n{dark}\n<img alt="What &amp; why" src="images/one-light.svg">\n</picture>\n'
    bad = good.replace(f"{dark}\n", ""), good.replace("alt", "title")
    (source / "index.md").write_text("\n".join(("# Page\n", good, *bad)))
    app = SphinxTestApp("html", srcdir=source, builddir=tmp_path / "build")
    app.build()
    page = SimpleNamespace(html=(app.outdir / "index.html").read_text(encoding="utf-8"), said=app.warning.getvalue())
    app.cleanup()
    images = re.findall(r"<img[^>]*>", page.html)
    assert [re.findall(r"one-\w+\.svg|only-\w+", image) for image in images] in (
        [["only-light", "one-light.svg"], ["only-dark", "one-dark.svg"]],
        [["one-light.svg", "only-light"], ["one-dark.svg", "only-dark"]],
    )
    assert all('alt="What &amp; why"' in image for image in images)
    assert page.said.count("a picture needs a dark source, and an image with the attributes alt and src") == 2
