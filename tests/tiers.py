"""The tiers of tests.

``pytest``
    Every test without a mark; each kernel, format, shape and cache type at least once.  Six to 17 minutes
    on two cores with cold caches.
``pytest --all``
    Also the tests marked ``thorough``: all combinations of parameters, where the first tier runs each value, or each pair of
    values, once, but a third of them in the simulator; all examples of hypothesis; kernels with more of their constants.  16
    to 30 minutes on two cores.
``pytest --rest``
    The tests of ``--all`` that ``pytest`` does not run, to be run after it.
``pytest --gpu``
    The tests marked ``gpu``, which need a GPU, or compile for targets that other runs skip.  Five minutes on 16 cores.

The tier of a test follows from its marks (``MARKS``), on the test or on a case (:func:`few`), or from :func:`examples`.
"""

import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any

import pytest
from hypothesis import settings

FEWER = 5
"""The first tier runs one in this many examples of hypothesis if there are many or each is expensive."""

MARKS = {
    "thorough": "runs with --all, not in the first tier",
    "gpu": "runs only with --gpu",
    "covering(n, m)": "the first tier runs as few combinations as contain every n values of different parameters, and "
    "--all those that contain every m values, if m is given",
    "more": "does more with --all, e.g. more examples of hypothesis",
    "together(name)": "tests that one process runs, in order; by default those of a file",
    "alone": "on a GPU, no other test runs at the same time, because it measures free memory",
    "begin(n)": "groups start in the order of n (default 0): long ones, and those that others wait for, first",
}


class Tier:
    """The options of the command line that select tests."""

    all = rest = gpu = False

    @classmethod
    def words(cls) -> list[str]:
        """The options that select the same tests in another process."""
        return [f"--{name}" for name in ("all", "rest", "gpu") if getattr(cls, name)]


def few(cases: Iterable[Any], n: int = 1) -> list[Any]:
    """Mark the cases of a parameter so that the first tier runs only the first n."""
    first, others = (cases := list(cases))[:n], cases[n:]
    values = [case if isinstance(case, tuple) else (case,) for case in others]
    return first + [pytest.param(*case, marks=pytest.mark.thorough) for case in values]


