"""Compare a model that is divided between a GPU and the CPU here and in llama.cpp, in turns.

    python -m benchmarks.divided_beside_llama_cpp MODEL.gguf --bench LLAMA_BENCH --ours="-ngl 18" --theirs="-ngl 19"
    python -m benchmarks.divided_beside_llama_cpp MODEL.gguf --bench LLAMA_BENCH --ours=-cmoe --theirs="-ngl 99 -ncmoe 99"

Each round starts ``bitmirror bench`` and llama-bench once each, with the same tests; the table has the median of all samples
of a test and the ratio.  In llama.cpp the output counts as one of the ``-ngl`` layers.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

OURS, RIVAL = "ours", "llama.cpp"


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.divided_beside_llama_cpp", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("model", type=Path, help="a GGUF file, such as bitmirror synthetic writes")
    parser.add_argument("--bench", required=True, help="llama.cpp's llama-bench")
    parser.add_argument("--ours", default="", help="flags of bitmirror bench that divide the model")
    parser.add_argument("--theirs", default="", help="flags of llama-bench that divide it in the same way")
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("-r", "--repetitions", type=int, default=3, help="samples of a test in a round")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args(given)


def rates(command: list[str]) -> dict[str, list[float]]:
    """Tokens per second of each sample, by test ("pp512", "tg64"), as a program prints them in JSON lines."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}; name llama-bench with --bench")
    if done.returncode:
        sys.exit(f"{' '.join(command[:3])} failed:\n{done.stderr[-2000:]}")
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            test = json.loads(line)
            tokens = test["n_prompt"] + test["n_gen"]
            name = f"pp{test['n_prompt']}" if test["n_prompt"] else f"tg{test['n_gen']}"
            found[name] = [1e9 * tokens / nanoseconds for nanoseconds in test["samples_ns"]]
    return found


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    tests = ["-p", str(args.n_prompt), "-n", str(args.n_gen), "-r", str(args.repetitions), "-o", "jsonl"]
    commands = {
        OURS: [sys.executable, "-m", "bitmirror", "bench", "-m", str(args.model), *shlex.split(args.ours), *tests],
        RIVAL: [args.bench, "-m", str(args.model), "-fa", "1", *shlex.split(args.theirs), *tests],
    }
    samples: dict[tuple[str, str], list[float]] = {}
    for number in range(args.rounds):
        for name in sorted(commands, reverse=number % 2 == 1):
            for test, found in rates(commands[name]).items():
                samples.setdefault((test, name), []).extend(found)
    print(f"| test | {OURS}, tokens/s | {RIVAL} | ratio |\n| --- | ---: | ---: | ---: |")
    for test in dict.fromkeys(test for test, _ in samples):
        own, other = (statistics.median(samples[test, name]) for name in (OURS, RIVAL))
        print(f"| {test} | {own:.1f} | {other:.1f} | {own / other:.2f} |")


if __name__ == "__main__":
    main()
