"""The benchmark's bookkeeping (never its speeds): what is run, what is counted, what is printed, what is refused."""

import csv
import io
import json
import math
import sqlite3
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

import engine
from engine import bench
from engine.bench import Result
from engine.cache.kv import AttentionCacheSpec, KVCache
from engine.cache.recurrent import RecurrentCacheSpec
from engine.cache.types import CACHE_TYPES, F16, F32, Types
from engine.cpu import bandwidth as memory
from engine.cpu.backend import Backend
from engine.gguf.file import read_gguf
from engine.models import traffic as bandwidth
from engine.synthetic import model as synthetic
from tests.pages import layer_of

RESULT = Result(
    model="qwen3-8b Q4_K_M",
    model_size=5_021_900_000,
    model_n_params=8_190_735_360,
    backend="cpu",
    n_threads=2,
    type_k="f16",
    type_v="q8_0",
    n_prompt=0,
    n_gen=128,
    n_depth=4096,
    test_time="2026-01-01T00:00:00+00:00",
    samples_ns=(12_000_000_000, 16_000_000_000),
    bytes_per_token=2_000_000_000.0,
    memory_bandwidth=20e9,
)


@settings(deadline=None)  # the first example compiles the kernel
@given(st.lists(st.integers(0, 2**64 - 1), max_size=100), st.integers(1, 5))
def test_the_read_kernel_reads_everything_once(values: list[int], shares: int) -> None:
    data = np.array(values, np.uint64)
    parts = np.zeros(shares, np.uint64)
    middle = shares // 2
    memory.read_sums(data, parts, 0, middle)
    memory.read_sums(data, parts, middle, shares)
    assert int(parts.sum()) == sum(values) % 2**64


def test_bandwidth_is_a_rate() -> None:
    assert 0 < memory.memory_bandwidth(1, 1 << 20, passes=1) < math.inf


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_weights_read_per_token(name: str, tmp_path: Path) -> None:
    """All weights, but one row of an embedding that is not also the output matrix; sizes by gguf's own reader."""
    path = synthetic.make_model(tmp_path / "m.gguf", name, "Q4_K_M")
    tensors = {t.name: t for t in GGUFReader(path).tensors}
    expected = sum(int(t.n_bytes) for t in tensors.values())
    if "output.weight" in tensors:
        embedding = tensors["token_embd.weight"]
        expected -= int(embedding.n_bytes) * (int(embedding.shape[1]) - 1) // int(embedding.shape[1])
    assert bandwidth.weight_bytes_per_token(path) == expected
    assert bandwidth.weight_bytes_per_token(read_gguf(path)) == expected


@settings(deadline=None)
@given(
    first=st.integers(0, 300),
    count=st.integers(1, 40),
    types=st.sampled_from([F16, F32, Types(CACHE_TYPES["q8_0"], CACHE_TYPES["q4_0"])]),
    window=st.sampled_from([0, 1, 32, 100]),
    framed=st.booleans(),
)
def test_cache_read_per_token(first: int, count: int, types: Types, window: int, framed: bool) -> None:
    sliding = AttentionCacheSpec(1, 64, 64, window, framed=framed and window in (1, 32))
    cache = KVCache([AttentionCacheSpec(2, 32, 96), sliding], 512, 64, types, np.zeros)
    k, v = (kind.bits / 8 + (2 / 32 if kind.quantized else 0) for kind in (types.k, types.v))
    total = 0.0
    for position in range(first, first + count):
        low = position // window * window if sliding.framed else position - window + 1
        visible = [j for j in range(position + 1) if window == 0 or j >= low]
        total += (position + 1) * 2 * (32 * k + 96 * v) + len(visible) * (64 * k + 64 * v)
    assert bandwidth.cache_bytes_per_token(cache.layers, first, count) == pytest.approx(total / count)


@given(first=st.integers(0, 300), count=st.integers(1, 40))
def test_recurrent_memory_per_token(first: int, count: int) -> None:
    shape = RecurrentCacheSpec(n_channels=10, n_conv=4, n_k=2, n_v=4, d=32, rewind=5)
    layer = layer_of(shape, 0, 64, F16, np.zeros)
    state, token = 4 * 4 * 32 * 32, 4 * (2 * 32 + 4 * 32 + 4)
    total = 0
    for position in range(first, first + count):
        total += state + position % 16 * token + token + (state if position % 16 == 15 else 0)
    assert bandwidth.cache_bytes_per_token([layer], first, count) == pytest.approx(total / count)


def test_statistics() -> None:
    rates = [128 / 12, 128 / 16]
    assert RESULT.samples_ts == pytest.approx(rates)
    assert RESULT.avg_ts == pytest.approx(statistics.mean(rates))
    assert RESULT.stddev_ts == pytest.approx(np.std(rates, ddof=1))
    assert RESULT.bytes_per_second == pytest.approx(2e9 * statistics.mean(rates))
    assert RESULT.name == "tg128 @ d4096"


