"""A model whose layers are divided between several devices has the bits of the whole model, wherever it is cut: logits, what
is stored, drafts, answers, and rows of many sequences.  Here every device is a backend of the CPU, which computes a pass at
once; ``tests/cuda/simulated/test_relay.py`` has simulated GPUs."""

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
from engine.devices import parse_devices
from engine.errors import UsageError
from engine.gguf.file import read_gguf
from engine.models import base, registry
from engine.models.division import Division, parse_overrides
from engine.models.layer_split import layer_split, parse_split
from engine.models.placement import LayerPart, Placement, parts_of
from engine.models.relay import RelayedPass
from engine.synthetic.model import make_model
from tests.models.test_mixed_passes import KINDS, files
from tests.models.test_stages import facts, loaded
from tests.tiers import examples

EXPECTED: dict[str, list[bytes]] = {}


def possible(config: Any) -> list[LayerPart]:
    """The parts with which a device may begin: no mixer after them reads the memory of a layer before them."""
    parts = [part for il in range(config.n_layer) for part in parts_of(config, il)]

    def is_cut(i: int) -> bool:
        mixers = [part.layer for part in parts[i:] if part.mixer]
        sources = [config.layers[il].mixer.memory_source for il in mixers]
        return all(source is None or source in mixers for source in sources)

    return [parts[i] for i in range(1, len(parts)) if is_cut(i)]


def relayed(patch: pytest.MonkeyPatch, chosen: list[int], rows: int) -> None:
    """Divide the next models at the parts with these numbers, modulo their number, in slices of this many rows."""

    def placement(config: Any, *rest: Any) -> tuple[Placement, bool]:
        parts = possible(config)
        cuts = sorted({number % len(parts) for number in chosen})
        devices: list[Any] = [Backend(1, 64) for _ in range(len(cuts) + 1)]
        return Placement.in_turn(config, devices, [parts[i] for i in cuts]), False

    patch.setattr(loading, "_placement", placement)
    patch.setattr(base, "SLICE", rows)


@pytest.mark.first
@examples(10, 4)
@given(data=st.data())
def test_a_cut_anywhere(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "anywhere"
    folder.mkdir(exist_ok=True)
    name = data.draw(st.sampled_from(sorted(KINDS)))
    expected = EXPECTED.setdefault(name, list(facts(loaded(name, folder))))
    with pytest.MonkeyPatch.context() as patch:
        chosen = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))
        relayed(patch, chosen, data.draw(st.sampled_from([16, 17, 40, 512])))
        llm = loaded(name, folder)
    relay: Any = llm.model.relay
    assert relay is not None and len({stage.ops for stage in relay.stages}) == len(relay.stages) > 1
    assert list(facts(llm)) == expected


