"""How long a GPU waits for the host between the steps of many answers.

``python -m benchmarks.host_share MODEL.gguf -np 1,64,128`` lets users ask as ``bitmirror bench -np`` does, and puts a time
mark before and after each graph of a step.  The GPU waits from the end of a graph to the beginning of the next one, where
also the small kernels run that lay rows out.  ``--profile`` prints the functions of the host that took the most time.
"""

import argparse
import cProfile
import pstats
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import engine
from engine.cli.users import measure
from engine.cuda.runtime.device import Graph
from engine.decode.device_steps import DeviceSteps
from engine.serving.memory import freeze

SHOWN = 25
"""Functions of a profile that are printed."""


@contextmanager
def timed_graphs() -> Iterator[list[tuple[Any, Any, Any]]]:
    """The graphs that steps launch meanwhile: (device, time mark before, time mark after)."""
    found: list[tuple[Any, Any, Any]] = []
    launch, start, choose = Graph.launch, DeviceSteps.start, DeviceSteps.choose
    in_step = [0]

    def timed(self: Graph) -> None:
        if not in_step[0]:
            launch(self)
            return
        device = self._device
        begun = device.event()
        launch(self)
        found.append((device, begun, device.event()))

    def within(method: Any) -> Any:
        def called(self: DeviceSteps, *given: Any) -> Any:
            in_step[0] += 1
            try:
                return method(self, *given)
            finally:
                in_step[0] -= 1

        return called

    patches = patch.object(DeviceSteps, "start", within(start)), patch.object(DeviceSteps, "choose", within(choose))
    with patch.object(Graph, "launch", timed), patches[0], patches[1]:
        yield found


def waits(marks: Sequence[tuple[Any, Any, Any]]) -> np.ndarray:
    """Seconds between each graph and the next one."""
    return np.array(
        [device.elapsed(end, begun) for (device, _, end), (_, begun, _) in zip(marks, marks[1:], strict=False)]
    )


def main() -> None:
    """Print one line per number of users."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-np", "--users", default="1,64,128", help="numbers of users (1,64,128)")
    parser.add_argument("-p", "--prompt", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("-n", "--answer", type=int, default=128, help="tokens of an answer (128)")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--profile", action="store_true", help="print the functions of the host that took the most time"
    )
    args = parser.parse_args()
    users = [int(n) for n in args.users.split(",")]
    llm = engine.load(args.model, n_ctx=args.prompt + args.answer, parallel=max(users), device=args.device)
    llm.compile()
    print(f"{llm.model.ops.label}: prompts of {args.prompt} tokens, answers of {args.answer}")
    print("| users | steps | tokens/s | step, ms | the GPU waits, us per step (99 %) | of the time |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for n in users:
        for _ in range(2):  # kernels may be missing, and graphs are captured
            measure(llm, "", n, args.prompt, args.answer)
        freeze()  # as the server does
        profile = cProfile.Profile()
        with timed_graphs() as marks:
            if args.profile:
                profile.enable()
            result = measure(llm, "", n, args.prompt, args.answer)
            profile.disable()
        whole, waited = result.answer_s, waits(marks)
        if waited.size:
            whole = marks[0][0].elapsed(marks[0][1], marks[-1][2])
        cells = f"| {n} | {len(marks)} | {result.answer_per_second:.0f} |"
        cells += f" {1e3 * whole / max(1, len(marks)):.3f} |"
        if waited.size:
            cells += (
                f" {1e6 * waited.mean():.1f} ({1e6 * np.percentile(waited, 99):.1f}) | {waited.sum() / whole:.2%} |"
            )
        print(cells, flush=True)
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)


if __name__ == "__main__":
    main()
