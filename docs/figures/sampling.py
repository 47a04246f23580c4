"""From logits to a token: what the filters leave of the bundled model's logits, and what the noise decides."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from docs.figures import bundled
from engine.numerics import gumbel
from engine.sampling.sampler import Sampler, SamplerParams

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "The most probable tokens after a prompt, filtered, and one of them chosen"
SIZE = (480, 546)
PROMPT = "def fibonacci(n):\n    "
FILTERS = {"top_k": 10, "top_p": 0.9, "min_p": 0.1}
TEMPERATURE, SEED = 0.8, 8
ROWS = 12


def facts() -> dict[str, Any]:
    """The first tokens by probability: which filter drops each, and what the others are drawn by."""
    llm = bundled.model()
    ids = llm.tokenize(PROMPT)
    logits, _ = llm.prefill(ids)
    off: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    dropped, left = {}, set(range(llm.config.n_vocab))
    for name, value in FILTERS.items():
        off[name] = value
        kept, _ = Sampler(SamplerParams(temperature=TEMPERATURE, **off), llm.config.n_vocab).candidates(logits)
        dropped |= dict.fromkeys(left - set(kept.tolist()), name)
        left = set(kept.tolist())
    params = SamplerParams(temperature=TEMPERATURE, seed=SEED, **FILTERS)
    chosen = Sampler(params, llm.config.n_vocab).sample(logits, len(ids), ids)
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    rows = []
    for token in np.argsort(-logits, kind="stable")[:ROWS].tolist():
        noise = float(gumbel(np.uint64(SEED), len(ids), token))
        rows.append(
            {
                "piece": bundled.piece(token),
                "logit": round(float(logits[token]), 3),
                "p": round(float(weights[token] / weights.sum()), 4),
                "dropped": dropped.get(token, ""),
                "divided": round(float(logits[token]) / TEMPERATURE, 3),
                "noise": round(noise, 3),
            }
        )
    survivors = [row for row in rows if not row["dropped"]]
    best = max(survivors, key=lambda row: row["divided"] + row["noise"])
    assert len(survivors) == len(left) and best["piece"] == bundled.piece(chosen)
    given = asdict(params)
    return {
        "prompt": PROMPT,
        "position": len(ids),
        "params": {name: given[name] for name in (*FILTERS, "temperature", "seed")},
        "n_vocab": llm.config.n_vocab,
        "rows": rows,
        "chosen": bundled.piece(chosen),
    }


LEFT, PIECE, BARS, RIGHT = 24, 96, 150, 456
COLORS = {"top_k": "muted", "top_p": "orange", "min_p": "red"}


def draw(facts: dict[str, Any], page: "Page") -> None:
    """Probabilities with the filters, then logits divided by the temperature plus noise for what is left."""
    params, rows = facts["params"], facts["rows"]
    page.text(LEFT, 22, f"{len(rows)} of {facts['n_vocab']} tokens", bold=True)
    page.text(LEFT + 134, 22, "after “" + facts["prompt"].replace("\n", "⏎").rstrip() + "␣␣␣␣”", "muted")
    page.text(PIECE, 44, "token", "muted", 12.5, "end")
    page.text(PIECE + 48, 44, "logit", "muted", 12.5, "end")
    page.text(BARS + 8, 44, "probability", "muted", 12.5)
    y = 64.0
    most = rows[0]["p"]
    for row in rows:
        color = COLORS.get(row["dropped"], "blue")
        page.text(PIECE, y, row["piece"], "text" if not row["dropped"] else "muted", 13, "end", mono=True)
        page.text(PIECE + 48, y, f"{row['logit']:.2f}", "muted", 13, "end")
        width = 190 * row["p"] / most
        page.box(BARS + 8, y - 11, width, 14, color, 0.45, 0.8)
        page.text(BARS + 8 + width + 6, y, f"{row['p']:.3f}", color, 12.5)
        if row["dropped"]:
            page.text(RIGHT, y, f"dropped by {row['dropped']}", color, 12.5, "end")
        y += 20
    page.text(LEFT, y + 8, ", ".join(f"{name} = {params[name]}" for name in FILTERS), "muted", 12.5)

    y += 48
    page.text(LEFT, y, f"logit / {params['temperature']}", "blue", bold=True)
    page.text(LEFT + 82, y, "+ noise", "green", bold=True)
    page.text(LEFT + 150, y, f"of seed {params['seed']}, position {facts['position']} and token", "muted")
    left = [row for row in rows if not row["dropped"]]
    low = min(row["divided"] for row in left) - 3
    high = max(row["divided"] + max(row["noise"], 0) for row in left)
    scale = (RIGHT - 66 - BARS) / (high - low)
    y += 30
    for row in left:
        start, end = BARS + scale * (row["divided"] - low), BARS + scale * (row["divided"] + row["noise"] - low)
        total = row["divided"] + row["noise"]
        wins = row["piece"] == facts["chosen"]
        page.text(PIECE, y, row["piece"], "text", 13, "end", mono=True, bold=wins)
        page.box(BARS, y - 12, start - BARS, 8, "blue", 0.45, 0.8)
        page.box(min(start, end), y - 3, abs(end - start), 8, "green", 0.45, 0.8)
        page.line([(end, y - 13), (end, y + 6)], "text", 1.6)
        page.text(RIGHT, y + 2, f"{total:.2f}", "text", 13, "end", bold=wins)
        if wins:
            page.box(LEFT - 8, y - 17, RIGHT - LEFT + 16, 26, "text", 0, 1.4, radius=5)
        y += 30
    page.text(LEFT, y + 4, "The largest sum is chosen.", "text")
