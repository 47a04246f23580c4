"""How long the host sleeps before it looks for a result."""

from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.runtime.nap import POLL_SECONDS, SHARE, Nap


def waited(nap: Nap, now: float, ready: float) -> tuple[float, int]:
    """When a result that is there at ``ready`` has been seen, and how often the host looked."""
    if ready <= now:
        return now, 1
    now, looks = now + nap.seconds(now), 2
    while now < ready:
        now, looks = now + POLL_SECONDS, looks + 1
    nap.came(now)
    return now, looks


def test_few_looks_at_equal_intervals() -> None:
    nap, now, looks = Nap(), 0.0, 0
    for i in range(1, 101):
        now, looks = waited(nap, now, i * 3e-3)
    assert 100 * 3e-3 <= now <= 100 * 3e-3 + POLL_SECONDS
    assert looks <= 1 + (1 - SHARE) * 3e-3 / POLL_SECONDS + 2


def test_a_shorter_interval_is_learned_soon() -> None:
    nap, now = Nap(), 0.0
    for i in range(1, 101):
        now, _ = waited(nap, now, i * 3e-3)
    late = []
    for i in range(1, 21):
        ready = 0.3 + i * 1e-3
        now, _ = waited(nap, max(now, 0.3), ready)
        late.append(now - ready)
    assert late[0] < 1.3e-3  # the first sleep was made for 3 ms
    assert all(each <= 2 * POLL_SECONDS for each in late[10:])


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50))
def test_the_sleep_is_shorter_than_the_latest_interval(gaps: list[float]) -> None:
    """Whatever happened before, a result is not missed for longer than the one before it took."""
    nap, now = Nap(), 0.0
    for gap in gaps:
        before = now
        now += gap
        nap.came(now)
        assert nap.seconds(now) <= max(POLL_SECONDS, SHARE * (now - before))
