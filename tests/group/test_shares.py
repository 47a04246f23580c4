"""What each of several devices owns: everything has one owner, and heads stay together."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.gguf.quants import FORMATS
from engine.limits import MOST_OWNERS
from engine.models.registry import read_config
from engine.models.sharing import owned, why_not_shared
from engine.ops.weight import Weight
from engine.shares import STEP, Cut, HeadRows, even_cut
from tests.models.test_published import HEADERS, file_of

OWNERS = st.integers(2, MOST_OWNERS)


def elements(cut: Cut) -> list[list[int]]:
    return [[i for first, last in runs for i in range(first, last)] for runs in cut.runs]


def check(cut: Cut, size: int) -> None:
    """Every element has one owner, and every owner has one; pieces are the elements in their order."""
    owners = elements(cut)
    assert sorted(sum(owners, [])) == list(range(size)) and all(owners)
    assert cut.size == size and cut.counts == tuple(map(len, owners))
    found = [owners[p.owner][p.at + i] for p in cut.pieces for i in range(p.size)]
    assert found == list(range(size))


@given(size=st.integers(1, 5000), n=OWNERS)
def test_rows_without_heads_are_divided_evenly(size: int, n: int) -> None:
    cut = even_cut(size, n)
    if cut is None:
        assert size <= STEP * (n - 1)
        return
    check(cut, size)
    assert max(cut.counts) - min(cut.counts) <= 2 * STEP
    assert all(first % STEP == 0 for ((first, _),) in cut.runs)
    assert cut.period == size


@given(n_groups=st.integers(2, 40), widths=st.lists(st.integers(1, 9), min_size=1, max_size=6), n=OWNERS)
def test_an_owner_has_the_same_heads_in_all_segments(n_groups: int, widths: list[int], n: int) -> None:
    n = min(n, n_groups)
    cut = HeadRows(n_groups, tuple(width * n_groups for width in widths)).cut(n)
    check(cut, n_groups * sum(widths))
    begins = np.cumsum([0, *(width * n_groups for width in widths)])
    for own in elements(cut):
        groups = []
        for begin, end, width in zip(begins, begins[1:], widths, strict=False):
            inside = [(i - begin) // width for i in own if begin <= i < end]
            assert all(inside.count(group) == width for group in inside)
            groups.append(sorted(set(inside)))
        assert all(each == groups[0] for each in groups)
    p = cut.period
    if len(set(widths)) == 1:
        assert p == cut.size // len(cut.runs[0])
    if p is not None:
        found = [[i for i in range(cut.size) if first <= i % p < last] for (first, last), *_ in cut.runs]
        assert found == elements(cut)
    check(cut.times(3), 3 * cut.size)


@given(kind=st.sampled_from(["Q4_K", "Q8_0", "F32", "BF16"]), data=st.data())
def test_a_part_of_a_matrix_has_its_rows(kind: str, data: st.DataObject) -> None:
    entry = next(each for each in FORMATS.values() if each.name == kind)
    n, segments = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4))
    cut = HeadRows(n * 3, (n * 6,) * segments).cut(n)
    rows = np.arange(cut.size * entry.row_bytes(256), dtype=np.uint32).astype(np.uint8).reshape(cut.size, -1)
    weight = Weight("w", entry, 256, rows)
    for runs, own in zip(cut.runs, elements(cut), strict=True):
        part = weight.of(runs)
        assert part.rows == len(own) and np.array_equal(part.part(0, len(own)), rows[own])
        assert entry.quantized or not part.pitch  # rows of floats are read where they are
    stack = Weight("w", entry, 256, rows, stack=segments)
    first, last = even_cut(6 * n, n).runs[1][0] if 6 * n > STEP * n else (2, 5)  # type: ignore[union-attr]
    own = [i * 6 * n + j for i in range(segments) for j in range(first, last)]
    assert np.array_equal(stack.of_each(first, last).part(0, len(own)), rows[own])


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_published_models(n: int) -> None:
    """A model can be shared, and everything has one owner, or one sentence says why it cannot."""
    shared = []
    for name in HEADERS:
        config = read_config(file_of(name))
        if why := why_not_shared(config, n):
            assert not why.endswith(".") and ";" in why and "\n" not in why
            continue
        shared.append(name)
        owners = owned(config, n)
        found = [(config.n_embd, [each.columns for each in owners]), (config.n_vocab, [each.tokens for each in owners])]
        for il, layer in enumerate(config.layers):
            heads = [each.heads[il] for each in owners]
            assert layer.mixer.exists == (None not in heads)
            found.append((layer.mixer.most_owners * layer.mixer.exists, [run for run in heads if run is not None]))
        for size, ranges in found:
            assert [i for first, last in ranges for i in range(first, last)] == list(range(size)), name
    assert {"Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-8B", "Qwen3-30B-A3B"} - set(shared) <= (
        {"Qwen3-30B-A3B"} if n == 8 else set()
    )
    assert ("Qwen3.5-27B" in shared) == (n <= 4) and "DeepSeek-V3" not in shared


def test_why_a_model_cannot_be_shared() -> None:
    def reason(name: str, n: int) -> str:
        return why_not_shared(read_config(file_of(name)), n)

    assert reason("Qwen2.5-1.5B", 3) == "3 devices cannot share the 2 heads of keys of a layer; use at most 2 devices"
    assert reason("DeepSeek-V3", 2).startswith("several devices cannot share the mixers of a deepseek2 model; ")
    assert reason("gemma-4-E2B", 2) == "2 devices cannot share the one head of keys of a layer; use one device"
    # Its layers that slide have 16 heads of keys, and the others 4.
    assert reason("Gemma-4-31B-IT", 8) == "8 devices cannot share the 4 heads of keys of a layer; use at most 4 devices"
    assert not reason("Gemma-4-31B-IT", 4)
    config = read_config(file_of("Gemma-4-31B-IT"))
    narrow = replace(config, n_embd=96)
    assert why_not_shared(narrow, 4) == "4 devices cannot share rows of 96 elements; use at most 3 devices"
    assert not why_not_shared(narrow, 3) and why_not_shared(config, 2, False).startswith("several devices cannot share")
