"""Plots of measurements: valid images, with every point where its measurement belongs."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import plot_comparison, plot_depth, plot_roofline, plot_speedup, plot_users
from benchmarks.measured import measured, measurements, number, table
from engine.errors import UsageError
from engine.gguf.file import read_gguf
from engine.models.network_config import ExpertsConfig
from engine.models.traffic import weight_bytes_per_token
from engine.synthetic.model import make_model
from engine.synthetic.shapes import shapes
from tests.conftest import REPOSITORY

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")


MIXTURE = "qwen3.6-35b-a3b-Q4_K_M"
TESTS = [
    *(measured("qwen3-8b Q4_K_M", 500.0 * rows**0.5, prompt=rows) for rows in (1, 2, 16, 2048)),
    measured(MIXTURE, 9000.0, prompt=512),
    measured(MIXTURE, 8000.0, prompt=512, depth=8192),
    measured(MIXTURE, 700.0, answer=128),
    measured(MIXTURE, 650.0, answer=128, depth=8192),
]


def texts(image: str) -> set[str]:
    return {text.text for text in ElementTree.fromstring(image).findall(f".//{SVG}text") if text.text}


def test_measurements_are_arrays_or_lines(tmp_path: Path) -> None:
    array, lines = tmp_path / "array.json", tmp_path / "lines.json"
    array.write_text(json.dumps(TESTS, indent=2))
    lines.write_text("\n".join(json.dumps(each) for each in TESTS))
    assert measurements([str(array)]) == measurements([str(lines)]) == TESTS
    assert measurements([str(array), str(lines)]) == TESTS + TESTS


def test_numbers_of_tables() -> None:
    assert [number(cell) for cell in ("13 956 ± 9", "0.2", "1 701")] == [13956, 0.2, 1701]
    assert table("performance.md", "Qwen3-8B, depth", "0")[0][1] == "552.2"
    with pytest.raises(UsageError, match="has no table whose header begins with no | such"):
        table("performance.md", "no", "such")


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize("plot", [plot_roofline, plot_depth])
def test_files_become_an_image(plot: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(TESTS))
    plot.main([str(file)])
    assert {"qwen3-8b Q4_K_M", "qwen3.6-35b-a3b-Q4_K_M"} <= texts(capsys.readouterr().out)


@pytest.mark.usefixtures("_matplotlib")
def test_an_image_without_a_file_is_that_of_the_book(capsys: pytest.CaptureFixture[str]) -> None:
    for plot, name in ((plot_speedup, "speedup"), (plot_comparison, "comparison"), (plot_users, "users")):
        plot.main([])
        committed = (REPOSITORY / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
        assert texts(capsys.readouterr().out) == texts(committed)


def test_every_measurement_is_a_point() -> None:
    assert sum(len(places) for places in plot_roofline.facts(TESTS)["points"].values()) == 5
    found = plot_depth.facts(TESTS)
    assert found["n_gen"] == [["qwen3.6-35b-a3b-Q4_K_M", [[0, 700.0], [8192, 650.0]]]]
    assert sum(len(places) for _, places in found["n_prompt"]) == 6


def test_the_users_of_the_book_and_of_a_file(tmp_path: Path) -> None:
    found = plot_users.facts()
    assert [name for name, _ in found["answers"]] == [name for name, _ in found["prompts"]]
    assert found["answers"][1] == ["Qwen3-8B, llama.cpp", [[1, 257], [16, 1940], [32, 3152], [64, 4372], [128, 5027]]]
    assert [n for n, _ in found["prompts"][0][1]] == [1, 16, 32, 64, 96, 128]
    rates = {"answer_per_second": 9.0, "prompt_per_second": 20.0}
    file = tmp_path / "users.json"
    file.write_text(json.dumps([{"model": "a", "n_users": n, **rates} for n in (4, 1)]))
    assert plot_users.facts([str(file)]) == {
        "answers": [["a", [[1, 9], [4, 9]]]],
        "prompts": [["a", [[1, 20], [4, 20]]]],
    }


def test_the_speedup_of_one_draft() -> None:
    """A draft that costs nothing and is accepted with probability a: 1 + a tokens for a pass of two rows, 1.07 passes."""
    free = plot_speedup.facts(0.25)[1]
    for a, best, gains in free["lines"]:
        assert gains[:2] == pytest.approx([1, (1 + a) / 1.07], abs=1e-4)
        assert gains[best] == max(gains)


def test_the_points_of_the_book_are_its_tables() -> None:
    tests = plot_roofline.book()
    rates = {(test["model"], test["n_prompt"]): test["avg_ts"] for test in tests}
    assert len(rates) == len(tests) == 4 * 4 + 4 + 3
    assert rates["gemma4-12b Q4_K_M", 2048] == 13966 and rates["gemma4-12b Q4_K_M", 1] == 340.53
    assert rates["qwen3-8b Q4_K_M", 8] == pytest.approx(8 / 2082e-6)
    assert plot_depth.facts()["n_prompt"][2] == [
        "Qwen3-8B, q4_0 cache",
        [[0, 15212], [4096, 9366], [8192, 6763], [16384, 4333], [32768, 2522]],
    ]


def test_the_operations_of_a_pass() -> None:
    """The operations and bytes of Qwen3-8B, whose matrices are easily counted, in a format with 34 bytes for 32 weights."""
    e, ff, layer = 4096, 12288, 2 * 4096 * 4096 + 2 * 1024 * 4096
    weights, head = 36 * (layer + 3 * e * ff), 151936 * e
    ((rows, intensity, rate),) = plot_roofline.points([measured("qwen3-8b-Q8_0", 100.0, prompt=64)])["qwen3-8b-Q8_0"]
    assert rows == 64
    assert rate == pytest.approx(2 * (64 * weights + head) * 100 / 64 / 1e12)
    assert intensity == pytest.approx(2 * (64 * weights + head) / (34 / 32 * (weights + head)))


@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen35moe", "tiny-gemma4-e", "tiny-qwen3moe"])
def test_the_bytes_of_a_row_are_those_of_its_matrices(name: str, tmp_path: Path) -> None:
    """The bytes that the file contains: all but vectors, convolutions and rows of tables."""
    path = make_model(tmp_path / "tiny.gguf", name, "Q8_0")
    read = weight_bytes_per_token(path)
    assert plot_roofline.products(f"{name} Q8_0").bytes_read(1) <= read
    file, shape = read_gguf(path), shapes()[name]
    small = sum(t.nbytes for t in file.tensors.values() if len(t.shape) < 2 or "conv1d" in t.name)
    rows = 2 * 34 * max(shape.n_embd, (shape.gemma4.n_per_layer if shape.gemma4 else 0) * shape.n_layer) // 32
    assert plot_roofline.products(f"{name} Q8_0").bytes_read(1) == pytest.approx(read, abs=small + rows)


def test_experts_are_read_once_they_are_chosen() -> None:
    model = plot_roofline.products("qwen3.6-35b-a3b Q4_K_M")
    mix = shapes()["qwen3.6-35b-a3b"].experts
    assert isinstance(mix, ExpertsConfig)
    assert model.experts[0] == 40 * mix.n_expert * 3 * mix.n_ff * 2048
    everything = model.dense[1] + model.experts[1] + model.head[1]
    assert model.bytes_read(1) == pytest.approx(everything - model.experts[1] * (1 - mix.n_used / mix.n_expert))
    assert model.bytes_read(4096) == pytest.approx(everything)


@pytest.mark.usefixtures("_matplotlib")
def test_nothing_measured_is_an_empty_plot() -> None:
    from docs.figures.style import Page

    for plot in (plot_depth, plot_roofline):
        page = Page(plot.SIZE, "both")
        plot.draw(plot.facts([]), page)
        assert plot.TITLE in page.svg(plot.TITLE, [])


def test_a_model_that_is_no_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="not the name of a shape"):
        plot_roofline.shape_of("qwen3-8b")
    file = tmp_path / "bench.json"
    file.write_text(json.dumps([measured("smollm", 1.0, prompt=1)]))
    with pytest.raises(SystemExit):
        plot_roofline.main([str(file)])
    assert "'smollm' is not the name" in capsys.readouterr().err


COMPARED = """
Benchmarks that have stayed the same:

