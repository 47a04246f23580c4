"""Networks of DFlash and DSpark in the simulator: the drafts of the CPU, and as many kept as a script has right."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.cuda import accept, backend
from engine.limits import DECODE_ROWS
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from engine.synthetic.shape import Shape
from tests.cuda.simulated.device import use_simulated
from tests.cuda.simulated.test_operations import gpu
from tests.dflash import Network, agreeing
from tests.families import in_bytes

assert gpu

N_CTX = 64


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("entries", [[(0, 5, 4)], [(2, 9, 3), (0, 30, 1), (1, 61, 4)]])
def test_rows_of_a_block(gpu: backend.Backend, entries: list[tuple[int, int, int]], causal: int, shift: int) -> None:
    """entries: slot, position of the last sampled token, and rows of each.  The last block reaches the end of the context."""
    used = sum(rows for _, _, rows in entries)
    rows, mask = 1 << (used - 1).bit_length() if len(entries) > 1 else used, 77
    history = np.arange(3 * N_CTX, dtype=np.int32).reshape(3, N_CTX) + 100
    starts = np.full(DECODE_ROWS + 1, used, np.int32)
    starts[: len(entries)] = np.cumsum([0, *(n for _, _, n in entries[:-1])])
    given_positions, given_slots = (np.zeros(DECODE_ROWS, np.int32) for _ in range(2))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    for (slot, position, n), start in zip(entries, starts, strict=False):
        given_positions[start : start + n] = np.minimum(np.arange(position, position + n), N_CTX - 1)
        given_slots[start : start + n] = slot
        tokens += [int(history[slot, position]), *[mask] * (n - 1)]
        positions += given_positions[start : start + n].tolist()
        slots += [slot] * n
        seen = min(max(position + n - 2 + shift, position), N_CTX - 1)
        last += positions[-n:] if causal else [seen] * n
    further = rows - used
    arrays = [gpu.upload(each) for each in (starts, given_positions, given_slots, history)]
    results = [gpu.zeros((DECODE_ROWS,), np.int32) for _ in range(4)] + [
        gpu.zeros((DECODE_ROWS, DECODE_ROWS), np.int32)
    ]
    addresses = [each.address for each in arrays]
    arguments = [*addresses[:3], N_CTX, addresses[3], rows, mask, shift, causal, *(each.address for each in results)]
    gpu.device.load(accept.begin_block())
    gpu.device.launch(accept.begin_block(), 1, 32, arguments)
    found = [gpu.download(each) for each in results]
    for array, expected in zip(found, (tokens, positions, slots, last), strict=False):
        assert array[:rows].tolist() == [*expected, *[expected[-1]] * further]
    for entry, start in enumerate(starts[: len(entries)]):
        rows_of_drafts = np.minimum(start + np.arange(DECODE_ROWS) + shift, DECODE_ROWS - 1)
        assert (found[4][:, entry] == 1 + rows_of_drafts).all()


NETWORKS: dict[str, dict[str, Any]] = {
    "dflash": {"windows": (6,)},
    "dspark": {"rank": 32, "judged": True, "n_draft": 100, "lends_output": False, "own_embedding": True},
    "causal": {"rank": 32, "from_anchor": False, "causal": True, "keys_are_values": True},
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "cache"), [("dflash", "f16"), ("dspark", "i8"), ("causal", "q8_0")])
def test_drafts(name: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of drafts are those of the CPU; drafts on the GPU do not change the text, and as many are kept as a script has
    right."""
    use_simulated(monkeypatch)
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)
    shape = Shape("llama", 1, 64, 2, 1, 32, 32, 289, 96, 1e4, 1e-5)
    net = Network(289, 64, 2, 1, 32, 32, (0, 1), n_layer=1, **NETWORKS[name])
    path = make_model(tmp_path / "llama.gguf", shape, "Q8_0")
    given: dict[str, Any] = {"n_ctx": N_CTX, "n_threads": 1, "cache_type": cache}
    (given["draft_model"],) = in_bytes([net.write(tmp_path / "net.gguf")], tmp_path)
    cpu_llm, gpu_llm = (engine.load(path, device=device, **given) for device in ("cpu", "cuda"))
    prompt = [3, 7, 11, 2, 9]
    drafted: list[Any] = []
    for llm in (cpu_llm, gpu_llm):
        llm.read(prompt)
        drafter: Any = llm.model.drafter
        drafted.append([drafter.forward(9 + i, 5 + i, llm.model.sequence, i, 2).tobytes() for i in range(2)])
        if net.judged:
            drafted[-1].append(drafter.confidence(9, 5, llm.model.sequence, 0))
    assert drafted[0] == drafted[1]
    more: dict[str, Any] = {"max_tokens": 5, "temperature": 0.8, "top_k": 20, "seed": 1, "ignore_eos": True}
    expected = cpu_llm.complete(prompt, speculation=SpeculationParams(enabled=False), **more).ids
    draft: Any = gpu_llm.draft
    draft.script = np.full(N_CTX, -1, np.int32)
    draft.script[5:8] = expected[:3]
    draft.script[8] = (expected[3] + 1) % cpu_llm.config.n_vocab
    found = gpu_llm.complete(prompt, speculation=SpeculationParams(draft_max=3, draft_min=3), **more)
    assert found.ids == expected and found.speculation is not None
    assert found.speculation.accepted == 2


@pytest.mark.thorough
def test_answers_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers with different numbers of drafts in a step: texts and kept drafts are those of the CPU."""
    use_simulated(monkeypatch)
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)
    shape = Shape("llama", 2, 64, 2, 1, 32, 96, 289, 96, 1e4, 1e-5)
    paths = in_bytes(agreeing(make_model(tmp_path / "llama.gguf", shape, "F32"), tmp_path), tmp_path)
    given: dict[str, Any] = {"n_ctx": N_CTX, "n_threads": 1, "draft_model": paths[1], "parallel": 2}
    found: list[Any] = []
    for device in ("cpu", "cuda"):
        llm = engine.load(paths[0], device=device, **given)
        more: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
        answers = llm.complete([[3, 7, 11], [2, 9]], speculation=SpeculationParams(draft_max=2, draft_min=2), **more)
        drafts = [answer.speculation for answer in answers]
        found.append([(a.ids, s.drafted_at, s.accepted_at) for a, s in zip(answers, drafts, strict=True) if s])
        assert len(found[-1]) == 2 and sum(sum(accepted.values()) for _, _, accepted in found[-1]) > 0
    assert found[0] == found[1]
