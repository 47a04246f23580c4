"""Models divided between the CPU and a simulated GPU: the bits of the CPU alone, wherever they are cut."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine import parity
from engine.cuda import backend
from engine.cuda.exchange import PinnedExchange
from engine.decode.evaluate import evaluate
from engine.errors import DeviceMemoryError
from engine.models import streaming
from engine.synthetic.model import make_model
from tests.cuda.simulated.device import SimulatedDevice, use_simulated
from tests.cuda.simulated.test_parity import SHAPES
from tests.models.test_stages import interrupt

PROMPT = [3, 7, 11, 2, 9]


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)


def facts(llm: engine.LLM) -> list[bytes]:
    """The logits of a prompt, of a step of two sequences, and of a draft."""
    model: Any = llm.model
    first, second = model.sequences
    found = []
    for sequence, tokens in ((first, PROMPT), (second, PROMPT[:2])):
        positions = np.arange(len(tokens), dtype=np.int32)
        found.append(evaluate(model, np.array(tokens, np.int32), positions, len(tokens), sequence).tobytes())
    found += [rows.tobytes() for rows in model.step([(first, [5, 6]), (second, [8])])]
    first.commit([5, 6])
    second.commit([8])
    if model.drafter is not None:
        found.append(model.drafter.forward(4, first.length, first).tobytes())
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gemma3", {"n_gpu_layers": 1}),
        ("qwen35moe", {"n_gpu_layers": 1}),
        ("qwen35moe", {"n_cpu_moe": 2}),
        ("qwen35moe", {"override_tensor": r"blk\.0\.=gpu,attn|ssm=cpu"}),
        ("deepseek2", {"override_tensor": r"^output=cpu,blk\.0\.ffn=cpu"}),
        ("glm-dsa", {"override_tensor": "ffn=cpu"}),
        ("deepseek4", {"n_gpu_layers": 2, "override_tensor": "attn=cpu"}),
        ("lfm2", {"n_gpu_layers": 1}),
        ("lfm2", {"override_tensor": "attn=cpu,shortconv=gpu,ffn=cpu"}),
        ("granitehybrid", {"n_gpu_layers": 1}),
        ("granitehybrid", {"override_tensor": "attn=cpu,ssm=gpu,ffn=cpu"}),
        ("gemma3n", {"n_gpu_layers": 2}),
        ("gemma3n", {"override_tensor": "attn=gpu,ffn=cpu"}),
        ("cohere2", {"n_gpu_layers": 1}),
        ("lfm2", {"override_tensor": r"blk\.0\.=gpu,^output|^token_embd_norm=cpu,attn|shortconv=cpu"}),
        ("kimi-linear", {"override_tensor": r"blk\.0\.=gpu,blk\.1\.=cpu"}),
        ("nemotron_h_moe", {"n_cpu_moe": 4}),
        ("nemotron_h_moe", {"override_tensor": "attn=cpu,ssm=gpu,ffn=gpu"}),
        ("falcon-h1", {"override_tensor": "attn|ssm=cpu"}),
    ],
)
def test_a_divided_model_has_the_bits_of_the_cpu(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = make_model(tmp_path / "model.gguf", SHAPES[name], "Q4_0")
    given: dict[str, Any] = {"n_ctx": 16, "parallel": 2, "n_threads": 1}
    cpu = engine.load(path, device="cpu", **given)
    llm = engine.load(path, device="cuda", **given, **options)
    assert {ops.name for ops in llm.model.devices} == {"cpu", "cuda"} and len(llm.model.stages) > 1
    assert facts(llm) == facts(cpu)
    # Passes of few rows are one recording.
    assert llm.model.joint is not None and llm.model.joint.seconds > 0
    # All mixtures on the CPU but the last of these are cut.
    assert len(llm.model.joint.heads) == (2 if "n_cpu_moe" in options else 0)
    assert not any(stage.seconds for stage in llm.model.stages if stage.ops.name == "cuda")


def test_an_error_between_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU waits no longer for the CPU, and the model continues with the right bits."""
    path = make_model(tmp_path / "model.gguf", SHAPES["gemma3"], "Q4_0")
    given: dict[str, Any] = {"n_ctx": 16, "n_threads": 1}
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    expected = engine.load(path, device="cpu", **given).complete(PROMPT, **options).ids
    llm = engine.load(path, device="cuda", **given, override_tensor="ffn=cpu")
    interrupt(monkeypatch, llm, 1)
    with pytest.raises(KeyboardInterrupt):
        llm.complete(PROMPT, **options)
    assert gc.isenabled()
    assert llm.complete(PROMPT, **options).ids == expected


