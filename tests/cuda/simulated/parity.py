"""``bitmirror parity`` without a GPU: a small random model on the CPU and in Numba's simulator, bit by bit.

    python -m tests.cuda.simulated.parity             every kernel of a layer, with a prompt of two tokens
    python -m tests.cuda.simulated.parity -p 3 -n 2   other flags of ``bitmirror parity``

The exit status is that of ``bitmirror parity``: 1 if a bit differs.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SIZES = ("llama", 1, 256, 2, 1, 32, 256, 289, 64, 1e4, 1e-5)
"""One layer whose rows are one unit of 256 weights, as small as the formats of Q4_K_M allow."""


def main(flags: Sequence[str] | None = None) -> int:
    """Compare the model.  Returns the exit status."""
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before Numba is imported
    import pytest

    from engine import parity
    from engine.synthetic.model import make_model
    from engine.synthetic.shape import Shape
    from tests.cuda.simulated.device import use_simulated

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        use_simulated(patch)
        file = make_model(Path(folder) / "llama.gguf", Shape(*SIZES), "Q4_K_M")
        return parity.main([str(file), *("-p", "2", "-n", "0", "-t", "1"), *(sys.argv[1:] if flags is None else flags)])


if __name__ == "__main__":
    sys.exit(main())
