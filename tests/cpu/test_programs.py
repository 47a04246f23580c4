"""Recorded passes: operations that threads may compute at the same time do not depend on each other, and memory is used again
only where nothing reads it any more."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import engine
from engine.arrays import Batch
from engine.cache.kv import AttentionCacheSpec
from engine.cache.types import F32
from engine.cpu.add import add
from engine.cpu.backend import Backend
from engine.cpu.runtime.entry import words
from engine.cpu.runtime.pool import ALIGNMENT, Pool
from engine.cpu.runtime.program import LEAST_NS, MANY, TILE_NS, Operation, Program
from engine.cpu.runtime.walk import GRAIN, N_TILES
from engine.decode.evaluate import evaluate
from engine.ops.heads import Heads
from engine.synthetic.model import make_model
from tests.batches import one_sequence
from tests.pages import layer_of

MODELS = {"tiny-qwen35moe": ("Q4_K_M", "f16"), "tiny-gemma4-moe": ("Q4_0", "q8_0")}
"""Delta nets, experts, windows, per-layer sizes; their formats and cache types."""


@pytest.fixture(scope="module", params=MODELS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> engine.LLM:
    quant, cache_type = MODELS[request.param]
    path = make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", request.param, quant, seed=3)
    return engine.load(path, device="cpu", n_threads=2, n_ctx=64, cache_type=cache_type)


def stages(program: Program) -> list[list[Operation]]:
    """The operations of each stage."""
    found: list[list[Operation]] = []
    for operation in program.operations:
        if operation.joined:
            found[-1].append(operation)
        else:
            found.append([operation])
    return found


def reverse_stages(program: Program) -> None:
    """Change the order of the operations of each stage: from the last to the first."""
    program.operations = [
        operation._replace(joined=i > 0) for stage in stages(program) for i, operation in enumerate(reversed(stage))
    ]
    program.finish()


def poison(ops: Any) -> None:
    """Fill the memory of intermediate results with NaN, and -1 where they are integers."""
    ops._pool.begin_stage()
    for slabs in ops._pool._unused.values():
        for slab in slabs:
            slab[:] = 0xFF


@pytest.mark.parametrize("rows", [1, 6])
def test_a_program_is_its_operations_in_any_order_of_a_stage(llm: engine.LLM, rows: int) -> None:
    """Its result is that of the same operations computed when they are called, and does not change when those of each stage
    are computed from the last to the first."""
    ops: Any = llm.model.ops
    tokens, positions = np.arange(5, 5 + rows, dtype=np.int32), np.arange(rows, dtype=np.int32)

    def logits() -> bytes:
        llm.reset()
        poison(ops)
        return evaluate(llm.model, tokens, positions, rows, llm.model.sequence).tobytes()

    llm.reset()
    llm.model.prepare(0, rows, llm.model.sequence)
    expected = np.asarray(llm.model.compute(Batch(tokens, positions, np.zeros(rows, np.int32)), rows))
    assert np.isfinite(expected).all()
    assert logits() == expected.tobytes()
    plan = ops._plans.kept[llm.model.compute, rows, rows, False, False]
    found = stages(plan.program)
    assert len(found) < len(plan.program)
    reverse_stages(plan.program)
    ops.n_threads = 1
    assert logits() == expected.tobytes()
    ops.n_threads = 3
    assert logits() == expected.tobytes()


@pytest.mark.parametrize("biased", [False, True])
def test_queries_keys_and_values_of_one_size(biased: bool) -> None:
    """Steps of all three are stages, in which the result of one must not replace what another one reads."""
    rng, rows, heads, d = np.random.default_rng(0), 3, 2, 32

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    biases = (normal(heads * d), normal(heads * d), normal(heads * d)) if biased else None
    given = Heads(heads, heads, d, d, True, d**-0.5, 1e-6, normal(d), normal(d), biases, v_normed=True)
    q, k, v, table = normal(rows, heads * d), normal(rows, heads * d), normal(rows, heads * d), normal(8, 2, d // 2)
    positions = np.arange(rows, dtype=np.int32)
    batch, results = one_sequence(positions), []
    for how in ("called", "recorded", "reversed"):
        ops = Backend(1)
        layer = layer_of(AttentionCacheSpec(heads, d, d), 64, rows, F32, np.zeros)
        if how == "called":
            results.append(ops.attention(given, q, k, v, layer, batch, table).tobytes())
            continue
        program = ops.record(partial(ops.attention, given, q, k, v, layer, batch, table))
        program.finish()
        if how == "reversed":
            reverse_stages(program)
        ops.run_program(program)
        results.append(np.asarray(program.result).tobytes())
    assert results[0] == results[1] == results[2]


# --- memory ------------------------------------------------------------------------------------------------------


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    pool = Pool()
    first = pool.empty((3, 5), np.float32)
    place, part = first.ctypes.data, first[1:].reshape(-1)
    assert place % ALIGNMENT == 0
    del first
    # A view is left.
    pool.begin_stage()
    second = pool.empty((3, 5), np.float32)
    assert second.ctypes.data != place
    del part
    # An operation of this stage may still read it.
    other = pool.empty((3, 5), np.float32)
    assert other.ctypes.data not in (place, second.ctypes.data)
    pool.begin_stage()
    third = pool.empty((15,), np.int32)
    assert third.ctypes.data == place
    assert third.shape == (15,) and third.dtype == np.int32
    assert pool.empty((0, 4), np.float32).shape == (0, 4)


@pytest.mark.parametrize("bits", range(4, 23))
def test_a_pool_has_little_more_memory_than_its_arrays(bits: int) -> None:
    """Above 64 KiB at most a quarter more, below at most twice as much."""
    for n in ((1 << bits) + 1, 3 << (bits - 1), 2 << bits):
        pool = Pool()
        array = pool.empty((n,), np.uint8)
        assert array.nbytes == n <= pool.n_bytes
        assert pool.n_bytes <= (n + n // 4 if n > 1 << 16 else max(ALIGNMENT, 2 * n))


def test_the_record_of_arguments() -> None:
    """Arrays by address and shape, numbers by their bits."""
    x = np.zeros((2, 7), np.int8)
    found = words((x, 5, True, np.float32(1.5), 0.5, np.int64(-1)))
    assert found == [x.ctypes.data, 2, 7, 5, 1, 0x3FC00000, 0x3F000000, -1]


@pytest.mark.parametrize("n_threads", [2, MANY - 1, MANY, 16, 100])
@pytest.mark.parametrize("multiple", [1, 64])
def test_tiles_cover_all_items_and_are_shared(n_threads: int, multiple: int) -> None:
    for items, ns in ((1, 5.0), (100, 1.0), (768, 256.0), (2048, 96.0), (6144, 0.5), (24576, 512.0), (7, 1e6)):
        program = Program(n_threads)
        program.add(add, (np.zeros(1, np.float32),) * 3, items, ns, multiple=multiple)
        program.finish()
        grain, tiles = (int(program.table[0, word]) for word in (GRAIN, N_TILES))
        assert grain % multiple == 0 and (tiles - 1) * grain < items <= tiles * grain
        assert grain <= max(multiple, TILE_NS / ns + multiple)
        if n_threads >= MANY and multiple == 1 and tiles > 1 and grain * ns > 1.5 * LEAST_NS:
            # The last round is about as full as the others.
            rounds = -(-tiles // n_threads)
            assert rounds * n_threads * grain < items + n_threads * rounds