def test_what_does_not_fit_stays_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "model.gguf", SHAPES["gemma3"], "Q4_0")
    given: dict[str, Any] = {"n_ctx": 16, "parallel": 2, "n_threads": 1}
    whole = engine.load(path, device="cuda", **given)
    assert not whole.model.stages
    monkeypatch.setattr(backend.Backend, "stream_bytes", lambda self, parts: 0)
    # Room for the second layer and the output, and not for the first layer.
    monkeypatch.setattr(backend.Backend, "free_memory", lambda self, weights: (1 << 30) * (weights < whole.n_bytes))
    llm = engine.load(path, device="cuda", **given)
    assert [len(stage.parts) for stage in llm.model.stages] == [2, 2]
    assert llm.complete(PROMPT, max_tokens=3, temperature=0, ignore_eos=True).ids == (
        engine.load(path, device="cpu", **given).complete(PROMPT, max_tokens=3, temperature=0, ignore_eos=True).ids
    )


def test_memory_that_is_shorter_than_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "model.gguf", SHAPES["gemma3"], "Q4_0")
    given: dict[str, Any] = {"n_ctx": 16, "parallel": 2, "n_threads": 1}
    options: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    cpu = engine.load(path, device="cpu", **given)
    monkeypatch.setattr(backend.Backend, "stream_bytes", lambda self, parts: 0)
    # The whole model with its context needs less than 250 kB, and with one of two layers on the CPU 48 kB less.
    reported = 260_000
    monkeypatch.setattr(backend.Backend, "free_memory", lambda self, weights: max(1, reported - weights))
    allocate = SimulatedDevice.allocate

    def without(name: str) -> Any:
        """A function that allocates memory, but none for tensors with this in their names."""

        def short(self: Any, size: int, what: str) -> Any:
            if name in what:
                raise DeviceMemoryError(f"too little for {what}")
            return allocate(self, size, what)

        return short

    monkeypatch.setattr(SimulatedDevice, "allocate", without("blk.0."))
    llm = engine.load(path, device="cuda", **given)
    assert llm.model.stages and llm.warnings[-1].startswith("the GPU had less memory than it reported, so 0.00 GB stay")
    assert llm.complete(PROMPT, **options).ids == cpu.complete(PROMPT, **options).ids
    # What the user has chosen, and what cannot fit, is an error.
    with pytest.raises(DeviceMemoryError, match=r"^too little for the weights \(blk\.0\."):
        engine.load(path, device="cuda", **given, n_gpu_layers=99)
    monkeypatch.setattr(SimulatedDevice, "allocate", without(""))
    with pytest.raises(DeviceMemoryError, match="^too little for"):
        engine.load(path, device="cuda", **given)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "quant", "options"),
    [
        ("gemma3", "Q5_1", {"n_gpu_layers": 1}),
        ("qwen35moe", "Q4_0", {"override_tensor": r"blk\.[01]\.=cpu"}),
        ("lfm2", "Q4_0", {"override_tensor": r"blk\.0\.=cpu"}),
        ("nemotron_h_moe", "Q4_0", {"override_tensor": r"blk\.[01]\.=cpu"}),
    ],
)
def test_prompts_with_weights_that_are_copied(
    name: str, quant: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "FEWEST_ROWS", 17)
    # A window in which a row sees those of the pass before.
    shape = replace(SHAPES[name], window=24) if name == "gemma3" else SHAPES[name]
    path = make_model(tmp_path / "model.gguf", shape, quant)
    given: dict[str, Any] = {"n_ctx": 48, "n_threads": 1, "parallel": 2}
    cpu = engine.load(path, device="cpu", **given)
    llm = engine.load(path, device="cuda", **given, **options)
    assert llm.model.streaming is not None
    assert bool(llm.model.streaming.mirrors) == ("cpu" in {ops.name for ops in llm.model.placement.mixers})
    tokens, found = np.arange(19, dtype=np.int32) % llm.config.n_vocab, []
    for each in (cpu, llm):
        model: Any = each.model
        evaluate(model, tokens[:2], np.arange(2, dtype=np.int32), 0, model.sequence)
        # Two passes, the second of which finds the weights of other parts on the device, and a step where the weights are.
        for first in (0, 19):
            positions = np.arange(first, first + 19, dtype=np.int32)
            found.append(evaluate(model, tokens, positions, 3, model.sequences[1]).tobytes())
        found += [rows.tobytes() for rows in model.step([(sequence, [4, 5]) for sequence in model.sequences])]
    assert found[:4] == found[4:]
    assert llm.model.streaming.prices.streamed is not None
    # Few rows are computed where the weights are.
    forgotten = llm.model.streaming.prices.streamed
    llm.complete([1, 2], max_tokens=1, temperature=0)
    assert llm.model.streaming.prices.streamed == forgotten


