"""How many drafts a model keeps, and whether its text stays the same: real models, real prompts.

    python -m benchmarks.acceptance TARGET.gguf --draft DRAFT.gguf --golden GOLDEN.json
    python -m benchmarks.acceptance TARGET.gguf --lookup --chat "Repeat this text three times: ..."

The number of drafts is always that of ``--draft-max``: it does not depend on what would pay off on this machine.
"""

import argparse
import json
import sys
from pathlib import Path

import engine
from engine.speculative import passes
from engine.speculative.params import SpeculationParams
from engine.speculative.statistics import Statistics


def prompts(args: argparse.Namespace, llm: engine.LLM) -> list[list[int]]:
    """Token ids of every requested prompt."""
    found = [llm.tokenize(text) for text in args.prompt]
    if args.golden:
        found += [item["prompt_tokens"] for item in json.loads(Path(args.golden).read_text())["items"]]
    if args.chat:
        assert llm.chat_template is not None, "this model has no chat template"
        found += [llm.chat_template.encode([{"role": "user", "content": text}]) for text in args.chat]
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--golden", help="a JSON file with items that have prompt_tokens")
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--chat", action="append", default=[], help="a message to the model's chat template")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache-type", default="f16", help="type of keys and values (f16)")
    parser.add_argument("-n", type=int, default=128, help="tokens of an answer (128)")
    parser.add_argument("--draft-max", type=int, nargs="+", default=[3])
    parser.add_argument("--temp", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--seeds", type=int, default=1, help="answers to each prompt if they are sampled (1)")
    args = parser.parse_args()
    llm = engine.load(args.target, device=args.device, draft_model=args.draft, cache_type=args.cache_type)
    passes.SEEN = sys.maxsize  # so that time decides nothing
    for temperature in args.temp:
        for most in args.draft_max:
            total, same, n = Statistics(), 0, 0
            for ids in prompts(args, llm):
                for seed in range(args.seeds if temperature > 0 else 1):
                    options = {"max_tokens": args.n, "temperature": temperature, "seed": seed}
                    plain = llm.complete(ids, **options, speculation=SpeculationParams(enabled=False))
                    params = SpeculationParams(lookup=args.lookup, draft_max=most)
                    found = llm.complete(ids, **options, speculation=params)
                    assert found.speculation is not None
                    total.drafted_at.update(found.speculation.drafted_at)
                    total.accepted_at.update(found.speculation.accepted_at)
                    total.drafted_by.update(found.speculation.drafted_by)
                    total.accepted_by.update(found.speculation.accepted_by)
                    total.verifications += found.speculation.verifications
                    same += found.ids == plain.ids
                    n += 1
            places = " ".join(f"{share:.2f}" for share in total.by_place)
            print(
                f"temperature {temperature}, {most} drafts: {total.accepted} of {total.drafted} kept "
                f"({total.acceptance:.3f}; by place {places}), {total.mean_length:.2f} tokens per verification, "
                f"{same} of {n} texts as without drafts",
                flush=True,
            )


if __name__ == "__main__":
    main()