def together(name: str, cases: Iterable[Any], n: int = 0) -> list[Any]:
    """Mark the cases of a parameter so that one process runs all cases with the same name and the same values, or the same
    first n values if n is not 0."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*v, marks=pytest.mark.together(" ".join(map(str, (name, *v[: n or len(v)]))))) for v in values]


def amount(n: int, first: int) -> int:
    """The amount of work of a test marked ``more``: n with --all, ``first`` in the first tier."""
    return n if Tier.all or Tier.rest else first


def examples(n: int, first: int = 0, **options: Any) -> Callable[[Any], Any]:
    """A decorator for a test of hypothesis with n examples, or ``first`` in the first tier (default: a fifth, at least
    five)."""
    first = first or min(n, max(n // FEWER, 5))

    def decorate(test: Any) -> Any:
        test = settings(deadline=None, max_examples=amount(n, first), **options)(test)
        return pytest.mark.more(test) if first < n else test

    return decorate


# --- what is collected -----------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--all", action="store_true", help="run all tests that need no GPU")
    group.addoption("--rest", action="store_true", help="run the tests of --all that a run without options skips")
    group.addoption("--gpu", action="store_true", help="run the tests that need a GPU, and print a table of them")
    group.addoption("--seconds", action="store_true", help="print the time that the tests of each folder and file took")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    Tier.all, Tier.rest, Tier.gpu = (bool(config.getoption(name)) for name in ("--all", "--rest", "--gpu"))
    if Tier.all + Tier.rest + Tier.gpu > 1:
        raise pytest.UsageError("--all, --rest and --gpu exclude each other.")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell makes background jobs ignore the signal, and the processes that they start inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _covering(items: list[Any], strength: int) -> set[Any]:
    """Select few cases of a test such that any ``strength`` values of different parameters occur together in one of them.

    The algorithm is greedy: it next takes the case with the most combinations that are still missing.
    """

    def pairs(item: Any) -> set[Any]:
        given = dict(item.callspec.params)
        parameters = []
        for mark in item.iter_markers("parametrize"):
            # The names of one parametrize count as one parameter.
            names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
            parameters.append(tuple((name, id(given.pop(name))) for name in names))
        parameters += [((name, id(value)),) for name, value in given.items()]  # of fixtures
        return set(combinations(sorted(parameters), strength))

    missing = set().union(*map(pairs, items))
    chosen = set()
    while missing:
        best = max(items, key=lambda item: len(pairs(item) & missing))
        chosen.add(best)
        missing -= pairs(best)
    return chosen


def _in_first_tier(items: list[Any]) -> set[Any]:
    return _thinned([item for item in items if not item.get_closest_marker("thorough")], 0)


def _thinned(items: list[Any], argument: int) -> set[Any]:
    """The items without the combinations that tests marked ``covering`` may leave out by that argument of the mark."""
    tests = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("covering")
        if mark and len(mark.args) > argument:
            tests[item.nodeid.partition("[")[0], mark.args[argument]].append(item)
    left_out = (set(cases) - _covering(cases, strength) for (_, strength), cases in tests.items())
    return set(items).difference(*left_out)


def _every_third(items: set[Any]) -> set[Any]:
    """The items with a third of the cases of each test in the simulator, but for those of whole models: it is slow, each
    kernel, format and shape is in the first tier, and ``--gpu`` tests the same kernels on a GPU."""
    tests = defaultdict(list)
    for item in items:
        if "simulated" in item.path.parts and item.path.name != "test_parity.py":
            tests[item.nodeid.partition("[")[0]].append(item)
    kept = {item for cases in tests.values() for item in sorted(cases, key=lambda item: item.nodeid)[::3]}
    return items.difference(*tests.values()) | kept


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = {item for item in items if item.get_closest_marker("gpu")}
    if Tier.gpu:
        chosen = on_gpu
    else:
        candidates = [item for item in items if item not in on_gpu]
        first = _in_first_tier(candidates)
        chosen = first
        if Tier.all or Tier.rest:
            chosen = _every_third(_thinned(candidates, 1) - first) | first
        if Tier.rest:
            chosen -= {item for item in first if not item.get_closest_marker("more")}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted((item for item in items if item in chosen), key=_place)
    for item in items:
        together = item.get_closest_marker("together")
        alone = item.get_closest_marker("alone")
        name = "alone" if alone else together.args[0] if together else item.location[0]
        item.add_marker(pytest.mark.xdist_group(name))


def _place(item: pytest.Item) -> int:
    mark = item.get_closest_marker("begin")
    return LAST if item.get_closest_marker("alone") else mark.args[0] if mark else 0


LAST = 9


@pytest.fixture(autouse=True)
def _company(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU, make a test that is marked ``alone`` wait for all running tests, and the others wait for it."""
    if not Tier.gpu:
        yield
        return
    import fcntl

    run = getattr(request.config, "workerinput", {}).get("testrunuid", "")
    with open(os.path.join(tempfile.gettempdir(), f"bitmirror-{run}.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        yield


# --- how long it took ------------------------------------------------------------------------------------------


def _spent() -> float:
    times = os.times()
    return sum(times[:4])


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Record the CPU seconds since the last report of this process, including those of its children."""
    now, before = _spent(), item.config.stash.get(SPENT, 0.0)
    item.config.stash[SPENT] = now
    item.user_properties.append(("cpu", now - before))
    yield
    item.user_properties.pop()


SPENT: pytest.StashKey[float] = pytest.StashKey()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not (config.getoption("--seconds") or Tier.gpu) or not hasattr(terminalreporter, "stats"):
        return
    reports = [r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "duration")]  # not collections
    terminalreporter.section("seconds by room", sep="-")
    for line in table(reports):
        terminalreporter.write_line(line)


def table(reports: Iterable[Any]) -> Iterator[str]:
    """The lines of a table with the numbers of passed, failed and skipped tests, elapsed seconds and CPU seconds: by folder,
    by file, and on a GPU by test function."""
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    for report in reports:
        name = report.nodeid.partition("[")[0].partition("@")[0]
        file = name.partition("::")[0]
        for key in {file.rpartition("/")[0] + "/", file, name if Tier.gpu else file}:
            row = rows[key]
            if report.when == "call" or report.skipped or report.failed:
                row[("passed", "failed", "skipped").index(report.outcome)] += 1
            row[3] += report.duration
            row[4] += sum(seconds for what, seconds in report.user_properties if what == "cpu")
    yield f"{'':64} {'passed':>7} {'failed':>7} {'skipped':>7} {'clock s':>8} {'CPU s':>8}"
    for key, (passed, failed, skipped, clock, cpu) in sorted(rows.items()):
        yield f"{key:64} {passed:7.0f} {failed:7.0f} {skipped:7.0f} {clock:8.1f} {cpu:8.1f}"