| Change   | Before [0123abcd] <main~1>   | After [4567abcd] <main>   | Ratio   | Benchmark (Parameter)                     |
|----------|------------------------------|---------------------------|---------|-------------------------------------------|
|          | 500μs                        | 0.500ms                   | 1.00    | operations.Matmul.track_matmul('F16', 1)   |
|          | n/a                          | n/a                       | n/a     | cuda.Prompt.time_prompt('qwen3-8b', 0)    |

Benchmarks that have got worse:

| Change   | Before [0123abcd] <main~1>   | After [4567abcd] <main>   | Ratio   | Benchmark (Parameter)                     |
|----------|------------------------------|---------------------------|---------|-------------------------------------------|
| +        | 20.0±0.2ms                   | 22.0±0.2ms                | 1.10    | operations.Matmul.track_matmul('Q4_K', 1)  |
"""


def test_what_asv_compares_is_drawn() -> None:
    (table,) = plot_comparison.tables(COMPARED)
    assert (table.before, table.after) == ("main~1", "main")
    same, worse = table.rows
    assert (same.mark, worse.mark) == ("", "+")
    assert (same.ratio, worse.ratio) == (pytest.approx(1.0), pytest.approx(1.1))
    assert (same.low, same.high) == (same.ratio, same.ratio)
    assert (worse.low, worse.high) == (pytest.approx(21.8 / 20.2), pytest.approx(22.2 / 19.8))
