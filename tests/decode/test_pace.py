"""How much of prompts is read beside answers, from times that were measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.decode.pace import MOST_SECONDS, SHARE, Pace

STEP, PIECE, TOTAL = 0.003, 0.0002, 200
"""Seconds of a step and of a piece of a part of 1024 tokens, and the number of its pieces."""


def learned() -> Pace:
    """A pace that knows the times of steps and pieces."""
    pace = Pace()
    pace.stepped(STEP, pace.started())
    for _ in range(10):
        pace.read(1024, count := pace.pieces(1024, TOTAL, pace.share(1, 1)))
        pace.stepped(STEP + count * PIECE, pace.started())
    return pace


def test_one_prompt_gets_its_share() -> None:
    pace = learned()
    share = pace.share(1, 1)
    assert share == pytest.approx(SHARE * STEP)
    count = pace.pieces(1024, TOTAL, share)
    assert count * PIECE <= share < (count + 1) * PIECE
    pace.read(1024, count)
    assert not pace.has_time(1024, share)


def test_the_rest_of_a_share_goes_to_the_next_part() -> None:
    """A part whose last pieces take less than the share leaves time for pieces of the next one."""
    pace = learned()
    share = pace.share(1, 1)
    pace.read(1024, 5)
    assert pace.has_time(1024, share)
    assert (5 + pace.pieces(1024, TOTAL, share)) * PIECE <= share
    # The next step can still be told from what was read before it.
    before = pace.pieces(1024, TOTAL, share)
    pace.read(1024, before)
    pace.stepped(STEP + (5 + before) * PIECE, pace.started())
    assert pace.pieces(1024, TOTAL, share) == 5 + before


def test_a_part_of_unknown_time_is_begun_carefully_and_by_itself() -> None:
    pace = learned()
    share = pace.share(1, 1)
    assert pace.has_time(256, share)  # nothing else is read before this step
    pace.read(1024, 1)
    assert not pace.has_time(256, share)
    pace.started()
    counts = []
    for _ in range(4):
        pace.read(256, count := pace.pieces(256, TOTAL, share))
        pace.stepped(STEP + count * PIECE, pace.started())
        counts.append(count)
    assert counts[0] == TOTAL // 32
    assert all(after <= 2 * before for before, after in zip(counts, counts[1:], strict=False))


def test_pieces_that_take_no_time() -> None:
    """They end while the host prepares the step that follows them.  When that changes, their times are found again."""
    pace = learned()

    def read(seconds: float) -> int:
        pace.read(1024, count := pace.pieces(1024, TOTAL, pace.share(1, 1)))
        pace.stepped(STEP + count * seconds, pace.started())
        return count

    assert [read(0.0) for _ in range(4000)][-1] == TOTAL
    share = pace.share(1, 1)
    counts = [read(PIECE) for _ in range(60)]
    assert counts[0] == TOTAL and counts[-1] == pytest.approx(share / PIECE, abs=2)


def test_several_prompts_have_precedence_up_to_a_bound() -> None:
    pace = learned()
    one = pace.share(1, 1)
    assert one < pace.share(2, 1) < pace.share(8, 1) < pace.share(64, 1) == MOST_SECONDS
    assert pace.share(64, 4) == MOST_SECONDS / 4  # all four groups wait
    pace.started()
    assert pace.share(1, 4) == one


def test_the_last_of_several_prompts_have_the_precedence_of_all() -> None:
    """Until the next step; or the others would take steps in which those that are read have no row."""
    pace = learned()
    shares = [pace.share(prompts, 1) for prompts in range(8, 0, -1)]
    assert len(set(shares)) == 1
    pace.started()
    assert pace.share(1, 1) < shares[0]


def test_parts_of_different_sizes_before_one_step() -> None:
    """Their times change by the same factor, since only the whole is known."""
    pace = learned()
    pace.read(256, 10)
    pace.stepped(STEP + 10 * 0.0001, pace.started())
    for _ in range(40):
        pace.read(256, 10)
        pace.read(1024, 10)
        pace.stepped(STEP + 10 * 2 * (PIECE + 0.0001), pace.started())
    pace.read(256, 10)
    pace.read(1024, 10)
    assert pace.has_time(1024, 10 * 2 * (PIECE + 0.0001) + 2.01 * PIECE)
    assert not pace.has_time(1024, 10 * 2 * (PIECE + 0.0001) + 1.99 * PIECE)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(1e-5, 1.0)), max_size=30), st.integers(1, 64), st.integers(1, 8)
)
def test_something_is_always_read(times: list[tuple[int, float]], prompts: int, groups: int) -> None:
    """Whatever was measured, a step is followed by at least one piece, and by no more than there are."""
    pace = Pace()
    for pieces, seconds in times:
        pace.read(1024, pieces)
        pace.stepped(seconds, pace.started())
    share = pace.share(prompts, groups)
    assert 1 <= pace.pieces(1024, TOTAL, share) <= TOTAL
    assert pace.has_time(1024, share)
    assert 1 <= pace.rows(100, 64, share) <= 64
    pace.read(512, 1)  # nobody knows how long it takes
    assert 1 <= pace.pieces(1024, TOTAL, share) <= TOTAL
