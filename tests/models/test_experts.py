"""The description of mixtures: which law of the choice they have, and which combinations are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ModelError
from engine.gguf.file import read_gguf
from engine.models.registry import read_config
from engine.ops.activation import KINDS, Activation
from engine.ops.experts import Experts, Routing
from tests.oracle.families.family import Family
from tests.oracle.models import CASES, write_gguf

FLOOR = 2.0**-14
BIAS, TABLE = np.zeros(8, np.float32), np.zeros((3, 2), np.int32)


def experts(**given: Any) -> Experts[Any, Any]:
    usual: dict[str, Any] = {"n_expert": 8, "n_used": 2, "router": "r", "gate": "g", "up": "u", "down": "d"}
    return Experts(**usual | given)


@pytest.mark.parametrize(
    ("given", "law"),
    [
        ({}, Routing()),
        ({"router_bias": BIAS, "weight_scale": 2.5}, Routing(biased=True, weight_scale=2.5)),
        ({"normalized": False}, Routing("softmax", normalized=False)),
        ({"selection_bias": BIAS}, Routing("softmax", selected=True, floor=FLOOR)),
        ({"gating": "sigmoid", "floor": 1e-20}, Routing("sigmoid", floor=1e-20)),
        ({"gating": "sqrt_softplus", "normalized": False}, Routing("sqrt_softplus", normalized=False)),
        (
            {"gating": "sigmoid", "n_group": 4, "n_group_used": 2},
            Routing("sigmoid", floor=FLOOR, n_group=4, n_group_used=2),
        ),
        # All groups are no restriction, and a table leaves nothing to choose.
        ({"n_group": 4, "n_group_used": 4}, Routing()),
        ({"given": TABLE, "selection_bias": BIAS}, Routing("softmax", floor=FLOOR, tabled=True)),
    ],
)
def test_the_law_of_the_choice(given: dict[str, Any], law: Routing) -> None:
    assert experts(**given).routing == law


@pytest.mark.parametrize(
    "given",
    [
        {"gating": "tanh"},
        {"n_used": 9},
        {"n_expert": 64, "n_used": 33},
        {"gate": None},
        {"activation": Activation("relu2")},
        {"shared": (None, "u", "d")},
        {"n_group": 3},
        {"n_group": 8, "n_group_used": 1},
        {"n_group": 2, "n_group_used": 3},
        {"n_expert": 128, "n_group": 64, "n_group_used": 8},
        {"gate_bias": BIAS},
        {"up_scale": BIAS},
        {"weighs_inputs": True, "gate_bias": BIAS, "up_bias": BIAS},
    ],
)
def test_what_no_law_describes(given: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="experts with .* are not supported"):
        experts(**given)


def test_the_name_of_a_law_has_what_differs() -> None:
    assert str(Routing()) == "Routing()"
    assert str(Routing("sigmoid", selected=True)) == "Routing(gating=sigmoid, selected=True)"


def test_activations() -> None:
    for kind, (gated, n) in KINDS.items():
        activation = Activation(kind, (0.5,) * n)
        assert activation.gated == gated and activation.numbers == (0.5,) * n + (0.0,) * (4 - n)
        with pytest.raises(ModelError, match=f"{kind} takes {n} parameters, not 5"):
            Activation(kind, (0.5,) * 5)
    with pytest.raises(ModelError, match="'erf'.*use a model with one of: swiglu, geglu"):
        Activation("erf")


def test_experts_may_differ_from_block_to_block(tmp_path: Path) -> None:
    """As in models that were pruned block by block, whose files have lists."""
    case = CASES["nemotron_h_moe"]
    assert isinstance(case, Family)

    def networks(number: int, **lists: list[int]) -> list[Any]:
        given = replace(case, metadata={**case.metadata, **lists})
        return [
            layer.network for layer in read_config(read_gguf(write_gguf(given, tmp_path / f"{number}.gguf"))).layers
        ]

    plain = networks(0)
    assert [network.exists for network in plain] == [False, True, False, False, True]
    lists = {"expert_used_count": [0, 3, 0, 0, 3], "expert_feed_forward_length": [0, 40, 0, 0, 40]}
    assert networks(1, **lists) == plain
    found = networks(2, expert_used_count=[0, 3, 0, 0, 2], expert_feed_forward_length=[0, 40, 0, 0, 24])
    assert found == [*plain[:4], replace(plain[4], n_used=2, n_ff=24)]
