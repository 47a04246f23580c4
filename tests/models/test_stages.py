"""A model that is divided into stages has the bits of the whole model, wherever it is cut: logits, what is stored, drafts,
answers, and rows of many sequences.  Here every device is a backend of the CPU; ``tests/cuda/simulated/test_stages.py``
divides models between the CPU and a GPU."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine
from engine import loading
from engine.cli.placements import describe
from engine.cpu.backend import Backend
from engine.cpu.runtime import team
from engine.errors import UsageError
from engine.gguf.file import GGUF, read_gguf
from engine.models.config import ModelConfig
from engine.models.division import Division, fitted, parse_overrides, part_of, weight_bytes
from engine.models.placement import LayerPart, Placement
from engine.models.registry import read_config
from engine.synthetic.model import make_model
from tests.models.test_mixed_passes import KINDS, drafts, files, read, stored
from tests.tiers import examples

N_SEQUENCES = 16
PROMPT = 100
STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model may be divided between two backends of the CPU."""
    monkeypatch.setattr(loading, "host_beside", lambda ops, n_threads=0: Backend(1, 24))


def cut(monkeypatch: pytest.MonkeyPatch, mixers: list[int], networks: list[int], last: int) -> None:
    """Divide the next models between three backends, which read different numbers of rows at a time."""
    devices: list[Any] = [Backend(1, rows) for rows in (32, 17, 64)]

    def placement(config: Any, gguf: Any, ops: Any, *rest: Any) -> tuple[Placement, bool]:
        n = config.n_layer
        given = [[devices[each % 3] for each in (column * n)[:n]] for column in (mixers, networks)]
        return Placement.split(config, given[0], given[1], devices[0], devices[last]), False

    monkeypatch.setattr(loading, "_placement", placement)


def interrupt(monkeypatch: pytest.MonkeyPatch, llm: engine.LLM, number: int) -> None:
    """Raise KeyboardInterrupt in place of run ``number``, counted from 0, of the first stage on the CPU after another one; if
    the stages are one recording, at check ``number`` of its pass on the CPU for signals, in which it is between two tiles."""
    stages: Any = llm.model.stages
    runs = count()

    def interrupted(run: Callable[..., Any], *arguments: Any) -> Any:
        if next(runs) == number:
            raise KeyboardInterrupt
        return run(*arguments)

    broken = next(stage for stage in stages[1:] if stage.ops.name == "cpu")
    monkeypatch.setattr(broken, "run", partial(interrupted, broken.run))
    if llm.model.joint is not None:
        monkeypatch.setattr(team, "BUDGET", 1)
        exchange: Any = llm.model.joint.exchange
        monkeypatch.setattr(exchange, "check", partial(interrupted, exchange.check))


def facts(llm: engine.LLM, stored: Callable[[Any, Any], list[bytes]] = stored) -> Iterator[bytes]:
    """Bits that say whether two models are the same: of prompts, steps of sixteen sequences, drafts and a snapshot.

    stored: what a model stores of a sequence.
    """
    model: Any = llm.model
    rng = np.random.default_rng(3)
    text = rng.integers(0, llm.config.n_vocab - 3, PROMPT + STEPS).astype(np.int32)
    first = model.sequences[0]
    yield read(model, first, text[:PROMPT]).tobytes()
    yield from stored(model, first)
    yield from drafts(model, first, 7)
    for i, sequence in enumerate(model.sequences[1:]):
        read(model, sequence, text[: i + 1])
    for step in range(4):
        logits = model.step([(sequence, [int(text[PROMPT + step])]) for sequence in model.sequences])
        yield from (rows.tobytes() for rows in logits)
        for sequence in model.sequences:
            sequence.commit([int(text[PROMPT + step])])
    # A step with rows that are taken back.
    (rows,) = model.step([(first, text[-5:].tolist())])
    first.commit(text[-5:-3].tolist())
    yield rows.tobytes()
    yield from stored(model, first)
    snapshot, length = model.save(first), first.length
    yield read(model, first, text[:9]).tobytes()
    if model.cache.restorable and first.can_resume(length):
        model.restore(snapshot, first)
        yield read(model, first, text[:9]).tobytes()


