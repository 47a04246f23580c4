"""A budget of positions on a GPU: what stays, and the answer after it, are those of the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.types import CACHE_TYPES
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from tests.decode.test_kv_budget import IDS, KINDS, LONGER, OPTIONS, values
from tests.models.test_mixed_passes import files

pytestmark = pytest.mark.gpu

PLAIN = SpeculationParams(enabled=False)


def masses(llm: engine.LLM, ids: list[int]) -> list[int]:
    """The masses of the chunks of a prompt; the answer is closed after its first token."""
    llm.reset()
    answer = llm.generate(ids, **OPTIONS, speculation=PLAIN)
    next(answer)
    found = llm.model.masses(llm.slots[0].sequence)[: -(-len(ids) // 64)].tolist()
    answer.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_answers(kind: str, tmp_path: Path) -> None:
    """Alone; with the drafts of the model; three together, one of which is read again in the middle of its answer."""
    given = files(kind, tmp_path) | {"n_ctx": 512, "kv_budget": 256}
    device = {key: value for key, value in OPTIONS.items() if key != "logprobs"}
    with engine.load(**given) as cpu, engine.load(**given | {"device": "cuda", "parallel": 3}) as gpu:
        assert masses(cpu, IDS) == masses(gpu, IDS)
        prompts = [IDS, LONGER, IDS[:200]]
        expected = []
        for ids in prompts:
            cpu.reset()
            expected.append(values(cpu.complete(ids, **OPTIONS, speculation=PLAIN)))
            gpu.reset()
            assert values(gpu.complete(ids, **OPTIONS, speculation=PLAIN)) == expected[-1]
            gpu.reset()
            assert gpu.complete(ids, **device).ids == expected[-1][0]
        gpu.reset()
        answers = [gpu.generate(ids, **device) for ids in prompts]
        for turn in range(40):
            if turn == 9:
                gpu.core.interrupt()
            for answer in answers:
                next(answer, None)
        assert [answer.ids for answer in answers] == [ids for ids, _ in expected]
        assert [answer.timings.dropped_n for answer in answers] == [256, 256, 0]
        gpu.check_pages()


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_cache_types(cache_type: str, tmp_path: Path) -> None:
    """Also prompts that are read in wide passes, and an answer over several pages after what was dropped."""
    path = make_model(tmp_path / "m.gguf", "tiny-qwen3", "Q4_K_M", seed=2)
    given: dict[str, Any] = {"n_ctx": 1024, "cache_type": cache_type, "kv_budget": 320}
    ids = np.random.default_rng(8).integers(0, 280, 700).tolist()
    options = OPTIONS | {"max_tokens": 150, "logprobs": 0}
    with engine.load(path, device="cpu", **given) as cpu, engine.load(path, device="cuda", **given) as gpu:
        assert masses(cpu, ids) == masses(gpu, ids)
        cpu.reset(), gpu.reset()
        expected = cpu.complete(ids, **options)
        assert gpu.complete(ids, **options).ids == expected.ids and expected.timings.dropped_n == 384


@pytest.mark.parametrize("kind", ["dense", "windows", "hybrid mixture"])
@pytest.mark.parametrize("n_gpu_layers", [1, 2])
def test_divided(kind: str, n_gpu_layers: int, tmp_path: Path) -> None:
    """Layers on the CPU and on a GPU: each device adds the masses of its own layers."""
    given = files(kind, tmp_path) | {"n_ctx": 512, "kv_budget": 256}
    with engine.load(**given) as cpu, engine.load(**given | {"device": "cuda", "n_gpu_layers": n_gpu_layers}) as gpu:
        assert masses(cpu, IDS) == masses(gpu, IDS)
        cpu.reset(), gpu.reset()
        expected = values(cpu.complete(IDS, **OPTIONS, speculation=PLAIN))
        assert values(gpu.complete(IDS, **OPTIONS, speculation=PLAIN)) == expected
        answer = gpu.generate(IDS, **OPTIONS)
        next(answer)
        gpu.core.interrupt()
        for _ in answer:
            pass
        assert values(answer) == expected