def test_markdown() -> None:
    prompt = replace(RESULT, n_prompt=512, n_gen=0, n_depth=0, bytes_per_token=0.0)
    lines = list(bench.markdown([prompt, RESULT]))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    assert len({len(row) for row in rows}) == 1
    assert len({len(line) for line in lines[:4]}) == 1
    assert rows[0] == ["model", "size", "params", "backend", "threads", "test", "t/s", "GB/s", "of memory"]
    assert all(set(cell) <= {"-", ":"} for cell in rows[1])
    assert rows[2][1:3] == ["4.68 GiB", "8.19 B"]
    assert rows[2][5:] == ["pp512", f"{prompt.avg_ts:.2f} ± {prompt.stddev_ts:.2f}", "", ""]
    assert rows[3][5:] == ["tg128 @ d4096", f"{RESULT.avg_ts:.2f} ± {RESULT.stddev_ts:.2f}", "18.67", "93%"]
    assert f"20.0 GB/s ({bench.cpu_name()}, threads: 2)" in lines[-1]


GPU = replace(RESULT, backend="cuda", gpu_info="Abacus X1", n_threads=0, memory_bandwidth=40e9)


def test_markdown_of_a_gpu() -> None:
    lines = list(bench.markdown([GPU, RESULT]))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    assert rows[2][3:6] == ["cuda", "", "tg128 @ d4096"]
    assert rows[2][7:] == ["18.67", "47%"]
    assert rows[3][3:5] == ["cpu", "2"]
    assert "40.0 GB/s (Abacus X1); 20.0 GB/s (" in lines[-1]
    assert GPU.fields()["gpu_info"] == "Abacus X1"
    assert RESULT.fields()["gpu_info"] == ""


def test_csv_and_json_hold_the_same() -> None:
    text = "\n".join(bench.comma_separated([RESULT, RESULT]))
    rows = list(csv.DictReader(io.StringIO(text)))
    objects = json.loads("\n".join(bench.as_json([RESULT, RESULT])))
    assert len(rows) == len(objects) == 2
    for row, entry in zip(rows, objects, strict=True):
        assert entry.pop("samples_ns") == list(RESULT.samples_ns)
        assert entry.pop("samples_ts") == pytest.approx(RESULT.samples_ts)
        assert row == {key: str(value) for key, value in entry.items()}
    for lines in (bench.markdown, bench.comma_separated, bench.json_lines, bench.as_sql):
        assert list(lines([])) == []
    assert json.loads("".join(bench.as_json([]))) == []


QUOTED = replace(RESULT, model='it\'s a \\ model\nof "two" lines; DROP TABLE x', n_depth=0, samples_ns=(7000,))


def test_json_lines_hold_what_json_holds() -> None:
    lines = list(bench.json_lines([RESULT, QUOTED]))
    assert all("\n" not in line for line in lines)
    assert [json.loads(line) for line in lines] == json.loads("".join(bench.as_json([RESULT, QUOTED])))


def test_sql_fills_a_table() -> None:
    """Read by SQLite: the values and the types of the fields; a second file adds to the same table."""
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    for _ in range(2):
        database.executescript("\n".join(bench.as_sql([RESULT, QUOTED])))
    rows = [dict(row) for row in database.execute(f"SELECT * FROM {bench.SQL_TABLE}")]
    assert rows == 2 * [RESULT.fields(), QUOTED.fields()]
    for row in rows:
        assert {name: type(value) for name, value in row.items()} == {k: type(v) for k, v in RESULT.fields().items()}
    query = f"SELECT test FROM {bench.SQL_TABLE} WHERE avg_ts > 1e6 AND type_v = 'q8_0'"
    assert [row["test"] for row in database.execute(query)] == ["tg128", "tg128"]


@pytest.mark.parametrize("form", ["csv", "jsonl", "md", "sql"])
def test_a_result_is_printed_when_it_is_done(form: str) -> None:
    def results() -> Iterator[Result]:
        yield RESULT
        pytest.fail("the next test began before the result of this one was printed")

    assert "qwen3-8b Q4_K_M" in next(line for line in bench._OUTPUTS[form](results()) if "qwen3" in line)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-r", "0"], "-r must be 1 or more, not 0"),
        (["-p", "many"], "whole numbers"),
        (["-d", "-1"], "-d must be 0 or more, not -1"),
        (["-o", "xml"], "must be csv, json, jsonl, md or sql, not 'xml'"),
        (["--shape", "qwen9"], "qwen3-8b"),
        (["--shape", "qwen3-8b:Q9"], "Q4_K_M"),
        (["-m", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["--turbo"], "--turbo"),
        (["-t", "100000", "--device", "cpu"], "threads"),
        (["--device", "abacus"], "abacus"),
        (["--device", "cuda:9999"], "cpu"),
        (["-ngl", "0", "--device", "cuda"], "-ngl 0"),
        (["-ot", "ffn_up"], "must be REGEX=DEVICE"),
        (["-ctk", "q5_1"], "-ctk must be f32, f16, q8_0, q4_0, i12 or i8, not 'q5_1'"),
        (["-m", ""], "-m is empty"),
        (["-d", "100000000"], "context"),
    ],
)
def test_a_mistake_is_one_sentence(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line for line in err.splitlines() if not line.startswith("compiling ")] == err.splitlines()[-1:]
    assert says in err