def test_parallel_layers_move_whole(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model.gguf", SHAPES["cohere2"], "Q4_0")
    model: Any = engine.load(path, device="cuda", n_ctx=16, n_threads=1, n_gpu_layers=1).model
    parts = [part for stage in model.streaming.stages for part in stage.parts]
    assert [str(part) for part in parts] == ["layer 0", "layer 1"]
    # A GPU with too little memory for mixers gets no networks without them.
    inputs = {stage.ops: stage._inputs for stage in model.stages}
    assert streaming.streaming(model, model.placement, inputs, mixers=False) is None


@pytest.mark.thorough
def test_parity_of_a_divided_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_model(tmp_path / "gemma.gguf", SHAPES["gemma3"], "Q8_0")
    flags = ["-ngl", "1", "-p", "3", "-n", "2", "-t", "1", "-ct", "f32"]
    assert parity.main([str(path), *flags]) == 0
    out = capsys.readouterr().out
    assert "layer 0 on cpu; layer 1 and the output on cuda:0 simulated GPU" in out.splitlines()[1]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert parity.main([str(path), "-ngl", "0", "-p", "3"]) == 2
    assert capsys.readouterr().err == (
        "error: nothing of the model is on the GPU, so there is nothing to compare: give -ngl 1 or more\n"
    )
    for words in ("stages on cpu", "stages on cuda", "cache", "answer of LLM.generate"):
        assert any(line.startswith(words) and line.endswith(" 0") for line in lines), words


@pytest.mark.thorough
def test_parity_finds_rows_that_arrive_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, give = make_model(tmp_path / "gemma.gguf", SHAPES["gemma3"], "Q8_0"), PinnedExchange.give

    def damaged(self: PinnedExchange, host: Any, border: int, x: np.ndarray, rows: int) -> None:
        give(self, host, border, host.scale(x, 2.0), rows)

    monkeypatch.setattr(PinnedExchange, "give", damaged)
    assert parity.main([str(path), "-ngl", "1", "-p", "3", "-n", "2", "-t", "1", "-ct", "f32"]) == 1
    out = capsys.readouterr().out
    assert "The stage at fault: all stages in one recording, on cuda:0 simulated GPU and the CPU." in out
