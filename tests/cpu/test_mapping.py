"""Memory that goes back to the system while nothing is in it, and the bits afterwards."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import engine
from engine.cpu import mapping
from engine.cpu.mapping import HUGE, give_back, mapped, merged, resume
from engine.cpu.runtime.pool import Pool
from engine.ops.device import DeviceMemory

PAGEMAP = Path("/proc/self/pagemap")

PRESENT = np.uint64(1 << 63)
"""The bit of a page that is in physical memory, in the kernel's documentation of ``pagemap``."""

PAGE = mmap.PAGESIZE

HALF = HUGE // 2

pytestmark = pytest.mark.skipif(
    not mapping.LINUX or not PAGEMAP.exists() or PAGE != 4096, reason="needs Linux's pagemap, and pages of 4 kB"
)


def resident(array: np.ndarray) -> np.ndarray:
    """Whether each page of an array that begins at a page is in physical memory: bool [pages]."""
    with PAGEMAP.open("rb", buffering=0) as file:
        file.seek(array.ctypes.data // PAGE * 8)
        return np.frombuffer(file.read(-(-array.nbytes // PAGE) * 8), np.uint64) & PRESENT != 0


def filled(n_bytes: int) -> np.ndarray:
    """Memory whose huge pages begin at its first byte, full of numbers."""
    whole = mapped(n_bytes + HUGE)
    array = whole[-whole.ctypes.data % HUGE :][:n_bytes]
    array[:] = np.arange(n_bytes, dtype=np.uint8) | 1
    assert resident(array).all()
    return array


@pytest.mark.parametrize(
    ("ranges", "given"),
    [
        ([(0, 4 * HUGE)], [(0, 4 * HUGE)]),
        # Only whole pages: their neighbours hold something.
        ([(5, 4 * HUGE - 5)], [(PAGE, 4 * HUGE - PAGE)]),
        # At least half of a huge page is unused, or less.
        ([(HALF, 3 * HUGE)], [(HALF, 3 * HUGE)]),
        ([(HALF + PAGE, 3 * HUGE)], [(HUGE, 3 * HUGE)]),
        ([(HUGE, 3 * HUGE + HALF)], [(HUGE, 3 * HUGE + HALF)]),
        ([(HUGE, 3 * HUGE + HALF - PAGE)], [(HUGE, 3 * HUGE)]),
        ([(HUGE + PAGE, HUGE + HALF)], []),
        ([(HUGE - PAGE, HUGE + PAGE)], []),
        ([(HALF, HALF)], []),
        # Half of the first huge page, in two parts, and nearly half of the second.
        ([(PAGE, 32 * PAGE), (64 * PAGE, HALF + 33 * PAGE)], [(PAGE, 32 * PAGE), (64 * PAGE, HALF + 33 * PAGE)]),
        ([(HUGE + PAGE, HUGE + 32 * PAGE), (HUGE + 64 * PAGE, HUGE + HALF + 32 * PAGE)], []),
        ([(0, HALF + PAGE), (HUGE + PAGE, HUGE + 2 * PAGE)], [(0, HALF + PAGE)]),
    ],
)
def test_ranges_go_back(ranges: list[tuple[int, int]], given: list[tuple[int, int]]) -> None:
    """Unless that would divide a huge page of which more than half is in use.  Everything else keeps its bits, and what went
    back is zero."""
    array = filled(4 * HUGE)
    expected, there = array.copy(), np.ones(4 * HUGE // PAGE, bool)
    give_back(array, ranges)
    for first, end in given:
        expected[first:end], there[first // PAGE : end // PAGE] = 0, False
    np.testing.assert_array_equal(resident(array), there)
    assert np.array_equal(array, expected)
    array[:] = 7
    resume(array)
    assert (array == 7).all()


def test_parts_of_a_mapping() -> None:
    """Ranges count from the first byte of the array that is given, not from that of the mapping."""
    array = filled(4 * HUGE)
    give_back(array[HUGE:].reshape(3, 2, -1)[1:], [(0, HUGE)])
    there = resident(array).reshape(4, -1)
    assert there[[0, 1, 3]].all() and not there[2].any()


def test_memory_of_another_kind_stays() -> None:
    array = np.ones(4 * HUGE, np.uint8)
    give_back(array, [(0, array.size)])
    resume(array)
    assert (array == 1).all()


def test_memory_that_nobody_has() -> None:
    with pytest.raises(MemoryError):
        mapped(1 << 60)


def test_ranges_that_touch_are_joined() -> None:
    assert merged([(0, 2), (2, 3), (4, 6), (6, 9)]) == [(0, 3), (4, 9)] and merged([]) == []


# --- a model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[engine.LLM]:
    # Two heads of a layer have a huge page each.
    with engine.load(device="cpu", n_ctx=1024, parallel=8, cache_type="f16") as model:
        yield model


def taken(llm: engine.LLM) -> int:
    """Bytes of the cache in physical memory."""
    return sum(int(resident(paged.array).sum()) for paged in llm.cache.paged) * PAGE


def fill(llm: engine.LLM) -> None:
    """Write NaN to all pages of the cache, none of which is in use."""
    llm.reset()
    for paged in llm.cache.paged:
        paged.array[...] = 0x7E00
    assert taken(llm) == llm.memory.cache == llm.memory.pages_free


def test_free_pages_go_back_and_no_bit_changes(llm: engine.LLM) -> None:
    fill(llm)
    text = llm.tokenize("def add(a, b):\n    return a + b\n" * 8)
    longer = [*text, *llm.tokenize("# the end\n" * 20)]
    expected, _ = llm.prefill(longer)
    fill(llm)
    llm.read(text)
    llm.rest()
    assert taken(llm) == llm.memory.pages_held == -(-len(text) // 64) * sum(llm.cache.page_bytes.values()) > 0
    llm.resume()
    logits, kept = llm.prefill(longer)
    assert kept == len(text) and logits.tobytes() == expected.tobytes()


def test_texts_that_no_slot_holds_are_forgotten(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(llm)
    first, second = (llm.tokenize(word * 160)[:384] for word in ("import os\n", "x = 1\n"))
    expected = [llm.prefill(ids)[0].tobytes() for ids in (first, second)]
    slot = next(slot for slot in llm.slots if slot.sequence.tokens == first)
    slot.clear()
    llm.rest()
    kept = llm.memory.pages_kept
    assert 0 < kept < taken(llm) == kept + llm.memory.pages_held
    with monkeypatch.context() as patch:
        # What a GPU keeps takes no memory of the system.
        patch.setattr(llm.model.ops, "device_memory", lambda: DeviceMemory(1, 1, 1))
        llm.rest(forget=True)
        assert llm.memory.pages_kept == kept
    llm.rest(forget=True)
    llm.check_pages()
    assert llm.memory.pages_kept == 0 and taken(llm) == llm.memory.pages_held > 0
    llm.resume()
    for ids, bits, held in zip((second, first), reversed(expected), (True, False), strict=True):
        logits, kept = llm.prefill(ids)
        assert (kept > 0) is held and logits.tobytes() == bits


def test_a_model_that_is_closed_rests() -> None:
    with engine.load(device="cpu", n_ctx=64) as model:
        pass
    model.rest(forget=True)
    model.resume()


def test_intermediate_results_go_back() -> None:
    """The memory of arrays that nothing refers to, and no other; what is lent again is the same memory."""
    pool = Pool()
    arrays = [pool.empty((n,), np.uint8) for n in (3 * HUGE + 5, 100, HUGE)]
    assert pool.n_bytes >= sum(array.size for array in arrays)
    for array in arrays:
        array[:] = 9
    unused, small, held = arrays
    address, n_bytes = unused.ctypes.data, pool.n_bytes
    assert resident(unused).all()
    del arrays, array, small, unused
    pool.rest()
    assert (held == 9).all()
    pool.begin_stage()
    again = pool.empty((3 * HUGE + 5,), np.uint8)
    assert again.ctypes.data == address and pool.n_bytes == n_bytes
    assert not resident(again).any()
    pool.resume()
    assert not again.any() and (held == 9).all()


def test_an_array_ends_with_its_mapping() -> None:
    """The first and the last huge page may have less than half of their size in it, and go back, too."""
    whole = mapped(3 * HUGE + 5 * PAGE)
    whole[:] = 1
    give_back(whole, [(0, whole.size)])
    assert not resident(whole).any() and not whole.any()
