"""Trials: what is tried with a client, and what comes of it."""

from collections.abc import Callable
from typing import NamedTuple

from tests.clients.case import Case
from tests.clients.nudges import nudge, results
from tests.clients.recorder import Exchange, recording


class Trial(NamedTuple):
    """One thing to try.

    name: what it is; run: does it, and raises an error if something is wrong; called: whether the client must run a
    function; brief: whether the answers of a small model are kept short, for clients that set no limit.
    """

    name: str
    run: Callable[[Case], None]
    called: bool = True
    brief: bool = False


class Failed(Exception):
    """What is wrong, in a sentence."""


def tried(trial: Trial, case: Case) -> str:
    """Run a trial; gives what came of it.  Raises Failed if the server answered with an error, or the client saw one."""
    url = case.url
    with recording(url, lambda exchange: nudge(exchange, case.end if trial.brief else None)) as (case.url, exchanges):
        try:
            trial.run(case)
        except Exception as error:  # whatever a client raises
            raise Failed(f"{type(error).__name__}: {error}{_refusals(exchanges)}") from error
        finally:
            case.url = url
    if refusals := _refusals(exchanges):
        raise Failed(refusals)
    if not exchanges:
        raise Failed("no request came")
    both = sum(exchange.both for exchange in exchanges)
    n_results = sum(results(exchange.body) > 0 for exchange in exchanges)
    if trial.called and not (case.calls or n_results):
        raise Failed("the client ran no function")
    asked = sum(exchange.asks for exchange in exchanges)
    counts = f"requests: {asked}, with functions and a schema: {both}, with results of functions: {n_results}"
    return f"{counts}, valid answers: {len(case.answers)}"


def _refusals(exchanges: list[Exchange]) -> str:
    """The requests that failed."""
    failed = [each for each in exchanges if each.status >= 400 or each.status == 0]
    return "".join(f"\n    {each.method} {each.path}: {each.status} {each.error[:400]}" for each in failed)