def loaded(name: str, folder: Path) -> engine.LLM:
    (folder / name).mkdir(exist_ok=True)
    return engine.load(**files(name, folder / name), n_threads=1, parallel=N_SEQUENCES)


@pytest.mark.parametrize("name", KINDS)
def test_a_divided_model_has_the_bits_of_the_whole(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = loaded(name, folder)
    assert not whole.model.stages
    expected = list(facts(whole))
    for mixers, networks, last in (([0, 1], [1, 1, 0], 2), ([1], [0], 1), ([2, 0, 0], [2, 0, 0], 0)):
        with monkeypatch.context() as patch:
            cut(patch, mixers, networks, last)
            llm = loaded(name, folder)
        # Parallel layers lie where their mixers are wanted.
        assert len(llm.model.stages) >= (2 if name == "parallel" else 3) and len(llm.model.devices) >= 2
        assert list(facts(llm)) == expected


@pytest.mark.first
@examples(25, 4)
@given(data=st.data())
def test_a_cut_anywhere(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "anywhere"
    folder.mkdir(exist_ok=True)
    name = data.draw(st.sampled_from(sorted(KINDS)))
    expected = EXPECTED.setdefault(name, list(facts(loaded(name, folder))))
    column = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    with pytest.MonkeyPatch.context() as patch:
        cut(patch, data.draw(column), data.draw(column), data.draw(st.integers(0, 2)))
        llm = loaded(name, folder)
    assert list(facts(llm)) == expected


EXPECTED: dict[str, list[bytes]] = {}


@pytest.mark.parametrize("name", ["hybrid", "gemma4", "deepseek4", "eagle3", "dflash"])
@pytest.mark.usefixtures("divided")
def test_answers_with_drafts(name: str, folder: Path) -> None:
    (folder / name).mkdir(exist_ok=True)
    given = files(name, folder / name) | {"n_threads": 1}
    whole = engine.load(**given)
    llm = engine.load(**given, n_gpu_layers=1)
    assert llm.model.stages and llm.draft is not None
    prompt = np.random.default_rng(5).integers(0, llm.config.n_vocab - 3, 30).tolist()
    for temperature in (0.0, 0.9):
        options: dict[str, Any] = {"max_tokens": 20, "temperature": temperature, "seed": 4, "ignore_eos": True}
        drafts = engine.SpeculationParams(draft_max=3)
        plain = whole.complete(prompt, speculation=engine.SpeculationParams(enabled=False), **options)
        assert llm.complete(prompt, **options).ids == plain.ids
        drafted = llm.complete(prompt, speculation=drafts, **options)
        assert drafted.ids == plain.ids and drafted.speculation is not None and drafted.speculation.drafted > 0


@pytest.mark.usefixtures("divided")
def test_an_assistant_cannot_reach_another_kind_of_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend beside that of the output counts as another kind of device; it reads 24 rows at a time."""
    monkeypatch.setattr(Backend, "can_reach", lambda self, other: other.max_rows != 24)
    (folder / "gemma4").mkdir(exist_ok=True)
    given = files("gemma4", folder / "gemma4") | {"n_threads": 1}
    with pytest.raises(UsageError, match="reads the keys of layer"):
        engine.load(**given, n_gpu_layers=1)
    assert engine.load(**given, override_tensor="ffn=cpu,attn=gpu").draft is not None


# --- how models are divided --------------------------------------------------------------------------------------


class Device:
    """A name for a backend."""

    def __init__(self, label: str) -> None:
        self.label = label

    def device_memory(self) -> int | None:
        """Memory of its own, which a GPU has."""
        return 1 if self.label != "cpu" else None


GPU: Any = Device("cuda:0")
CPU: Any = Device("cpu")


def config_of(name: str, folder: Path) -> tuple[ModelConfig, GGUF]:
    (folder / name).mkdir(exist_ok=True)
    gguf = read_gguf(files(name, folder / name)["path_or_name"])
    return read_config(gguf), gguf


def where(column: Sequence[Any]) -> str:
    """G or C for each layer."""
    return "".join("G" if ops is GPU else "C" for ops in column)


@pytest.mark.parametrize(
    ("options", "mixers", "networks", "last", "cut"),
    [
        (Division(2), "CCGG", "CCGG", "G", []),
        (Division(0), "CCCC", "CCCC", "C", []),
        (Division(99), "GGGG", "GGGG", "G", []),
        (Division(n_cpu_moe=3), "GGGG", "CCCG", "G", [0, 1, 2]),
        (Division(3, 2), "CGGG", "CCGG", "G", [1]),
        (Division(overrides=parse_overrides("ffn_.*_exps=CPU")), "GGGG", "CCCC", "G", [0, 1, 2, 3]),
        (Division(overrides=parse_overrides(r"blk\.[12]\.ffn=cpu,^output=CPU")), "GGGG", "GCCG", "C", [1, 2]),
        (Division(overrides=parse_overrides(r"blk\.0\.=CUDA0,blk=cpu")), "GCCC", "GCCC", "G", []),
    ],
)
def test_placements(options: Division, mixers: str, networks: str, last: str, cut: list[int], folder: Path) -> None:
    """cut: the layers whose mixtures have their experts on the CPU and the rest on both devices."""
    config, gguf = config_of("hybrid mixture", folder)
    placement = options.placement(config, gguf, GPU, CPU)
    assert (where(placement.mixers), where(placement.networks), where([placement.last])) == (mixers, networks, last)
    assert placement.first is CPU
    held = weight_bytes(config, gguf, placement)
    tied = "output.weight" not in gguf.tensors
    twice = tied * (last == "G") * gguf.tensors["token_embd.weight"].nbytes
    assert [part.layer for part in placement.routed(config)] == cut
    names = [f"blk.{il}.{name}" for il in cut for name in ("ffn_gate_inp", "ffn_up_shexp", "post_attention_norm")]
    assert all(f"{name}.weight" in gguf.tensors for name in names)
    for name, tensor in gguf.tensors.items():
        part = part_of(name, config)
        twice += tensor.nbytes if part and part.network and part.layer in cut and "_exps" not in name else 0
    assert held[GPU] + held[CPU] == gguf.n_bytes + twice


def test_blocks_that_are_one_part(folder: Path) -> None:
    """A block that is a mixture alone is cut between the blocks around it; a mixer has no network elsewhere."""
    config, gguf = config_of("blocks", folder)
    assert [layer.mixer.exists for layer in config.layers] == [True, False, True, True, False] and config.owners == (
        0,
        2,
        3,
    )
    placement = Division(n_cpu_moe=5).placement(config, gguf, GPU, CPU)
    assert (where(placement.mixers), where(placement.networks)) == ("GCGGC", "GCGGC")
    assert placement.routed(config) == [LayerPart(il, mixer=False, network=True) for il in (1, 4)]
    assert [part for part, _ in placement.parts(config)] == [
        LayerPart(il, il not in (1, 4), il in (1, 4)) for il in range(5)
    ]
    assert Division(n_cpu_moe=2).placement(config, gguf, GPU, CPU).networks == (GPU, CPU, GPU, GPU, GPU)
    placement = Division(overrides=parse_overrides("attn|ssm=cpu")).placement(config, gguf, GPU, CPU)
    assert (where(placement.mixers), where(placement.networks)) == ("CGCCG", "CGCCG")


def test_two_mixers_of_a_layer_stay_together(folder: Path) -> None:
    config, gguf = config_of("pairs", folder)
    both = Division(overrides=parse_overrides("(attn_|ssm_)=cpu")).placement(config, gguf, GPU, CPU)
    assert (where(both.mixers), where(both.networks)) == ("CCC", "GGG")
    with pytest.raises(UsageError, match="the mixer of layer 0 stay together"):
        Division(overrides=parse_overrides("ssm_=cpu")).placement(config, gguf, GPU, CPU)


def test_mixers_lie_where_their_keys_lie(folder: Path) -> None:
    config, gguf = config_of("gemma4", folder)
    sources = [layer.mixer.memory_source for layer in config.layers]
    assert any(source is not None for source in sources)
    for n in range(config.n_layer + 1):
        placement = Division(n).placement(config, gguf, GPU, CPU)
        for il, source in enumerate(sources):
            assert source is None or placement.mixers[il] is placement.mixers[source]
        assert where(placement.networks) == "C" * (config.n_layer - n) + "G" * n


def test_every_tensor_of_a_layer_belongs_to_a_part(folder: Path) -> None:
    for name in KINDS:
        config, gguf = config_of(name, folder)
        parts = {part_of(tensor, config) for tensor in gguf.tensors}
        every = ((il, network) for il in range(config.n_layer) for network in (False, True))
        assert parts - {None} == {LayerPart.of(config, il, network) for il, network in every}
        for tensor in gguf.tensors:
            part = part_of(tensor, config)
            if part is None:
                continue
            whole = name == "parallel"
            if any(word in tensor for word in ("attn_q", "ssm_", "attn_k", "attn_output")):
                assert part == LayerPart(part.layer, mixer=True, network=whole)
            if "ffn_" in tensor and "norm" not in tensor:
                assert part == LayerPart(part.layer, mixer=whole, network=True)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ffn_up", "must be REGEX=DEVICE"),
        ("=CPU", "must be REGEX=DEVICE"),
        ("ffn=TPU", "must be REGEX=DEVICE"),
        ("ffn_(=CPU", "is no regular expression"),
        ("ffn_up=CPU", "the tensors of the network of layer 0 stay together, and blk.0.ffn_up.weight"),
        ("blk.1.attn_q=CPU", "the tensors of the mixer of layer 1 stay together"),
        ("nothing=CPU", "no tensor of m.gguf has a name that 'nothing' matches"),
    ],
)
def test_overrides_that_are_refused(text: str, sentence: str, folder: Path) -> None:
    config, gguf = config_of("dense", folder)
    with pytest.raises(UsageError) as caught:
        Division(overrides=parse_overrides(text)).placement(config, gguf, GPU, CPU)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("name", ["dense", "hybrid mixture"])
def test_as_much_as_fits(name: str, folder: Path) -> None:
    """The largest placement that fits is chosen: experts leave the GPU before layers do."""
    config, gguf = config_of(name, folder)

    def held(placement: Placement) -> int:
        return weight_bytes(config, gguf, placement)[GPU]

    whole, seen = held(Placement.whole(config, GPU)), []
    for limit in range(0, whole + 1, whole // 40):
        chosen = fitted(config, gguf, GPU, CPU, partial(_holds, held, limit))
        if chosen is not None:
            assert held(chosen) <= limit
            seen.append(where(chosen.mixers) + where(chosen.networks))
    assert seen and seen == sorted(seen, key=lambda each: each.count("G"))
    if name == "hybrid mixture":
        assert "GGGGCCCC" in seen and "CGGGCCCC" in seen


def _holds(held: Callable[[Placement], int], limit: int, placement: Placement) -> bool:
    return held(placement) <= limit


def test_what_a_placement_is_called(folder: Path) -> None:
    config, gguf = config_of("hybrid mixture", folder)
    told = describe(Division(3, 2).placement(config, gguf, GPU, CPU))
    assert (
        told == "layer 0 and the network of layer 1 on cpu; layers 2-3, the mixer of layer 1 and the output on cuda:0"
    )


@pytest.mark.usefixtures("divided")
def test_options_of_load(folder: Path) -> None:
    path = make_model(folder / "options.gguf", "tiny-llama", "Q8_0", seed=1)
    with pytest.raises(UsageError, match="numbers of layers"):
        engine.load(path, device="cpu", n_gpu_layers=-1)
    with pytest.raises(UsageError, match="numbers of layers"):
        engine.load(path, device="cpu", n_cpu_moe=-2)
    assert not engine.load(path, device="cpu", n_ctx=64, n_gpu_layers=99).model.stages
    llm = engine.load(path, device="cpu", n_ctx=64, n_gpu_layers=1, n_threads=1)
    assert [len(stage.parts) for stage in llm.model.stages] == [2 * llm.config.n_layer - 2, 2]
    assert llm.compile() >= 0.0
    assert llm.complete([1, 2, 3], max_tokens=3, ignore_eos=True).ids
