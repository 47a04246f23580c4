"""Models divided between the CPU and a GPU: the bits of the CPU alone, with any share of the layers on the CPU."""

from pathlib import Path
from typing import Any

import pytest

import engine
from engine.errors import UsageError
from tests.models.test_mixed_passes import KINDS, files
from tests.models.test_stages import N_SEQUENCES, facts, interrupt
from tests.tiers import together

pytestmark = pytest.mark.gpu

CUTS: list[dict[str, Any]] = [
    {},
    {"n_gpu_layers": 1},
    {"override_tensor": "attn|ssm|shortconv=gpu,ffn=cpu"},
    {"override_tensor": r"blk\.0\.=gpu,^output|^altup_unembd|^token_embd_norm=cpu,attn|ssm|shortconv=cpu"},
]
"""Besides these, half of the layers."""


def stored(model: Any, sequence: Any) -> list[bytes]:
    """What a model stores of the sequence in slot 0, and what a snapshot of it holds."""
    found = [array.tobytes() for array in model.save(sequence).arrays]
    for il, layer in zip(model.config.owners, model.cache.layers, strict=True):
        download = model.placement.memory(il).download
        found += [array.tobytes() for _, array in layer.contents(sequence.length, download)]
    return found


@pytest.mark.parametrize("name", together("divided", KINDS))
def test_a_divided_model_has_the_bits_of_the_cpu(name: str, tmp_path: Path) -> None:
    given = files(name, tmp_path) | {"parallel": N_SEQUENCES}
    cpu = engine.load(**given)
    expected = {True: list(facts(cpu, stored))}
    half: dict[str, Any] = {"n_gpu_layers": cpu.config.n_layer // 2}
    for options in (*CUTS, half):
        try:
            llm = engine.load(**given | {"device": "cuda"} | options)
        except UsageError as error:
            if name == "parallel" and "stay together" in str(error):
                continue  # a parallel layer is one part
            # An assistant runs where the output is, and cannot reach keys on the other device.
            assert name == "gemma4" and "reads the keys of layer" in str(error)
            llm = engine.load(**given | {"device": "cuda", "draft_model": None} | options)
            if False not in expected:
                expected[False] = list(facts(engine.load(**given | {"draft_model": None}), stored))
        assert bool(llm.model.stages) is bool(options)
        assert list(facts(llm, stored)) == expected[llm.draft is not None or name != "gemma4"], options
        away = {ops.name for ops in llm.model.placement.networks} == {"cpu", "cuda"}
        # The prompt is long enough for weights to be copied.
        assert not away or (llm.model.streaming is not None and llm.model.streaming.passes > 0), options


@pytest.mark.parametrize("name", together("divided", ["hybrid", "deepseek4", "eagle3", "dflash"]))
def test_answers_with_drafts(name: str, tmp_path: Path) -> None:
    given = files(name, tmp_path)
    cpu = engine.load(**given)
    llm = engine.load(**given | {"device": "cuda", "n_gpu_layers": 1})
    prompt = list(range(5, 35))
    for temperature in (0.0, 0.9):
        options: dict[str, Any] = {"max_tokens": 24, "temperature": temperature, "seed": 4, "ignore_eos": True}
        plain = cpu.complete(prompt, speculation=engine.SpeculationParams(enabled=False), **options)
        drafted = llm.complete(prompt, speculation=engine.SpeculationParams(draft_max=3), **options)
        assert drafted.ids == plain.ids
        assert drafted.speculation is not None and drafted.speculation.drafted > 0


def test_an_error_between_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU waits no longer for the CPU, and the model continues with the right bits."""
    given = files("mixture", tmp_path)
    prompt = list(range(5, 25))
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = engine.load(**given).complete(prompt, **options).ids
    llm = engine.load(**given | {"device": "cuda", "n_cpu_moe": 99})
    interrupt(monkeypatch, llm, 3)
    with pytest.raises(KeyboardInterrupt):
        llm.complete(prompt, **options)
    assert llm.complete(prompt, **options).ids == expected
    assert llm.model.joint is not None and llm.model.joint.seconds > 0
