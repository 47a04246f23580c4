"""The sectors of memory that one load of a warp reads, in the first four steps of the ladder of kernels."""

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from docs.figures import bundled

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "The sectors of memory that one load of a warp reads, in four steps of the ladder"
SIZE = (360, 390)
SECTOR, HEADER, LANES = 32, 16, 32
STEPS = {
    "1_thread_per_row": "1. A thread for each row",
    "2_words": "2. Four weights at a time",
    "3_warp_per_row": "3. A warp for each row",
    "4_vectors": "4. Sixteen bytes in each load",
}
"""The files of the steps in ``examples/ladder``, and their titles."""


def facts() -> dict[str, list[list[int]]]:
    """By step: for each lane of the first warp, the first byte and the number of bytes of its first load of nibbles.

    The kernels run in the simulator, in a process of its own, because it has to be chosen before Numba is imported.
    """
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(bundled.REPOSITORY)}
    ran = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=True)
    found: dict[str, list[list[int]]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def traced() -> dict[str, list[list[int]]]:
    """The facts, in the process of the simulator."""
    import runpy

    folder = bundled.REPOSITORY / "examples" / "ladder"
    sys.path.insert(0, str(folder))
    sys.argv = ["", "32", "2048"]  # rows begin at sectors, as those of 4096 weights do
    from greenlet import getcurrent

    from engine.cuda.runtime.simulator import Lane, Pointer

    seen: dict[int, tuple[int, int]] = {}

    def note(pointer: Pointer, i: Any, n_bytes: int) -> None:
        lane, size = getcurrent(), pointer.array.itemsize
        if pointer.name != "weights" or not isinstance(lane, Lane):
            return
        at, thread = (pointer.offset + int(i)) * size, int(lane.threadIdx.x)
        in_header = at % 144 < HEADER
        if not in_header and int(lane.blockIdx.x) == 0 and thread < LANES:
            seen.setdefault(thread, (at, n_bytes))

    item, words = Pointer.__getitem__, Pointer.words

    def noted_item(self: Pointer, i: Any) -> Any:
        note(self, i, self.array.itemsize)
        return item(self, i)

    def noted_words(self: Pointer, i: Any, n: int) -> Any:
        note(self, i, 4 * n)
        return words(self, i, n)

    Pointer.__getitem__, Pointer.words = noted_item, noted_words  # type: ignore[method-assign]
    found = {}
    for step in STEPS:
        seen.clear()
        runpy.run_path(str(folder / f"{step}.py"), run_name="__main__")
        found[step] = [list(seen[lane]) for lane in range(LANES)]
    return found


def sectors(loads: list[list[int]]) -> list[int]:
    """How many bytes of each sector that is read are used, from the lowest address to the highest."""
    used: dict[int, set[int]] = {}
    for first, count in loads:
        for byte in range(first, first + count):
            used.setdefault(byte // SECTOR, set()).add(byte)
    return [len(used[sector]) for sector in sorted(used)]


LEFT, STEP, HIGH = 8.0, 10.75, 32.0


def draw(facts: dict[str, list[list[int]]], page: "Page") -> None:
    """A box for each sector, filled as far as its bytes are used."""
    page.text(LEFT, 20, "One load of a warp", bold=True, size=14)
    page.text(LEFT, 39, "A box is a sector of 32 bytes that is read.", "muted", 12.5)
    page.text(LEFT, 55, "The filled part is used.", "muted", 12.5)
    y = 82.0
    for step, title in STEPS.items():
        loads = facts[step]
        found = sectors(loads)
        page.text(LEFT, y, title, "text", 13, bold=True)
        for i, used in enumerate(found):
            x = LEFT + i * STEP
            page.box(x, y + 8, STEP - 2, HIGH, "muted", 0, 0.8)
            high = HIGH * used / SECTOR
            page.box(x, y + 8 + HIGH - high, STEP - 2, high, "blue", 0.8, 0)
        read, all_used = SECTOR * len(found), sum(found)
        page.text(LEFT, y + 56, f"{len(found)} sectors:", "muted", 12.5)
        page.text(LEFT + 78, y + 56, f"{all_used} of {read} bytes used", "muted", 12.5)
        y += 79


if __name__ == "__main__":
    print(json.dumps(traced()))
