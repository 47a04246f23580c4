"""The gain of drafts: tokens per second of whole answers, against plain decoding of the same text.

    python -m benchmarks.speculation TARGET.gguf [--draft DRAFT.gguf] [--device cuda]
    python -m benchmarks.speculation TARGET.gguf [--draft DRAFT.gguf] [--device cuda] --users 8,16

Models with random weights have the speed of real ones but produce no sensible text, so none of their drafts would be
accepted.  Hence drafts are *scripted*: the draft model, or the target's own layer, does all its work, and then the target's
own next token (known from the plain answer) is proposed with the requested probability, else another one.  Likewise the
lookup searches a text that contains the answer, for an echo, or the real text, in an answer that repeats nothing.
The text is compared with the plain one.

With ``--users``, so many greedy answers to different prompts run at the same time, and rates are of the tokens of all answers
after the last of their first tokens.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import engine
from engine.decode.generation import Generation
from engine.decode.request import Request
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative import speculation as drafting
from engine.speculative.lookup import PromptLookup
from engine.speculative.params import SpeculationParams
from engine.speculative.speculation import Speculation

SOURCES = {
    "model": "draft model",
    "mtp": "own layer",
    "eagle3": "EAGLE-3 network",
    "dflash": "DFlash network",
    "assistant": "assistant",
}

OFF = SpeculationParams(enabled=False)


class Echo(PromptLookup):
    """A lookup that also searches ``text``, before the known tokens."""

    text: Sequence[int] = ()

    def propose(self, known: Sequence[int], count: int) -> list[int]:
        """Drafts as if the prompt began with the text."""
        return super().propose([*self.text, *known], count)


def rate(generation: Generation) -> float:
    """Tokens per second after the first."""
    t = generation.timings
    return (t.predicted_n - 1) / (t.predicted_s - (t.first_token_s - t.prompt_s))


def best(llm: engine.LLM, ids: list[int], options: dict[str, Any], repetitions: int) -> Generation:
    """The fastest of several runs; the first one, which makes graphs, does not count."""
    runs = [llm.complete(ids, ignore_eos=True, seed=1, **options) for _ in range(repetitions + 1)]
    return max(runs[1:], key=rate)


def show(what: str, found: Generation, plain: Generation) -> None:
    """One row of the table."""
    s = found.speculation
    assert s is not None
    same = "the same" if found.ids == plain.ids else "DIFFERENT"
    places = f"{s.drafted:6d} {s.acceptance:5.0%} {s.mean_length:6.2f} {s.plain_n:6d}"
    verify = 1e3 * s.verify_s / s.verifications if s.verifications else 0.0
    print(f"{what:<44} {rate(found):8.1f} {rate(found) / rate(plain):6.2f}x {places} {verify:8.3f}  {same}", flush=True)


# --- many users ------------------------------------------------------------------------------------------------


def answers(
    llm: engine.LLM, prompts: Sequence[list[int]], n: int, params: SpeculationParams
) -> tuple[float, list[Request]]:
    """Let prompts be answered at the same time, the i-th in slot i, with ``n`` tokens after a first one.  Returns tokens per
    second of all answers, from when each has begun, and the requests."""
    llm.reset()

    def request(slot: int, ids: Sequence[int], count: int, begun: bool) -> Request:
        greedy = Sampler(SamplerParams(temperature=0.0, seed=0), llm.config.n_vocab)
        drafted = begun and params.enabled
        source = Speculation(params, greedy, llm.draft, llm.n_bytes_read) if drafted else None
        asked = Request(ids, greedy, count, source, begun=begun)
        asked.wanted_slot = slot
        llm.core.submit(asked)
        return asked

    firsts = [request(slot, ids, 1, False) for slot, ids in enumerate(prompts)]
    while llm.core.step():
        pass
    asked = [request(slot, [*ids, firsts[slot].items[0][0]], n, True) for slot, ids in enumerate(prompts)]
    # Before the first step, the states of recurrent layers after each prompt are copied to the host.
    while not all(request.items for request in asked):
        llm.core.step()
    begun, there = time.perf_counter(), sum(len(request.items) for request in asked)
    while llm.core.step():
        pass
    return (n * len(asked) - there) / (time.perf_counter() - begun), asked


def many(llm: engine.LLM, args: argparse.Namespace, n_ctx: int) -> None:
    """Print a row for each number of users, acceptance, and number of drafts."""
    draft, rng, n_vocab = llm.draft, np.random.default_rng(0), llm.config.n_vocab
    assert draft is not None
    print(
        "| users | accepted | at most | tokens/s | of plain | drafts | kept | tokens per pass | plain passes | text |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    for users in args.users:
        prompts = [rng.integers(0, n_vocab, args.prompt).tolist() for _ in range(users)]
        runs = [answers(llm, prompts, args.n, OFF) for _ in range(args.r + 1)][1:]
        plain, expected = max(speed for speed, _ in runs), [request.known for request in runs[0][1]]
        print(f"| {users} | | | {plain:.0f} | 1.00 | | | | | |", flush=True)
        for acceptance in args.acceptance:
            draft.script = np.full((users, n_ctx), -1, np.int32)
            for slot, known in enumerate(expected):
                answer = np.array(known[args.prompt :])
                wrong = rng.random(answer.size) >= acceptance
                draft.script[slot, args.prompt : len(known)] = (answer + wrong) % n_vocab
            for most in args.draft_max:
                runs = [answers(llm, prompts, args.n, SpeculationParams(draft_max=most)) for _ in range(args.r + 1)][1:]
                speed, asked = max(runs, key=lambda run: run[0])
                found = [request.speculation.statistics for request in asked if request.speculation is not None]
                drafted, kept, passes = (
                    sum(getattr(one, name) for one in found) for name in ("drafted", "accepted", "verifications")
                )
                same = [request.known for request in asked] == expected
                cells = f"{speed:.0f} | {speed / plain:.2f} | {drafted} | {kept / max(1, drafted):.0%}"
                cells += f" | {1 + kept / max(1, passes):.2f} | {sum(one.plain_n for one in found)}"
                print(
                    f"| {users} | {acceptance:.0%} | {most or 'usual'} | {cells} | {'the same' if same else 'DIFFERENT'} |"
                )
            draft.script = None


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--draft", help="a draft model; default: the target's own layer for drafting")
    parser.add_argument("--device", default="auto")
    parser.add_argument("-n", type=int, default=300, help="tokens of an answer (300)")
    parser.add_argument("-r", type=int, default=2, help="runs that count (2)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (128)")
    parser.add_argument("--temp", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.75, 0.9, 0.0, 1.0])
    parser.add_argument("--draft-max", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5, 7])
    parser.add_argument("--cache-type", default="f16", help="type of keys and values (f16)")
    parser.add_argument("-c", "--ctx-size", type=int, default=0, help="context; 0: as much as is needed")
    parser.add_argument("--no-lookup", action="store_true", help="skip prompt lookup")
    parser.add_argument(
        "--users", type=lambda text: [int(n) for n in text.split(",")], help="numbers of users, as in 8,16"
    )
    args = parser.parse_args()
    n_ctx = args.ctx_size or args.prompt + 2 * args.n + 64
    draft_max = max(*args.draft_max, 0 if args.no_lookup else 7)
    opened = {"device": args.device, "n_ctx": n_ctx, "draft_model": args.draft, "draft_max": draft_max}
    llm = engine.load(args.target, cache_type=args.cache_type, parallel=max(args.users or [1]), **opened)
    draft = llm.draft
    assert draft is not None, "the model has no layer for drafting: give a draft model"
    llm.compile()
    if args.users:
        many(llm, args, n_ctx)
        return
    ids = np.random.default_rng(0).integers(0, llm.config.n_vocab, args.prompt).tolist()
    head = f"{'':<44} {'t/s':>8} {'':>7} {'drafts':>6} {'kept':>5} {'length':>6} {'plain':>6} {'ms/pass':>8}"
    print(head)
    for temperature in args.temp:
        options = {"temperature": temperature, "max_tokens": args.n}
        plain = best(llm, ids, options | {"speculation": OFF}, args.r)
        print(f"{f'temperature {temperature}: plain':<44} {rate(plain):8.1f}")
        llm.draft = draft
        for acceptance in args.acceptance:
            rng = np.random.default_rng(round(1000 * acceptance))
            draft.script = np.full(n_ctx, -1, np.int32)
            for i, token in enumerate(plain.ids):
                wrong = (token + 1) % llm.config.n_vocab
                draft.script[len(ids) + i] = token if rng.random() < acceptance else wrong
            for most in args.draft_max:
                params = SpeculationParams(draft_max=most)
                found = best(llm, ids, options | {"speculation": params}, args.r)
                show(f"  {SOURCES[draft.name]}, {acceptance:.0%}, at most {most or 'usual'}", found, plain)
        draft.script, llm.draft = None, None
        if args.no_lookup:
            continue
        for what, text in (("echo", plain.ids), ("nothing to find", [])):
            original, drafting.PromptLookup, Echo.text = drafting.PromptLookup, Echo, text  # type: ignore[misc]
            try:
                for most in (0, 15):
                    params = SpeculationParams(lookup=True, draft_max=most)
                    show(
                        f"  lookup, {what}, at most {most or 'usual'}",
                        best(llm, ids, options | {"speculation": params}, args.r),
                        plain,
                    )
            finally:
                drafting.PromptLookup = original  # type: ignore[misc]


if __name__ == "__main__":
    main()
