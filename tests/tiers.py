"""The tiers of tests.

``pytest``
    The quick tests: those without a mark that take less than ``SLOW`` seconds, according to ``tests/seconds.txt``, and the
    slow ones that are marked ``first``.
``pytest --rest``
    What ``.ci/run`` runs after it: the slow tests, and one in ``SAMPLE`` of the cases that are marked ``thorough``.  If the
    cases of a test take more than ``MOST`` seconds together, it runs as many as fit, unless the test is marked ``whole``.
``pytest --all``
    All tests that need no GPU: also all ``thorough`` cases, all combinations of parameters where the other tiers run each
    value or each pair of values once, and all examples of hypothesis.
``pytest --gpu``
    The tests marked ``gpu``, which need a GPU, or compile for targets that other runs skip, without their ``thorough`` cases.
    ``--part 1/3`` runs a third of them.
``pytest --gpu --all``
    All of these.

The tier of a test follows from its marks (``MARKS``), on the test or on a case (:func:`few`), from :func:`examples`, and from
the time it took when somebody last ran ``pytest --record``.
"""

import os
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

FEWER = 5
"""The first tier runs one in this many examples of hypothesis if there are many or each is expensive."""

SECONDS_FILE = Path(__file__).with_name("seconds.txt")
"""CPU seconds of the tests that take more than ``SLOW``, one line per test; ``pytest --record`` updates it."""

SLOW = 0.3
"""CPU seconds beyond which a test leaves the first tier."""

SAMPLE = 8
"""``--rest`` runs one in this many of the ``thorough`` cases of a test."""

MOST = 4.0
"""The most CPU seconds of the cases of a test that ``--rest`` runs, if there are several."""

MARKS = {
    "thorough": "runs with --all, and one in eight cases with --rest; on a GPU, with --gpu --all",
    "first": "runs in the first tier although it is slow",
    "whole": "all its cases run with --rest, however long they take",
    "gpu": "runs only with --gpu",
    "covering(n, m)": "runs as few combinations as contain every n values of different parameters; with --all those that "
    "contain every m values, if m is given",
    "more": "does more with --all, e.g. more examples of hypothesis",
    "both": "runs in the first tier and with --rest, because what it runs depends on the tier",
    "together(name)": "tests that one process runs, in order; by default those of a file",
    "recovers": "rounds of a scheduler may fail in it",
    "alone": "on a GPU, no other test runs at the same time, because it measures free memory",
    "begin(n)": "groups start in the order of n (default 0): long ones, and those that others wait for, first",
}


