"""Whole models on a simulated GPU: ``engine/cuda/backend.py`` and ``engine/parity.py``, every kernel run thread by thread."""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED
from engine.verify import comparison, passes
from engine.verify.tally import Tally

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine import parity
from engine.cuda import backend, indexer
from engine.cuda.runtime import device, driver
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.kda_config import KDAConfig
from engine.models.mamba_config import MambaConfig
from engine.models.network_config import ExpertsConfig
from engine.synthetic.altup import Gemma3nShape
from engine.synthetic.convolutions import Lfm2Shape
from engine.synthetic.deepseek4 import DeepSeek4Shape
from engine.synthetic.kda import KimiLinearShape
from engine.synthetic.latents import LatentShape
from engine.synthetic.mamba import FalconH1Shape, GraniteHybridShape, NemotronHShape
from engine.synthetic.mixtures import GptOssShape, Llama4Shape
from engine.synthetic.model import make_model
from engine.synthetic.parallel import Cohere2Shape
from engine.synthetic.shape import Shape
from engine.verify.check import Check, Difference, Site
from engine.verify.lockstep import CHUNK_PARTS, Lockstep
from engine.version import ARITHMETIC
from tests import eagle3
from tests.cuda.simulated import parity as small
from tests.cuda.simulated.device import SimulatedDevice, use_simulated
from tests.tiers import few

# As small as formats and vocabulary allow, so that a pass takes seconds: rows of one unit of 256, or of one to three of 32.
SHAPES = {
    "llama": Shape("llama", 1, 256, 2, 1, 32, 256, 289, 64, 1e4, 1e-5),
    "qwen2": Shape("qwen2", 1, 64, 2, 1, 32, 96, 289, 64, 1e4, 1e-6, tied=False),
    "qwen3": Shape("qwen3", 1, 32, 1, 1, 32, 32, 289, 64, 1e4, 1e-6),
    "gemma3": Shape("gemma3", 2, 64, 2, 1, 32, 64, 289, 64, 1e4, 1e-6, window=1),
    "gpt-oss": GptOssShape(
        *("gpt-oss", 1, 32, 2, 1, 32, 0, 289, 64, 1e4, 1e-5),
        tied=False,
        window=1,
        experts=ExpertsConfig(3, 2, 32),
    ),
    "deepseek2": LatentShape(
        *("deepseek2", 2, 64, 2, 1, 40, 64, 289, 64, 1e4, 1e-6),
        tied=False,
        n_rot=8,
        experts=ExpertsConfig(3, 2, 32),
        n_mtp=1,
        rank=32,
        n_nope=32,
        d_v=32,
        q_rank=32,
    ),
    "deepseek32": LatentShape(
        *("deepseek32", 2, 64, 2, 1, 40, 64, 289, 64, 1e4, 1e-6),
        tied=False,
        n_rot=8,
        experts=ExpertsConfig(3, 2, 32),
        n_mtp=1,
        rank=32,
        n_nope=32,
        d_v=32,
        q_rank=32,
        index=(2, 16, 1),
    ),
    # The second layer shares the choice of the first one.
    "glm-dsa": LatentShape(
        *("glm-dsa", 2, 64, 2, 1, 40, 64, 289, 64, 1e4, 1e-6),
        tied=False,
        n_rot=8,
        experts=ExpertsConfig(3, 2, 32),
        n_mtp=1,
        rank=32,
        n_nope=32,
        d_v=32,
        q_rank=32,
        index=(2, 16, 1),
        shared=1,
    ),
    "deepseek4": DeepSeek4Shape(
        *("deepseek4", 3, 32, 2, 1, 32, 0, 289, 64, 1e4, 1e-6),
        tied=False,
        window=2,
        n_rot=8,
        experts=ExpertsConfig(3, 2, 32),
        n_q=32,
        n_group=1,
        n_out=32,
        indexer=(2, 16, 1),
        n_hash=1,
    ),
    "qwen35moe": Shape(
        *("qwen35moe", 2, 64, 2, 1, 32, 0, 289, 64, 1e4, 1e-6),
        n_rot=16,
        experts=ExpertsConfig(3, 2, 32, 32),
        delta_net=DeltaNetConfig(1, 2, 32, 4),
        interval=2,
        n_mtp=1,
    ),
    # The last layer reads the cache of the one two layers before it.
    "gemma3n": Gemma3nShape(
        *("gemma3n", 3, 32, 1, 1, 32, 64, 289, 64, 1e4, 1e-6),
        window=2,
        pattern=2,
        n_shared=1,
        n_sparse=2,
        n_per_layer=32,
        rank=32,
    ),
    "lfm2": Lfm2Shape(*("lfm2", 2, 64, 2, 1, 32, 64, 289, 64, 1e4, 1e-5), attention=(1,)),
    "kimi-linear": KimiLinearShape(
        *("kimi-linear", 2, 64, 4, 1, 40, 64, 289, 64, 1e4, 1e-5),
        tied=False,
        n_rot=8,
        experts=ExpertsConfig(5, 2, 32),
        rank=32,
        n_nope=32,
        d_v=32,
        attention=(1,),
        kda=KDAConfig(4, 32, 4),
    ),
    "granitehybrid": GraniteHybridShape(*("granitehybrid", 2, 64, 2, 1, 32, 64, 289, 64, 1e4, 1e-5), attention=(1,)),
    "nemotron_h_moe": NemotronHShape(
        *("nemotron_h_moe", 4, 64, 2, 1, 32, 64, 289, 64, 1e4, 1e-5),
        pattern="ME*E",
        mamba=MambaConfig(2, 16, 32, 2, 4),
        experts=ExpertsConfig(3, 2, 32, 32),
    ),
    "falcon-h1": FalconH1Shape("falcon-h1", 2, 64, 2, 1, 32, 64, 289, 64, 1e4, 1e-5, tied=False),
    "cohere2": Cohere2Shape("cohere2", 2, 64, 2, 1, 32, 64, 289, 64, 1e4, 1e-5, window=3),
    "llama4": Llama4Shape(
        *("llama4", 1, 64, 2, 1, 32, 64, 289, 64, 1e4, 1e-5), tied=False, window=2, experts=ExpertsConfig(3, 1, 32)
    ),
}