@pytest.mark.parametrize("name", ["dense", "hybrid", "mixture", "hybrid mixture", "gemma4"])
def test_four_devices(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(facts(loaded(name, tmp_path)))
    relayed(monkeypatch, [0, 1, -1], 16)
    llm = loaded(name, tmp_path)
    assert len(llm.model.devices) == 4
    assert list(facts(llm)) == expected


@pytest.mark.parametrize("name", ["hybrid", "gemma4", "eagle3", "dflash"])
@pytest.mark.parametrize("cuts", [[1], [0, 1, -1]], ids=["two devices", "four devices"])
def test_answers_with_drafts(name: str, cuts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = files(name, tmp_path) | {"n_threads": 1}
    whole = engine.load(**given)
    relayed(monkeypatch, cuts, 16)
    llm = engine.load(**given)
    assert len(llm.model.devices) == len(cuts) + 1 and llm.model.relay is not None and llm.draft is not None
    prompt = np.random.default_rng(5).integers(0, llm.config.n_vocab - 3, 30).tolist()
    for temperature in (0.0, 0.9):
        options: dict[str, Any] = {"max_tokens": 12, "temperature": temperature, "seed": 4, "ignore_eos": True}
        plain = whole.complete(prompt, speculation=engine.SpeculationParams(enabled=False), **options)
        drafted = llm.complete(prompt, speculation=engine.SpeculationParams(draft_max=3), **options)
        assert drafted.ids == plain.ids and drafted.speculation is not None and drafted.speculation.drafted > 0


def test_slices_of_a_prompt_are_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first device gets the second slice before the last one has the first; what was sent is given up on an error."""
    relayed(monkeypatch, [1, 3], 16)
    llm = engine.load(**files("dense", tmp_path), n_threads=1)
    model: Any = llm.model
    tokens, positions = np.arange(40, dtype=np.int32), np.arange(40, dtype=np.int32)
    passing = model.split(tokens, positions, 1, model.sequence)
    assert isinstance(passing, RelayedPass) and passing.pieces == 9
    assert [passing.advance(count) for count in (1, 4, 99)] == [8, 4, 0]
    logits = passing.logits(wait=True)
    assert logits is not None and logits.shape == (1, llm.config.n_vocab)

    def broken(*rest: Any) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(model.stages[1].ops, "split", broken)
        passing = model.split(tokens, positions, 1, model.sequence)
        with pytest.raises(ZeroDivisionError):
            passing.advance(9)
    assert passing.advance(9) == 0
    passing = model.split(tokens, positions, 1, model.sequence)
    passing.advance(2)
    passing.cancel()
    assert not any(way._sent for way in model.relay.borders)
    assert model.forward(tokens, positions, 1, model.sequence).tobytes() == logits.tobytes()


# --- how layers are divided --------------------------------------------------------------------------------------


class Device:
    """A name for a backend."""

    def __init__(self, label: str) -> None:
        self.label = label


GPUS: list[Any] = [Device(f"cuda:{i}") for i in range(4)]
HOST: Any = Device("cpu")


def split(name: str, folder: Path, shares: list[float], everything: bool = False) -> str:
    """The number of the device of each layer."""
    folder.mkdir(exist_ok=True)
    gguf = read_gguf(files(name, folder)["path_or_name"])
    config = registry.read_config(gguf)
    placement = layer_split(config, gguf, GPUS[: len(shares)], shares, everything)
    assert placement.mixers == placement.networks and placement.relayed
    assert placement.first is GPUS[0] and placement.last is GPUS[len(shares) - 1]
    return "".join(str(GPUS.index(ops)) for ops in placement.mixers)


def test_layers_are_divided_by_their_bytes(tmp_path: Path) -> None:
    assert split("hybrid mixture", tmp_path / "a", [1, 1]) == "0011"
    assert split("hybrid mixture", tmp_path / "a", [3, 1]) == "0001"
    assert split("hybrid mixture", tmp_path / "a", [1, 1000]) == "0111"
    assert split("hybrid mixture", tmp_path / "a", [1000, 1, 1]) == "0012"
    assert split("hybrid mixture", tmp_path / "a", [1, 1, 1, 1]) == "0123"
    # The embedding and the output of this model are larger than its layers.
    assert split("dense", tmp_path / "b", [1, 1], True) == split("dense", tmp_path / "b", [1, 1])
    assert split("dense", tmp_path / "b", [1, 3], True) == "0111"[: len(split("dense", tmp_path / "b", [1, 1]))]


def test_parts_on_the_cpu_beside_several_gpus(tmp_path: Path) -> None:
    """They do not count when the other parts are divided."""
    gguf = read_gguf(files("hybrid mixture", tmp_path)["path_or_name"])
    config = registry.read_config(gguf)

    def where(division: Division) -> tuple[str, str, str]:
        kept = division.placement(config, gguf, GPUS[1], HOST)
        elsewhere = [part for part, ops in kept.parts(config) if ops is HOST]
        split = layer_split(config, gguf, GPUS[:2], [1, 1], elsewhere=elsewhere)
        found = division.beside(config, gguf, split, HOST)
        assert found.first is HOST and not found.relayed
        columns = (found.mixers, found.networks, [found.last])
        names = ("".join("C" if ops is HOST else ops.label[-1] for ops in column) for column in columns)
        return next(names), next(names), next(names)

    assert where(Division(n_cpu_moe=2)) == ("0001", "CC01", "1")
    assert where(Division(2)) == ("CC01", "CC01", "1")
    assert where(Division(3, 2)) == ("C001", "CC01", "1")
    assert where(Division(overrides=parse_overrides("^output=cpu,ffn=cpu"))) == ("0011", "CCCC", "C")


def test_layers_that_share_keys_stay_together(tmp_path: Path) -> None:
    gguf = read_gguf(files("gemma4", tmp_path)["path_or_name"])
    config = registry.read_config(gguf)
    sources = [layer.mixer.memory_source for layer in config.layers]
    for share in (1, 3, 1000):
        placement = layer_split(config, gguf, GPUS[:2], [share, 1])
        for il, source in enumerate(sources):
            assert source is None or placement.mixers[il] is placement.mixers[source]
    with pytest.raises(UsageError, match=r"^m.gguf can be divided into at most \d parts, and 4 devices are named"):
        layer_split(config, gguf, GPUS, [1, 1, 1, 1])


def test_a_placement_in_words(tmp_path: Path) -> None:
    gguf = read_gguf(files("hybrid mixture", tmp_path)["path_or_name"])
    placement = layer_split(registry.read_config(gguf), gguf, GPUS[:2], [3, 1])
    assert describe(placement) == "layers 0-2 on cuda:0; layer 3 and the output on cuda:1"


@pytest.mark.parametrize(
    ("text", "n", "sentence"),
    [
        ("3,1", 1, "tensor_split says which part of a model each of several GPUs has"),
        ("3", 2, "tensor_split must be 2 numbers, one for each device, such as 3,1, not '3'"),
        ("3,1,1", 2, "must be 2 numbers"),
        ("3,x", 2, "must be 2 numbers"),
        ("0,0", 2, "must be 2 numbers"),
        ("-1,2", 2, "must be 2 numbers"),
        ("nan,2", 2, "must be 2 numbers"),
    ],
)
def test_wrong_shares(text: str, n: int, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_split(text, n)
    assert parse_split("", n) == () and parse_split("0,1.5", 2) == parse_split("0/1.5", 2) == (0, 1.5)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ("cuda:0,cpu", "several devices are GPUs by number"),
        ("cuda:0,auto", "several devices are GPUs by number"),
        ("cuda,cuda:0", "names a GPU twice"),
        ("cuda:0,gpu1", "device 'gpu1' is unknown"),
        ("cuda:0,", "device '' is unknown"),
        ("cuda:1,2", "device .2. is unknown"),
    ],
)
def test_wrong_devices(names: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_devices(names)
    assert parse_devices("cuda:1,cuda:0") == ("cuda:1", "cuda:0") and parse_devices("auto") == ("auto",)


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.gguf", "tiny-llama", "Q8_0")
    with pytest.raises(UsageError, match="split_mode must be layer, tensor or none, not 'row'"):
        engine.load(path, device="cpu", split_mode="row")
    with pytest.raises(UsageError, match="tensor_split says which part"):
        engine.load(path, device="cpu", tensor_split="1,1")
    wrong: Any = [1, 1]
    with pytest.raises(UsageError, match='tensor_split is a text such as "3,1", not a list'):
        engine.load(path, device="cpu", tensor_split=wrong)