def test_a_gpu_knows_no_threads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One round of tests whatever -t says, and rows that name the GPU; the GPU is the CPU under another name."""
    loaded = []
    load = engine.load

    def load_renamed(path: Path, device: str, n_threads: int, **options: Any) -> Any:
        assert device == "auto"
        llm = load(path, device="cpu", n_threads=1, **options)
        llm.n_threads = 0
        changes = {"name": "cuda", "gpu_name": "Abacus X1", "bandwidth": lambda ops: 9e9}
        llm.model.ops.__class__ = type("Renamed", (type(llm.model.ops),), changes)
        loaded.append(llm.path)
        return llm

    monkeypatch.setitem(vars(engine), "load", load_renamed)
    results = run_json(["-t", "1,2,4", "-p", "8", "-n", "2", "-r", "1"], capsys)
    assert len(loaded) == 1
    assert [r["test"] for r in results] == ["pp8", "tg2"]
    for r in results:
        assert (r["backend"], r["gpu_info"], r["n_threads"], r["memory_bandwidth"]) == ("cuda", "Abacus X1", 0, 9e9)


def run_json(argv: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert bench.main([*argv, "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_random_model_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BITMIRROR_CACHE", str(tmp_path))
    monkeypatch.setattr(Backend, "bandwidth", lambda ops: 1e9)
    argv = ["--shape", "tiny-gemma3:Q8_0", "-p", "24", "-n", "3", "-d", "0,40", "-r", "2", "-t", "1,2", "-dev", "cpu"]
    results = run_json([*argv, "-ctk", "f32"], capsys)
    assert [(r["n_threads"], r["test"]) for r in results] == [
        (threads, test) for threads in (1, 2) for test in ("pp24", "pp24 @ d40", "tg3", "tg3 @ d40")
    ]
    for r in results:
        assert len(r["samples_ns"]) == 2
        assert min(r["samples_ns"]) > 0
        assert r["model"] == "tiny-gemma3 Q8_0"
        assert (r["backend"], r["gpu_info"]) == ("cpu", "")
        assert (r["type_k"], r["type_v"]) == ("f32", "f16")
        assert r["memory_bandwidth"] == 1e9
        assert r["model_n_params"] == synthetic.shapes()["tiny-gemma3"].n_params
    assert list((tmp_path / "synthetic").iterdir()) == []  # removed
    argv = ["--shape", "tiny-llama", "--keep", "-p", "4", "-n", "0", "-r", "1"]
    run_json(argv, capsys)
    kept = tmp_path / "synthetic" / "tiny-llama-Q4_K_M.gguf"
    written = kept.stat().st_mtime_ns
    run_json(argv, capsys)
    assert kept.stat().st_mtime_ns == written  # used again


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-gemma3"])
def test_what_a_test_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The depth is read once and then kept, even if a sliding window limits how far a cache can be truncated."""
    llm = engine.load(synthetic.make_model(tmp_path / "m.gguf", name, "Q4_0"), device="cpu", n_ctx=300)
    calls: list[tuple[int, int, int]] = []
    split = llm.model.split

    def recorded(tokens: np.ndarray, positions: np.ndarray, n_logits: int, *given: Any, **options: Any) -> Any:
        assert tokens.dtype == positions.dtype == np.int32
        assert positions.tolist() == list(range(positions[0], positions[0] + tokens.size))
        assert tokens.max() < llm.config.n_vocab
        calls.append((int(positions[0]), tokens.size, n_logits))
        return split(tokens, positions, n_logits, *given, **options)

    monkeypatch.setattr(llm.model, "split", recorded)
    assert len(bench.measure(llm, 0, 3, 100, repetitions=2)) == 2
    read = [call for call in calls if call[0] < 100]
    assert sum(n for _, n, _ in read) == 100
    generated = [call for call in calls if call[0] >= 100]
    assert generated == [(100, 1, 1)] + 2 * [(100, 1, 1), (101, 1, 1), (102, 1, 1)]  # warm-up, then two runs

    calls.clear()
    bench.measure(llm, 150, 0, 100, repetitions=1, warmup=False)
    read = [call for call in calls if call[0] >= 100]
    assert sum(n for _, n, _ in read) == 150
    assert [logits for _, _, logits in read] == [0] * (len(read) - 1) + [1]
    assert max(n for _, n, _ in read) <= llm.cache.max_rows