# Inputs are made more slowly beside other programs, which is no reason to fail.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


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
    return n if Tier.all else first


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
    group.addoption("--rest", action="store_true", help="run the slow tests, which a run without options skips")
    group.addoption("--gpu", action="store_true", help="run the tests that need a GPU, and print a table of them")
    group.addoption("--part", default="1/1", metavar="K/N", help="run the K-th of N parts of about equal duration")
    group.addoption("--record", action="store_true", help=f"write the time of slow tests to tests/{SECONDS_FILE.name}")
    group.addoption("--seconds", action="store_true", help="print the time that the tests of each folder and file took")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    Tier.all, Tier.rest, Tier.gpu = (bool(config.getoption(name)) for name in ("--all", "--rest", "--gpu"))
    if Tier.rest and (Tier.all or Tier.gpu):
        raise pytest.UsageError("--rest excludes --all and --gpu.")
    _part(config)
    if Tier.gpu:
        _share_cores(getattr(config, "workerinput", None))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell makes background jobs ignore the signal, and the processes that they start inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _share_cores(worker: dict[str, Any] | None) -> None:
    """Give each process of pytest-xdist its share of the cores, so that not all of them start a compiler for every core."""
    if worker and hasattr(os, "sched_setaffinity"):
        from engine.machine.cores import available_cores

        each = max(1, available_cores() // worker["workercount"])
        cores = sorted(os.sched_getaffinity(0))
        begin = int(worker["workerid"].removeprefix("gw")) * each
        os.sched_setaffinity(0, {cores[(begin + k) % len(cores)] for k in range(each)})


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


def _thinned(items: list[Any], argument: int) -> set[Any]:
    """The items without the combinations that tests marked ``covering`` may leave out by that argument of the mark."""
    tests = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("covering")
        if mark and len(mark.args) > argument:
            tests[item.nodeid.partition("[")[0], mark.args[argument]].append(item)
    left_out = (set(cases) - _covering(cases, strength) for (_, strength), cases in tests.items())
    return set(items).difference(*left_out)


def _by_test(items: Iterable[Any]) -> Iterator[list[Any]]:
    """The cases of each test, sorted by name."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    return (sorted(cases, key=lambda item: item.nodeid) for cases in tests.values())


def _sample(items: Iterable[Any]) -> set[Any]:
    """One in ``SAMPLE`` of the cases of each test."""
    return {item for cases in _by_test(items) for item in cases[::SAMPLE]}


def _affordable(items: Iterable[Any]) -> set[Any]:
    """The first case of each test and every n-th after it, with the smallest n such that they take at most ``MOST`` seconds;
    all cases of a test that is marked ``whole``."""
    chosen: set[Any] = set()
    for cases in _by_test(items):
        step = 1
        while step < len(cases) and sum(map(cost, cases[::step])) > MOST and not cases[0].get_closest_marker("whole"):
            step += 1
        chosen.update(cases[::step])
    return chosen


@cache
def recorded() -> dict[str, float]:
    """CPU seconds by the names of tests, of those that take more than ``SLOW``."""
    lines = SECONDS_FILE.read_text(encoding="utf-8").splitlines() if SECONDS_FILE.exists() else []
    pairs = (line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(seconds) for seconds, name in pairs}


def _name(nodeid: str) -> str:
    """The name of a test in the file of seconds, on one line."""
    return nodeid.encode("unicode_escape").decode()


def cost(item: Any) -> float:
    """The CPU seconds that a test took when that was recorded; half of ``SLOW`` if it took less than that."""
    return recorded().get(_name(item.nodeid), SLOW / 2)


def _part(config: pytest.Config) -> tuple[int, int]:
    """(k, n) of ``--part k/n``.  Raises UsageError if it is none."""
    k, _, n = config.getoption("--part").partition("/")
    if not (k.isdigit() and n.isdigit() and 1 <= int(k) <= int(n)):
        raise pytest.UsageError("--part takes K/N with K from 1 to N, for example 1/3.")
    return int(k), int(n)


def _group(item: Any) -> str:
    """The tests that one process runs."""
    together, alone = item.get_closest_marker("together"), item.get_closest_marker("alone")
    return "alone" if alone else str(together.args[0]) if together else str(item.location[0])


def _costs(items: Iterable[Any]) -> dict[str, float]:
    """The CPU seconds of each group."""
    total: dict[str, float] = defaultdict(float)
    for item in items:
        total[_group(item)] += cost(item)
    return total


def parts(costs: dict[str, float], n: int) -> list[set[str]]:
    """Groups in n parts of about equal seconds: the most expensive one that is left joins the cheapest part."""
    shares: list[tuple[float, set[str]]] = [(0.0, set()) for _ in range(n)]
    for group, seconds in sorted(costs.items(), key=lambda pair: (-pair[1], pair[0])):
        k = min(range(n), key=lambda k: shares[k][0])
        shares[k] = shares[k][0] + seconds, shares[k][1] | {group}
    return [groups for _, groups in shares]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = {item for item in items if item.get_closest_marker("gpu")}
    if Tier.gpu:
        chosen = {item for item in on_gpu if Tier.all or not item.get_closest_marker("thorough")}
    else:
        candidates = [item for item in items if item not in on_gpu]
        chosen = _thinned(candidates, 1)
        if not Tier.all:
            usual = _thinned([item for item in candidates if not item.get_closest_marker("thorough")], 0)
            first = {item for item in usual if cost(item) <= SLOW or item.get_closest_marker("first")}
            if Tier.rest:
                first = {item for item in first if not item.get_closest_marker("both")}
                chosen = _affordable(usual - first | _sample(chosen - usual))
            else:
                chosen = first
    k, n = _part(config)
    costs = _costs(item for item in items if item in chosen)
    groups = parts(costs, n)[k - 1]
    chosen = {item for item in chosen if _group(item) in groups}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted((item for item in items if item in chosen), key=lambda item: _place(item, costs))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _place(item: pytest.Item, costs: dict[str, float]) -> tuple[int, float, str]:
    """Where a test stands in the order: the longest groups first, so that no process works alone at the end."""
    mark = item.get_closest_marker("begin")
    place = LAST if item.get_closest_marker("alone") else mark.args[0] if mark else 0
    return place, -costs[_group(item)], _group(item)


LAST = 9


@pytest.fixture(autouse=True)
def _exclusive(request: pytest.FixtureRequest) -> Iterator[None]:
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
    if not hasattr(terminalreporter, "stats"):
        return
    reports = [r for rs in terminalreporter.stats.values() for r in rs if hasattr(r, "duration")]  # not collections
    if config.getoption("--record"):
        record(reports)
    if config.getoption("--seconds") or Tier.gpu:
        terminalreporter.section("seconds by room", sep="-")
        for line in table(reports):
            terminalreporter.write_line(line)


def record(reports: Iterable[Any]) -> None:
    """Write the CPU seconds of tests that take more than ``SLOW``, and forget those of others that have run."""
    spent: dict[str, float] = defaultdict(float)
    for report in reports:
        # pytest-xdist appends the group to the name, after the parameters.
        nodeid = report.nodeid if report.nodeid.endswith("]") else report.nodeid.partition("@")[0]
        nodeid = nodeid if nodeid.endswith("]") or "[" not in nodeid else report.nodeid.rpartition("@")[0]
        spent[_name(nodeid)] += sum(seconds for what, seconds in report.user_properties if what == "cpu")
    kept = {name: seconds for name, seconds in recorded().items() if name not in spent}
    kept |= {name: seconds for name, seconds in spent.items() if seconds > SLOW}
    head = f"# CPU seconds of the tests that take more than {SLOW} s, by pytest --record (docs/testing.md).\n"
    lines = [f"{seconds:.1f} {name}\n" for name, seconds in sorted(kept.items())]
    SECONDS_FILE.write_text(head + "".join(lines), encoding="utf-8")


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
