"""Which answers share a pass."""

from collections.abc import Sequence

from engine.decode.request import Request
from engine.limits import STEP_ROWS


def next_group(running: Sequence[Request]) -> list[Request]:
    """The answers of the next pass: of those that have the fewest steps in flight, the ones whose turn was the longest time
    ago; none if all must wait.

    Answers are divided into as few groups as possible, which take turns.  A group stays together: it waits until all of its
    answers have as many steps in flight, since a pass of few rows takes almost as long as one of many.
    """
    groups: list[list[Request]] = []
    shared: dict[int, list[Request]] = {}
    for request in running:
        if not adapts(request) or request.failures:
            # How many drafts there are must not depend on the others; and a pass that has failed may have failed because of
            # any of its answers, which passes of their own show.
            groups.append([request])
            continue
        kind = id(request.steps)
        if kind not in shared or len(shared[kind]) == STEP_ROWS:
            shared[kind] = []
            groups.append(shared[kind])
        shared[kind].append(request)
    ready = [group for group in groups if len(_in_flight(group)) == 1]
    return min(ready, key=lambda group: (min(_in_flight(group)), group[0].turn), default=[])


def adapts(request: Request) -> bool:
    """Whether the number of drafts of an answer may depend on time and load."""
    run = request.run
    return run is None or run.speculation is None or run.speculation.adapts


def _in_flight(group: Sequence[Request]) -> set[int]:
    """The numbers of steps that answers have in flight."""
    return {len(request.run.started) for request in group if request.run is not None}
