"""The results of a product of warpgroups whose blocks share chains, also given to other GPUs as packets.

Formula: that of ``engine/cuda/products/warpgroup_matmul.py``; packet[t, first + r] of every owner = (out[t, r], number).
Shapes: those of ``matmul_chains`` with a single matrix; packets as in ``engine/cuda/wide_gather.py``.
Who owns what: a thread owns the results of a lane for a tile of 8 columns.
Reduction order: that of ``matmul_chains``.
Bytes moved: those of ``matmul_chains``, and 8 per result for each owner, over the links to the others.

So the packets are on their way before the kernel that takes them begins (``engine/cuda/wide_gather.py``).
"""

from collections.abc import Sequence

import numpy as np
from numba import cuda

from engine.cuda.gather import PEERS, make_give
from engine.cuda.intrinsics import advance, float_bits, give_packet, let_next_begin, wait_for_inputs
from engine.cuda.products.warpgroup_chain import TARGET
from engine.cuda.products.warpgroup_matmul import make_add_chains, make_write, matmul_chains
from engine.cuda.runtime.compiler import F32P, U32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import Tensor
from engine.gguf.quants import CHAINS

u32 = np.uint32
I = np.int32  # noqa: E741


@kernel(
    *(F32P, F32P, F32P, i32, i32, i32, i32, i32),
    *(i32, i32, i32, U32P, *[U32P] * PEERS),
    threads=256,
    target=TARGET,
)
def matmul_chains_give(tiles: int, n_peers: int) -> KernelCode:
    """n: the columns of all owners.  Grid: that of ``matmul_chains``."""
    write, add_chains, give = make_write(1), make_add_chains(tiles), make_give(n_peers)

    @cuda.jit
    def matmul_chains_give(
        chains,
        out,
        residual,
        add,
        end,
        n_rows,
        n_chains,
        rows,
        n,
        first,
        number,
        here,
        p0,
        p1,
        p2,
        p3,
        p4,
        p5,
        p6,
    ):
        let_next_begin()
        i = I(I(cuda.blockIdx.y * 8) + (cuda.threadIdx.x >> 5))
        lane, tile = I(cuda.threadIdx.x & 31), I(u32(i) // u32(tiles))
        of_tile = I(i - tile * tiles)
        wait_for_inputs()
        if tile < end:
            values = cuda.local.array(4, np.float32)
            own = np.int64(I(cuda.blockIdx.x * end + tile)) * (CHAINS * tiles * 128) + I(128 * of_tile + 4 * lane)
            add_chains(advance(chains, own), n_chains, values)
            column, row = I(I(cuda.blockIdx.x * tiles + of_tile) * 8 + 2 * (lane & 3)), I(16 * tile + (lane >> 2))
            write(values, column, row, True, rows, n_rows, residual, add, out)
            for e in range(4):
                t, r = I(column + (e & 1)), I(row + 8 * (e >> 1))
                if t < rows and r < n_rows:
                    at = I(t * n + first + r)
                    give((p0, p1, p2, p3, p4, p5, p6), at, values[e], number)
                    # For kernels that take whole rows.
                    give_packet(here, at, float_bits(values[e]), number)

    return matmul_chains_give


def computes(recorder: Recorder, result: object) -> bool:
    """Whether the latest launch adds the chains of all of a result, and of nothing else, so that :func:`give` can give it."""
    launch = recorder.latest
    if launch is None or launch.kernel.kernel is not matmul_chains or not isinstance(result, Tensor):
        return False
    tiles = launch.arguments[8]
    outputs = [(output.address, output.shape) for output in launch.outputs]
    return outputs == [(result.address, result.shape)] and 16 * tiles >= result.shape[1]


def give(recorder: Recorder, n_peers: int, places: Sequence[int]) -> None:
    """Let the latest launch also give its results to ``n_peers`` other owners.  places: the further arguments of
    ``matmul_chains_give``."""
    launch = recorder.latest
    assert launch is not None
    chains, out, _, _, residual, add, _, _, end, n_rows, _, _, *rest = launch.arguments
    kernel = matmul_chains_give(*launch.kernel.constants, n_peers)
    recorder.replace_latest(kernel, (chains, out, residual, add, end, n_rows, *rest, *places))
