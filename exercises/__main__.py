"""Find faults, and write kernels.

python -m exercises list                the exercises
python -m exercises plant 3 [FOLDER]    copy the repository to a folder, with fault 3
python -m exercises hint 3 [K]          its first hint, or its K-th
python -m exercises check [FOLDER]      in a copy: run the tests that find its fault
python -m exercises check k3            compare kernel 3 with the engine
python -m exercises solution 3          what repairs fault 3; k3: a kernel
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from exercises.kernels import NAMES

try:
    from exercises import faults
except ImportError as missing:
    sys.exit(f"The exercises need what tests need: pip install -e '.[dev]' ({missing}).")


def kernel(number: str) -> str:
    """The name of kernel ``k1`` .. ``k10``.  Ends the program if there is none."""
    if not 1 <= int(number[1:]) <= len(NAMES):
        sys.exit(f"There is no kernel {number}: give one from k1 to k{len(NAMES)}.")
    return NAMES[int(number[1:]) - 1]


def is_kernel(word: str) -> bool:
    """Whether a word is the number of a kernel: k and digits."""
    return word[:1] == "k" and word[1:].isdecimal()


def show_list() -> None:
    """Print all exercises."""
    print("Faults to find: python -m exercises plant NUMBER")
    for i, exercise in enumerate(faults.EXERCISES, 1):
        print(f"{i:4}  {exercise.fault.room}: {exercise.fault.why}")
    print("\nKernels to write: python -m exercises check kNUMBER")
    for i, name in enumerate(NAMES, 1):
        title = source("kernels", name).splitlines()[0].strip('"').partition(". ")[2]
        print(f"{f'k{i}':>4}  {title} (exercises/kernels/{name}.py)")


def source(folder: str, name: str) -> str:
    """The text of a kernel."""
    return (Path(__file__).parent / folder / f"{name}.py").read_text(encoding="utf-8")


def plant(number: str, folder: str | None) -> None:
    """Make a copy with a fault, and say what is wrong."""
    path = faults.plant(number, None if folder is None else Path(folder))
    print(f"This copy has a fault: {faults.numbered(number).fault.why}.")
    print(f"\n  cd {path}\n  python -m exercises check\n")
    print(f"Find the fault and repair it. A hint: python -m exercises hint {number}")


def hint(number: str, k: int) -> None:
    """Print a hint."""
    if is_kernel(number):
        print(source("kernels", kernel(number)).split('"""')[1].strip())
        return
    hints = faults.numbered(number).hints
    if not 1 <= k <= len(hints):
        sys.exit(f"There are {len(hints)} hints: give a number from 1 to {len(hints)}.")
    print(f"Hint {k} of {len(hints)}: {hints[k - 1]}")


def check(what: str) -> bool:
    """Check a kernel or a copy."""
    if is_kernel(what):
        name = kernel(what)
        from exercises.tasks import check as check_kernel

        done, sentence = check_kernel(name)
    else:
        done, sentence = faults.check(Path(what))
    print(sentence)
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.  Returns 0, or 1 if a check fails."""
    parser = argparse.ArgumentParser(
        prog="python -m exercises", description="Find faults that were planted, and write kernels."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("list", help="print the exercises")
    one = commands.add_parser("plant", help="copy the repository, with a fault")
    one.add_argument("number")
    one.add_argument("folder", nargs="?", help="a folder that does not exist (default: a temporary one)")
    one = commands.add_parser("hint", help="print a hint")
    one.add_argument("number")
    one.add_argument("k", nargs="?", type=int, default=1, help="which one (default: 1)")
    one = commands.add_parser("check", help="check a kernel, or a copy with a fault")
    one.add_argument("what", nargs="?", default=".", help="a kernel, such as k1, or a folder (default: this one)")
    one = commands.add_parser("solution", help="print a solution")
    one.add_argument("number")
    args = parser.parse_args(arguments)
    if args.command == "list":
        show_list()
    elif args.command == "plant":
        plant(args.number, args.folder)
    elif args.command == "hint":
        hint(args.number, args.k)
    elif args.command == "check":
        return 0 if check(args.what) else 1
    else:
        number = args.number
        print(source("solutions", kernel(number)) if is_kernel(number) else faults.solution(number))
    return 0


if __name__ == "__main__":
    sys.exit(main())
