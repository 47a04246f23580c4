"""Twenty of the faults of ``tests/faults.py``, for people to find: planted in a copy of the repository, with hints."""

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.copies import Tree, sources
from tests.faults import FAULTS, Fault

MARK = ".exercise"
"""The file of a copy that has the number of its exercise."""

LIMIT = 1800.0
"""Seconds that a test may take: the first run in a copy compiles its kernels."""


@dataclass(frozen=True)
class Exercise:
    """name: of the fault; chapter: of the book, about what is broken; look: the last hint."""

    name: str
    chapter: str
    look: str

    @property
    def fault(self) -> Fault:
        """The fault."""
        return next(fault for fault in FAULTS if fault.name == self.name)

    @property
    def hints(self) -> tuple[str, ...]:
        """From vague to plain."""
        return f"Read {self.chapter}.", f"The fault is in {self.fault.file}.", self.look


EXERCISES = (
    Exercise(
        "a tensor that ends after its file",
        "docs/bytes.md, about what is checked before a tensor is used",
        "Look at the comparison of the end of a tensor with the size of the file. By how many bytes may it be too large?",
    ),
    Exercise(
        "tensors that overlap",
        "docs/bytes.md, about what is checked before a tensor is used",
        "Tensors are visited in the order of their offsets. What must be true of an offset, given the tensor before?",
    ),
    Exercise(
        "the longest match of a lookup",
        "docs/drafts.md, about prompt lookup",
        "The end of the text may occur several times before. Which of these places should the draft continue?",
    ),
    Exercise(
        "control tokens in what people write",
        "docs/tokens.md, about who may write control tokens",
        "Find where a text is searched for control tokens. For which texts must nothing be found?",
    ),
    Exercise(
        "the bound of min-p",
        "docs/sampling.md, about min-p",
        "Does a token stay whose probability is exactly min_p times the largest one? Look at the comparison.",
    ),
    Exercise(
        "an exponent of MXFP4",
        "docs/tensors.md, about MXFP4, whose blocks have a power of two as their scale",
        "The values of the table are twice those of the format, so that they are integers. Where is this made up for?",
    ),
    Exercise(
        "the last rows of a matrix",
        "docs/cpu.md, about records of eight rows",
        "The last record may have fewer rows than the others. Test the condition with a matrix of nine rows.",
    ),
    Exercise(
        "the tree of partial sums",
        "docs/forward.md, about norms, and the word fold in docs/glossary.md",
        "Eight numbers can be added in three rounds, neighbours first or halves first. Which does the book describe?",
    ),
    Exercise(
        "a window off by one",
        "docs/sliding-windows.md",
        "A window of 1 shows a token only itself. Which first position does the function return for position 5 and window 1?",
    ),
    Exercise(
        "a mask off by one",
        "docs/attention.md, about what a token may see",
        "How many positions of a chunk are visible if the last visible position is the first of the chunk?",
    ),
    Exercise(
        "ties between experts, CPU",
        "docs/experts.md, about the choice of experts",
        "A logit and the number of an expert are packed into one key, so that a sort decides ties. Which number has to win?",
    ),
    Exercise(
        "noise by place in place of token",
        "docs/sampling.md, about noise that is a function",
        "The noise of a token must not depend on what other tokens are left. What are its three arguments?",
    ),
    Exercise(
        "a page given back too early",
        "docs/caches.md, about windows and pages",
        "A draft that is refused moves the window back. How many positions must stay beside those of the window?",
    ),
    Exercise(
        "a product and a sum in place of fma, CPU",
        "docs/why-bits.md, about products that feed a sum",
        "Count the roundings of the value of a unit in a format that has a minimum. There should be three.",
    ),
    Exercise(
        "chunks joined in one level",
        "docs/attention.md, about groups of chunks",
        "After how many chunks is the state of a group added to the total? Try a text of more than 512 tokens by hand.",
    ),
    Exercise(
        "the state of another segment",
        "docs/delta-rule.md, about states by position",
        "A segment ends, and its state is stored. From which place does the next segment read it?",
    ),
    Exercise(
        "a draft accepted that is not the target's choice",
        "docs/speculation.md, about the step that verifies",
        "A step returns the target's token and whether the next row of the pass is still valid. When is it?",
    ),
    Exercise(
        "the wrong lane in a shuffle",
        "docs/gpu.md, about sums with one tree",
        "Write down which lanes have been added to lane 0 after each of the five exchanges.",
    ),
    Exercise(
        "a barrier between scores and weights",
        "docs/gpu.md, about attention in two kernels",
        "Shared memory has two writers and two readers here. Between which of them is there no syncthreads?",
    ),
    Exercise(
        "a maximum that is forgotten",
        "docs/attention.md, about joining, and docs/ladder.md, about factors before sums",
        "Each lane needs the maximum of everything before its group. Lane 0 knows it from the 32 groups before. The others?",
    ),
)


def numbered(number: str) -> Exercise:
    """The exercise with this number.  Ends the program if there is none."""
    if not number.isdecimal() or not 1 <= int(number) <= len(EXERCISES):
        sys.exit(f"There is no fault {number}: give a number from 1 to {len(EXERCISES)}.")
    return EXERCISES[int(number) - 1]


def plant(number: str, folder: Path | None = None) -> Path:
    """Copy the repository to a folder that is empty or does not exist, with the fault.  Returns the folder."""
    fault = numbered(number).fault
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix=f"exercise-{number}-"))
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"{folder} is not empty: name a folder that does not exist.")
    for name in sources():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    path = folder / fault.file
    path.write_text(fault.apply(path.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / MARK).write_text(number, encoding="utf-8")
    return folder.resolve()


def check(folder: Path) -> tuple[bool, str]:
    """Run the tests that find the fault of a copy: whether they pass, and a sentence about it."""
    mark = folder / MARK
    if not mark.is_file():
        sys.exit(f"{folder} is not a copy with a fault: make one with python -m exercises plant NUMBER.")
    exercise = numbered(mark.read_text(encoding="utf-8"))
    outcome = Tree(folder, folder / ".cache" / "kernels").test(exercise.fault.tests, LIMIT)
    if outcome.how == "passed":
        return True, f"Repaired: {', '.join(exercise.fault.tests)} passes."
    if not outcome.noticed:
        return False, f"The tests could not run:\n{outcome.output}"
    return False, f"Not repaired yet: {outcome.found} {'failed' if outcome.how == 'failed' else 'does not end'}."


def solution(number: str) -> str:
    """The repair."""
    fault = numbered(number).fault
    return f"In {fault.file}, replace\n\n{fault.new.rstrip()}\n\nby\n\n{fault.old.rstrip()}"
