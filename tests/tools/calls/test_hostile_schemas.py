"""Whatever the schema of a tool, its format makes a grammar of it, or one sentence says why it cannot."""

import random

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from engine.tools.calls.function import Function
from engine.tools.calls.schemas import pruned
from tests.hostile_schemas import BOMBS, rendered, tried
from tests.tiers import few
from tests.tools.calls.walks import MODELS, Model

pytestmark = pytest.mark.together("serving")


def assert_sentence(said: str) -> None:
    """A message that may be printed anywhere."""
    assert len(said) < 300 and said.isprintable()


@pytest.mark.parametrize("seed", few(range(0, 20_000, 500)))
def test_random_schemas(seed: int) -> None:
    said = [tried(random.Random(each)) for each in range(seed, seed + 500)]
    for each in said:
        assert_sentence(each)
    assert said.count("source") > 300


@pytest.mark.parametrize("seed", few(range(0, 4000, 200)))
def test_templates_of_tools(seed: int) -> None:
    said = [rendered(random.Random(each)) for each in range(seed, seed + 200)]
    for each in said:
        assert_sentence(each)
    assert said.count("text") > 100


@pytest.mark.parametrize(
    ("bomb", "model", "strict"),
    few(
        [
            (bomb, model, strict)
            for strict in (True, False)
            for model in sorted(MODELS, key=lambda model: (not model.tags, model.format != "gemma4"))
            for bomb in BOMBS
        ],
        len(BOMBS),
    ),
    ids=str,
)
def test_schemas_that_stand_for_more_than_they_say(bomb: str, model: Model, strict: bool) -> None:
    assert_sentence(tried(random.Random(0), Function("f", pruned(BOMBS[bomb]), strict), model))


@pytest.mark.parametrize("model", [model for model in MODELS if model.tags], ids=str)
def test_a_keyword_of_a_wrong_type_is_named(model: Model) -> None:
    function = Function("f", {"type": "object", "properties": {"p": {"type": 5}}}, strict=True)
    said = tried(random.Random(0), function, model)
    if model.format in ("gemma4", "qwen3_coder", "glm", "seed_oss", "minimax"):
        assert said == "the function has a schema whose type must be the name of a type or a list of names, not 5"
    else:
        assert said == "source"  # as JSON, about which llguidance says what is wrong