Models = tuple[engine.LLM, engine.LLM]


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_simulated(monkeypatch)
    monkeypatch.setattr(indexer, "THREADS", 32)
    monkeypatch.setattr(comparison, "NOISY", {"temperature": 0.8, "top_k": 30})
    monkeypatch.setattr(comparison, "MOST_SAMPLED", 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def make(architecture: str, quant: str) -> Path:
        file = folder / f"{architecture}-{quant}.gguf"
        return file if file.exists() else make_model(file, SHAPES[architecture], quant)

    return make


def loaded(file: Path, cache_type: str = "f16") -> Models:
    cpu, gpu = (engine.load(file, device=device, n_ctx=8, cache_type=cache_type) for device in ("cpu", "cuda"))
    return cpu, gpu


def every_kernel(models: Models, ids: Sequence[int], counts: Sequence[int]) -> list[tuple[Site, Check]]:
    noted: list[tuple[Site, Check]] = []
    cpu, gpu = models
    cpu.reset()
    gpu.reset()
    both = Lockstep(cpu.model, gpu.model, lambda site, check: noted.append((site, check)))
    for tokens, positions in passes.passes(ids, counts):
        both.forward(tokens, positions, 1)
    if cpu.model.drafter is not None:
        both.draft(ids[0], sum(counts), 0)
    return noted


@pytest.mark.parametrize(
    ("architecture", "quant", "cache_type", "counts"),
    few(
        [
            ("qwen3", "Q8_0", "i8", [2]),
            ("qwen35moe", "Q8_0", "f16", [1, 2]),
            ("qwen2", "Q4_1", "f32", [1]),
            ("deepseek2", "Q8_0", "f16", [1, 2]),
            ("deepseek4", "Q8_0", "f16", [4]),
            ("deepseek32", "Q8_0", "f16", [1, 3]),
            ("glm-dsa", "Q8_0", "f16", [3]),
            ("qwen3", "Q8_0", "q8_0", [2]),
            ("qwen3", "Q8_0", "i12", [2]),
            ("llama", "Q4_K_M", "f16", [2]),
            ("gemma3", "Q8_0", "f16", [2]),
            ("gpt-oss", "F16", "f16", [2]),
            ("gpt-oss", "Q8_0", "f16", [1, 2]),
            ("lfm2", "Q8_0", "f16", [1, 2]),
            ("gemma3n", "Q8_0", "f16", [1, 2]),
            ("cohere2", "Q8_0", "f16", [1, 2]),
            ("kimi-linear", "Q8_0", "f16", [1, 2]),
            ("nemotron_h_moe", "Q8_0", "f16", [1, 2]),
            ("falcon-h1", "Q8_0", "f16", [1, 2]),
            ("llama4", "Q8_0", "f16", [1, 2]),
        ],
        2,
    ),
)
def test_every_kernel(path: Any, architecture: str, quant: str, cache_type: str, counts: list[int]) -> None:
    noted = every_kernel(loaded(path(architecture, quant), cache_type), [3, 288, 17, 5], counts)
    assert not any(check.differing.any() for _, check in noted)
    assert sum(check.values for _, check in noted) > 1500
    operations = {site.operation for site, _ in noted}
    mixtures = (
        "qwen35moe",
        "gpt-oss",
        "deepseek2",
        "deepseek32",
        "glm-dsa",
        "deepseek4",
        "kimi-linear",
        "nemotron_h_moe",
        "llama4",
    )
    gate = dict.fromkeys(mixtures, "experts").get(architecture, "activate")
    latent = dict.fromkeys(("deepseek2", "deepseek32", "glm-dsa", "kimi-linear"), "latent_attention")
    attention = (latent | {"deepseek4": "attend_compressed"}).get(architecture, "attention")
    norm = "layer_norm" if architecture == "cohere2" else "rms_norm"
    assert {"embed", norm, "matmul", attention, gate} <= operations
    assert {site.layer for site, _ in noted} == {None, *range(SHAPES[architecture].n_layer)}
    kernels = {site.kernel for site, _ in noted}
    if architecture == "qwen35moe":
        assert {"delta_net", "gated_norm", "mtp_input", "keep_rows", "remember", "plain"} <= operations
        kept = {f"kept {what}" for what in ("state", "keys", "deltas", "decays", "inputs", "row")}
        assert {*kept, "stored key"} <= {check.what for _, check in noted}
        return
    if architecture == "deepseek4":
        assert {"stream_weights", "collapse", "expand", "compress", "choose_rows", "grouped_matmul"} <= operations
        assert {"append", "compress", "keep", "choose", "join_compressed"} <= kernels
        assert {"stored row", "compressed row", "open block"} <= {check.what for _, check in noted}
        return
    if architecture in ("deepseek32", "glm-dsa"):
        assert {"layer_norm", "rotate_tail", "keep_keys", "choose_rows", "remember_latent"} <= operations
        assert {"append_keys", "ends", "choose", "attend_latents"} <= kernels
    if architecture in latent:
        found = {check.what for site, check in noted if "latent" in site.operation}
        assert {"stored row", "rotated query", "query times k_b", *CHUNK_PARTS, "result"} == found - {
            "last of the chosen"
        }
        assert {"remember_latent", "mtp_input"} <= operations
        assert {"latent_rope", "matmul_heads", "attend_latents"} <= kernels
        return
    if architecture == "lfm2":
        assert {check.what for site, check in noted if site.operation == "short_conv"} == {"result", "kept inputs"}
        return
    if architecture == "kimi-linear":
        found = {check.what for site, check in noted if site.operation == "kda"}
        assert found == {"convolved", "result", *(f"kept {what}" for what in ("inputs", "state", "tokens"))}
        assert "gated_norm" in operations and "latent_rope" in kernels
    if architecture == "nemotron_h_moe":
        found = {check.what for site, check in noted if site.operation == "mamba"}
        assert found == {"convolved", "result", *(f"kept {what}" for what in ("inputs", "state", "tokens"))}
        assert {"mamba", "grouped_norm"} <= operations
        return
    if architecture == "gemma3n":
        streams = {f"altup_{name}" for name in ("enter", "predict", "active", "correct", "leave")}
        assert {*streams, "columns", "sparsify", "grouped_matmul", "attend_past"} <= operations
        return
    if architecture == "gpt-oss":
        # A product of a float format does not add the bias itself.
        between = {"x times the matrix", "x times the matrix, with the bias"}
        found = {check.what for site, check in noted if site.operation == "matmul_add"}
        assert found & between == (between if quant == "F16" else set())
        return
    if architecture == "llama4":
        return
    assert {f"{norm}_quantize", "quantize", "matmul_quantized"} <= kernels
    by_type = {"q8_0": "attend_in_place", "i8": "attend_integer_chunks", "i12": "attend_integer_chunks"}
    attend = by_type.get(cache_type, "attend_chunks")
    assert {attend, "combine", "combine_quantize"} <= kernels
    if attend == "attend_in_place":
        assert {"rotated query as int8", *CHUNK_PARTS} <= {check.what for _, check in noted}


@pytest.mark.thorough
def test_the_command_with_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every operation of drafts, too; a draft model is refused."""
    shape = Shape("llama", 1, 64, 2, 1, 32, 64, 289, 64, 1e4, 1e-5)
    file, network = make_model(tmp_path / "llama.gguf", shape, "Q8_0"), tmp_path / "network.gguf"
    eagle3.Network(64, 289, 64, 2, 1, 32, 32, (0, 1)).write(network)
    flags = ["-p", "2", "-n", "2", "-t", "1", "-v"]
    assert parity.main([str(file), "-md", str(network), *flags]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith("values compared are equal, bit for bit.")
    assert all(operation in out for operation in ("mtp_input", "join_columns", "remember"))
    assert parity.main([str(file), "-md", str(file), *flags]) == 2
    assert "compare a draft model on its own" in capsys.readouterr().err


def test_the_command_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m tests.cuda.simulated.parity`` compares every kernel of a layer."""
    assert small.main(["-p", "1", "-v"]) == 0
    out = capsys.readouterr().out
    assert "simulated GPU" in out and out.endswith("values compared are equal, bit for bit.\n")
    assert all(kernel in out for kernel in ("embed_quantized", "rope", "attend_integer_chunks", "combine", "activate"))


@pytest.mark.thorough
def test_the_command(path: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = path("qwen3", "Q8_0")
    flags = ["-p", "1", "-n", "3", "-ct", "f32", "-t", "1", "--report", str(tmp_path / "report.json")]
    assert parity.main([str(file), *flags]) == 0
    out = capsys.readouterr().out
    *table, last = out.splitlines()
    assert table[0] == "qwen3-Q8_0.gguf: qwen3, 1 layers, f32 cache, 1 + 3 tokens"
    assert last.startswith("all ") and last.endswith("values compared are equal, bit for bit.")
    total = int(last.split()[1])
    assert table[1].endswith(f"arithmetic {ARITHMETIC}")
    lines = [line.split() for line in table[2:] if line and line.split()[-1].isdecimal()]
    assert {line[-1] for line in lines} == {"0"}
    assert sum(int(line[-2]) for line in lines) == total
    report = json.loads((tmp_path / "report.json").read_text())
    (model,) = report["models"]
    assert (report["gpu"]["name"], model["file"], model["result"]) == ("simulated GPU", file.name, "equal")
    assert model["values"] == total == sum(line["values"] for line in model["comparisons"])
    assert len(model["comparisons"]) == len(lines) and model["seconds"] > 0
    for words in (
        "attention rope rotated query, stored key, stored value",
        "matmul_add ffn_down matmul_quantized result",
        "logits of the prompt",
        "cache what is visible",
        "logits of greedy tokens",
        "k rows = k single steps k = 2 to 2",
        "tokens chosen on the GPU greedy, with noise, with penalties",
        "answer of LLM.generate greedy, with noise, with noise and drafts, with penalties, with penalties and drafts",
    ):
        assert any(" ".join(line).startswith(words) for line in lines), words


# --- faults are found ------------------------------------------------------------------------------------------


class Damage:
    """Flips ``bits`` of word ``at`` of a kernel's ``output``, at each call for which ``when(number of the call, device)``."""

    def __init__(
        self, ops: Any, kernel: str, when: Callable[[int, Any], bool], output: int = 0, at: int = 7, bits: int = 1
    ) -> None:
        self.calls = 0
        self._outputs: dict[int, tuple[Any, Any]] = {}
        self._kernel, self._when, self._output, self._at, self._bits = kernel, when, output, at, bits
        record = ops.recorder.record

        def remembering(forward: Callable[[], Any], *role: Any) -> Any:
            plan = record(forward, *role)
            # The arguments are also kept, so that no other tuple gets their identity.
            self._outputs |= {id(launch.arguments): (launch.arguments, launch.outputs) for launch in plan.launches}
            return plan

        ops.recorder.record = remembering
        ops.device.damage = self

    def __call__(self, device: Any, specialization: Any, arguments: Any) -> None:
        if specialization.kernel.name == self._kernel:
            self.calls += 1
            if self._when(self.calls, device):
                address = self._outputs[id(arguments)][1][self._output].address
                device.at(address).view(np.uint32)[self._at] ^= self._bits


@pytest.fixture(scope="module")
def sound(path: Any) -> Iterator[Models]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "Device", SimulatedDevice)
        patch.setattr(driver, "require_gpu", lambda: None)
        patch.setattr(device, "require_gpu", lambda: None)
        yield loaded(path("qwen3", "Q8_0"))


@pytest.fixture
def models(sound: Models) -> Iterator[Models]:
    """One pair of models, repaired after each test."""
    yield sound
    ops: Any = sound[1].model.ops
    ops.recorder.__dict__.pop("record", None)
    ops.device.damage = None
    ops.plans.kept.clear()


def test_a_wrong_kernel(models: Any) -> None:
    Damage(models[1].model.ops, "combine", lambda call, device: True)
    with pytest.raises(Difference) as caught:
        every_kernel(models, [3], [1])
    error = caught.value
    assert error.site and (error.site.layer, error.site.operation, error.site.kernel) == (0, "attention", "combine")
    assert error.check.differing.tolist() == [[int(i == 7) for i in range(32)]]
    cpu, gpu = (array[0, 7] for array in (error.check.cpu, error.check.gpu))
    assert int(cpu.view(np.uint32)) ^ int(gpu.view(np.uint32)) == 1
    variant = error.site.variant
    assert str(error).splitlines() == [
        f"layer 0, attention, kernel {variant}: result[0, 7] differs, as do 1 of 32 values in all:",
        f"  CPU  0x{int(cpu.view(np.uint32)):08x}  {cpu!s}",
        f"  GPU  0x{int(gpu.view(np.uint32)):08x}  {gpu!s}",
        f"the kernel {variant} is at fault: given the CPU's inputs in fresh memory it differs in the same way.",
    ]


@pytest.mark.parametrize(
    ("kernel", "output", "what"),
    few(
        [
            ("rms_norm_quantize", 2, "its sums"),
            ("rope", 0, "rotated query"),
            ("attend_chunks", 1, "weighted values"),
            ("combine_quantize", 0, "x as int8"),
            ("rms_norm_quantize", 0, "x as int8"),
            ("rms_norm_quantize", 1, "its scales"),
            ("attend_chunks", 0, "largest score and sum"),
        ],
        4,
    ),
)
def test_what_lies_between_kernels(models: Any, kernel: str, output: int, what: str) -> None:
    """Values between kernels are also compared, so the first faulty one is named; a fault that does not recur is reported
    as one."""
    Damage(models[1].model.ops, kernel, lambda call, device: call == 1, output, at=0)
    with pytest.raises(Difference, match="given the CPU's inputs in fresh memory the same kernel is right") as caught:
        every_kernel(models, [3], [1])
    assert caught.value.site and (caught.value.site.kernel, caught.value.check.what) == (kernel, what)


def test_wrong_weights(models: Any) -> None:
    gpu = models[1]
    weight = gpu.model.layers[0].mixer.output.matrix
    memory = gpu.model.ops.device.at(weight.address)
    memory[5] ^= 4
    with pytest.raises(
        Difference, match=r"the weights blk\.0\.attn_output\.weight in device memory are not those of the file"
    ):
        every_kernel(models, [3], [1])
    memory[5] ^= 4


def test_wrong_only_in_a_graph(models: Any) -> None:
    """The search goes from the pass to its operations, and from there to the launches of its graph."""
    cpu, gpu = models
    both = comparison.Comparison(cpu, gpu, [3], 0, Tally())
    Damage(gpu.model.ops, "attend_chunks", lambda call, device: device.in_graph, output=1, bits=1 << 31)
    with pytest.raises(Difference) as caught:
        both.prompt()
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("whole pass: logits of the prompt, logits of positions 0 to 0: [0, ")
    assert lines[3].startswith("operation by operation every kernel is right; run as a graph")
    assert ", kernel attend_chunks[" in lines[4] and "[7] differs, as do 1 of 32 values" in lines[4]


def test_a_wrong_cache(models: Any) -> None:
    cpu, gpu = models
    both = comparison.Comparison(cpu, gpu, [3], 0, Tally())
    every_kernel(models, [3], [1])
    both.caches()
    gpu.model.ops.device.at(gpu.cache.layers[0].values.address).view(np.uint16)[9] ^= 1
    with pytest.raises(Difference, match=r"values of layer 0, among the visible positions\[0, 0, 9\] differs"):
        both.caches()


def test_the_command_names_what_differs(
    path: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(SimulatedDevice):
        def __init__(self, index: int = 0) -> None:
            super().__init__(index)
            self.damage = self.flip

        def flip(self, device: Any, specialization: Any, arguments: Any) -> None:
            if specialization.kernel.name == "embed_quantized":
                self.at(arguments[-1])[3] ^= 0x80

    monkeypatch.setattr(backend, "Device", Broken)
    report = tmp_path / "report.json"
    assert parity.main([str(path("qwen3", "Q8_0")), "-p", "1", "-n", "0", "--report", str(report)]) == 1
    *_, head, cpu, gpu, verdict = capsys.readouterr().out.splitlines()
    assert head.startswith(
        "DIFFERENT: outside of the layers, embed token_embd, kernel embed_quantized[Q8_0]: result[0, 0]"
    )
    # A sign.
    assert float(cpu.split()[-1]) == -float(gpu.split()[-1]) != 0
    assert verdict.startswith("the kernel embed_quantized[Q8_0] is at fault")
    (model,) = json.loads(report.read_text())["models"]
    assert (model["result"], model["problem"]) == (
        "different",
        "\n".join((head, cpu, gpu, verdict))[len("DIFFERENT: ") :],
    )
    (line,) = model["comparisons"]
    assert (line["kernel"], line["differing_bits"]) == ("embed_quantized", 1) and model["differing_bits"] == 1


# --- what the simulated device imitates ------------------------------------------------------------------------


def test_memory_of_results_in_a_cycle() -> None:
    """Memory in a cycle, such as that of an exception and its frames, returns to the pool and is not freed as well."""
    ops: Any = backend.Backend()
    x = ops.upload(np.zeros(64, np.float32))
    cycle: list[Any] = [ops.record(partial(ops.add, x, x)).result]
    address = cycle[0].address
    cycle.append(cycle)
    del cycle
    gc.collect()
    again = ops.record(partial(ops.add, x, x)).result
    assert again and again.address == address
    assert ops.device.at(address).size == 256


def test_memory_comes_back_and_graphs_repeat() -> None:
    ops: Any = backend.Backend()
    before = ops.device.allocated
    x, y = (ops.upload(np.arange(n, dtype=np.float32)) for n in (64, 32))
    plan = ops.record(partial(ops.add, x, y))
    ops.capture(plan)
    assert plan.graph and plan.result
    plan.graph.launch()
    assert ops.download(plan.result).tolist() == [i + i % 32 for i in range(64)]
    del x, y, plan
    assert ops.device.allocated == before + 256  # the pool keeps the memory of a result
