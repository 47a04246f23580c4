"""Receipts and scores of every mixer on the CPU: drafts and company do not show, and a replay verifies them."""

import pytest

import engine
from engine.trace.tracer import NAMES
from tests.receipts.mixers import MIXERS, check_receipts, check_scores, opened, receipts, write


@pytest.fixture(scope="module", params=MIXERS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> engine.LLM:
    return opened(write(tmp_path_factory.mktemp("models"), request.param), "cpu")


def test_receipts_of_a_mixer(llm: engine.LLM) -> None:
    check_receipts(llm, receipts(llm))


def test_scores_of_a_mixer(llm: engine.LLM) -> None:
    check_scores(llm)


def test_every_mixer_is_here() -> None:
    assert len(MIXERS) == len(NAMES)
