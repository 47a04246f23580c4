"""The flags of the numbers of sampling, with llama.cpp's names and defaults: those of ``run`` and ``serve``."""

from collections.abc import Callable
from typing import Any

from engine.cli.parser import real, whole


def add_sampling(add: Callable[..., Any]) -> None:
    """Adds them with ``add``, the ``add_argument`` of a group."""

    def n(least: int, note: str = "") -> dict[str, Any]:
        return {"metavar": "N", "type": whole(least, note=note)}

    def x(least: float | None = None, most: float | None = None, **more: Any) -> dict[str, Any]:
        return {"metavar": "X", "type": real(least, most, **more)}

    greedy = x(0, note="--temp 0 takes the likeliest token")
    add("--temp", "--temperature", **greedy, default=0.8, help="temperature; 0 = always the likeliest token")
    add("--top-k", **n(0, note="0 keeps all"), default=40, help="keep the N likeliest tokens; 0 = all")
    add("--top-p", **x(0, 1), default=0.95, help="keep the likeliest tokens whose probabilities add up to X; 1 = all")
    add("--min-p", **x(0, 1), default=0.05, help="drop tokens less likely than X times the likeliest; 0 = none")
    add("--typical", "--typical-p", **x(0, 1), default=1.0, help="locally typical sampling; 1 = off")
    penalty = x(0, above=True, note="1 switches it off")
    add("--repeat-penalty", **penalty, default=1.0, help="make recent tokens less likely; 1 = off")
    add("--repeat-last-n", **n(-1), default=64, help="number of recent tokens to penalize; 0 = none, -1 = all")
    add("--presence-penalty", **x(), default=0.0, help="subtracted from the logits of recent tokens; 0 = off")
    add("--frequency-penalty", **x(), default=0.0, help="subtracted once per occurrence of a recent token; 0 = off")
    add("--dry-multiplier", **x(0), default=0.0, help="DRY: penalty for continuing a repetition; 0 = off")
    add("--dry-base", **x(1), default=1.75, help="factor of the DRY penalty for each further token of the repetition")
    add("--dry-allowed-length", **n(0), default=2, help="DRY: repetitions shorter than N tokens are not penalized")
    add("--dry-penalty-last-n", **n(-1), default=-1, help="DRY: search the last N tokens; 0 = none, -1 = all")
    add("--xtc-probability", **x(0, 1), default=0.0, help="XTC: how often the likeliest tokens are excluded; 0 = never")
    add(
        "--xtc-threshold",
        **x(0, 1),
        default=0.1,
        help="XTC: of the tokens with a probability of at least X, keep only the least likely; above 0.5 = off",
    )
