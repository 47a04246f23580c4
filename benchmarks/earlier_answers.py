"""What lookup gains if it also searches earlier answers (``engine/speculative/history.py``).

    python -m benchmarks.earlier_answers MODEL.gguf --golden GOLDEN.json [--device cpu] [-n 256] [--again 4]

Each prompt is answered once, and then again: greedily, after a changed first line, as when a question is edited; and with
other seeds, as when an answer is not liked.  Every answer is computed without drafts, with lookup in its own text, and with
lookup that also searches the earlier answers.  All texts must be those without drafts.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine
from engine.speculative.params import SpeculationParams

PLAIN, LOOKUP = SpeculationParams(enabled=False), SpeculationParams(lookup=True)


def answered(
    llm: engine.LLM, prompts: Sequence[Sequence[int]], way: str, salt: str, options: dict[str, Any]
) -> list[engine.Generation]:
    """The answers to prompts, one after another.

    way: "plain", "own text" or "earlier answers".
    salt: that of all answers that may draft for one another.
    """
    found = []
    for i, prompt in enumerate(prompts):
        own = salt if way == "earlier answers" else f"{salt} {i}"
        params = PLAIN if way == "plain" else LOOKUP
        seeded = options | {"seed": i}
        found.append(llm.complete(list(prompt), speculation=params, cache_salt=own, **seeded))
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--golden", type=Path, required=True, help="a JSON file with items that have prompts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-n", type=int, default=256, help="tokens of an answer (256)")
    parser.add_argument("--again", type=int, default=4, help="further answers to each prompt (4)")
    args = parser.parse_args()
    llm = engine.load(args.model, device=args.device)
    texts = [item["prompt"] for item in json.loads(args.golden.read_text())["items"]]
    for kind, temperature in (("edited", 0.0), ("again, temperature 0.3", 0.3), ("again, temperature 0.8", 0.8)):
        edits = [f"# version {i}\n" if temperature == 0 else "" for i in range(args.again + 1)]
        options = {"max_tokens": args.n, "temperature": temperature, "ignore_eos": True}
        expected: dict[str, list[list[int]]] = {}
        for way in ("plain", "own text", "earlier answers"):
            seconds, tokens, drafted, accepted, verifications = 0.0, 0, 0, 0, 0
            for number, text in enumerate(texts):
                llm.reset()
                prompts = [llm.tokenize(edit + text) for edit in edits]
                # The first answer is the one that others can draft from.
                first, *others = answered(llm, prompts, way, f"{kind} {number}", options)
                ids = [answer.ids for answer in (first, *others)]
                assert ids == expected.setdefault(text, ids), f"other text: {way}"
                for answer in others:
                    tokens, seconds = tokens + answer.timings.predicted_n, seconds + answer.timings.predicted_s
                    if answer.speculation is not None:
                        drafted, accepted = drafted + answer.speculation.drafted, accepted + answer.speculation.accepted
                        verifications += answer.speculation.verifications
            kept = f", {accepted} of {drafted} drafts kept in {verifications} passes" if drafted else ""
            print(f"{kind}, {way}: {tokens / seconds:.0f} tokens/s{kept}", flush=True)


if __name__ == "__main__":
    main()
