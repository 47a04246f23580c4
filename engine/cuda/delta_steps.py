"""The gated delta rule for steps of several sequences, after ``engine/cuda/delta_inputs.py``.

Formula: that of ``engine/cuda/delta_net.py``: u, out, and the state after a segment that ends.
Shapes: positions, sequences, out and the memory as in ``engine/cuda/delta_net.py``; vectors, values, records and runs as in
    ``engine/cuda/delta_inputs.py``.
Who owns what: a block owns 16 rows of the state of one head, for one run or several, 8 lanes one of them: lane l the elements
    4 l + 32 m .. + 3.  The state and the deltas before the pass are in flight before ``wait_for_inputs``.
Reduction order: that of ``engine/cpu/delta_net.py``; the sums over tokens are computed in each of the 8 lanes.
Bytes moved, for each run: 4 d^2 n_v read, and as many written if it ends a segment; the deltas of the segment, 4 n_v d for
    each token; for each row 12 n_v d, and the vectors and records d / 16 times from the cache.
"""

import numpy as np
from numba import cuda

from engine.cache.recurrent import SEGMENT
from engine.cuda import delta_net
from engine.cuda.delta_inputs import LEFT, NUMBERS, RECORD
from engine.cuda.delta_net import COLUMNS, LANES, THREADS, make_dot, make_put, make_take
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    fma,
    let_next_begin,
    load4,
    stream4,
    wait_for_inputs,
)
from engine.cuda.runs import nth_run
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32


FEW_RUNS = 8
"""Runs that have blocks of their own in any pass; of passes of more rows, a quarter of the rows have."""


def grid(d: int, n_v: int, rows: int) -> tuple[int, int, int]:
    """The grid of ``delta_steps``.  Passes of many rows may have a run for each row, or fewer, longer runs."""
    return delta_net.grid(d, n_v, min(rows, max(FEW_RUNS, rows // 4)))


@kernel(*[F32P] * 3, I32P, I32P, *[i32] * 3, *[F32P] * 4, threads=THREADS, blocks=5, cached=True)
def delta_steps(d: int, grouped: bool = False) -> KernelCode:
    """Compute deltas and results of each head, and its state after a segment that ends; ``grouped``: neighbouring heads share
    a key.

    Arguments: vectors, values, records, positions, sequences, n_k, rows, segments, states, keys, deltas, out.  No kernel of
    the same chain writes the positions, the sequences, the states or the deltas: they are read before ``wait_for_inputs``.
    Grid: ``grid(d, n_v, rows)``, blocks of ``THREADS``.
    """
    n_runs = d // 32
    n_state = 4 * n_runs
    dot, take_stored, put = make_dot(d, load4), make_take(d, stream4), make_put(d)

    @cuda.jit
    def delta_steps(vectors, values, records, positions, sequences, n_k, rows, segments, states, keys, deltas, out):
        let_next_begin()
        state = cuda.local.array(n_state, np.float32)
        u = cuda.local.array(SEGMENT, np.float32)
        chains = cuda.local.array(4, np.float32)
        # The masks tell the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        lane, own = I(thread & 31), I(thread & (LANES - 1))
        head, n_v = I(cuda.blockIdx.y & 0xFFFF), I(cuda.gridDim.y)
        column = I((cuda.blockIdx.x & 0xFFFF) * COLUMNS + (thread >> 3))
        number = I(cuda.blockIdx.z & 0xFFFF)
        begin, n_rows = nth_run(positions, sequences, rows, number, lane)
        if begin < 0:
            # There are fewer runs than blocks.
            wait_for_inputs()
            return
        while begin >= 0:
            place, sequence = positions[begin], sequences[begin]
            group = I(U(head) // U(U(n_v) // U(n_k)) if grouped else U(head) % U(n_k))
            segment, token = I(U(place) // U(SEGMENT)), I(U(place) % U(SEGMENT))
            index = I(U(segment) % U(segments))
            state_size, first_segment = np.int64(I(n_v * (d * d))), np.int64(I(sequence * segments))
            own_states = advance(
                states, state_size * first_segment + np.int64(I(head * (d * d) + I(column * d + 4 * own)))
            )
            run_keys = advance(keys, I(I(I(I(sequence * segments) * SEGMENT) * n_k + group) * d) + 4 * own)
            own_deltas = advance(deltas, I(I(I(I(sequence * segments) * SEGMENT) * n_v + head) * d) + column)
            for k in range(n_state):
                state[k] = F(0.0)
            if segment > 0:
                take_stored(state, advance(own_states, state_size * index))
            for i in range(SEGMENT):
                u[i] = F(0.0)
                if i < token:
                    u[i] = own_deltas[I(I(I(index * SEGMENT + i) * n_v) * d)]
            z = advance(vectors, I(I(I(begin * n_k) + group) * (2 * d)) + 4 * own)
            v = advance(values, I(I(I(begin * n_v) + head) * d) + column)
            record = advance(records, I(I(I(begin * n_v) + head) * RECORD))
            to = advance(out, I(I(I(begin * n_v) + head) * d) + column)

            wait_for_inputs()
            result = F(0.0)
            for _ in range(n_rows):
                value = v[0]
                numbers = load4(record, NUMBERS)
                total, rate = bits_float(I(numbers[0])), bits_float(I(numbers[1]))
                of_key, of_query = dot(state, advance(z, d), chains), dot(state, z, chains)
                # Adding -0 changes nothing, and makes the product of the first token, which has no others before it, an fma.
                read, result = fma(total, of_key, F(-0.0)), fma(total, of_query, F(-0.0))
                for i in range(0, SEGMENT, 2):
                    words = load4(record, 2 * i)
                    for k in range(2):
                        read = fma(bits_float(I(words[2 * k])), u[i + k], read)
                        result = fma(bits_float(I(words[2 * k + 1])), u[i + k], result)
                delta = (value - read) * rate
                for i in range(SEGMENT):
                    u[i] = delta if i == token else u[i]
                result = fma(bits_float(I(numbers[2])), delta, result)
                if own == 0:
                    own_deltas[I(I(I(index * SEGMENT + token) * n_v) * d)] = delta
                    to[0] = result
                token = I(token + 1)
                if token == SEGMENT:
                    # The segment ends: its tokens become part of the state.
                    for k in range(n_state):
                        state[k] = state[k] * total
                    own_keys = advance(run_keys, I(I(I(index * SEGMENT) * n_k) * d))
                    for i in range(0, SEGMENT, 4):
                        left = load4(record, LEFT + i)
                        for j in range(4):
                            share = bits_float(I(left[j])) * u[i + j]
                            for m in range(n_runs):
                                words = load4(own_keys, 32 * m)
                                for k in range(4):
                                    state[4 * m + k] = fma(share, bits_float(I(words[k])), state[4 * m + k])
                            own_keys = advance(own_keys, I(n_k * d))
                    index = I(0) if index == segments - 1 else I(index + 1)
                    put(advance(own_states, state_size * index), state)
                    for i in range(SEGMENT):
                        u[i] = F(0.0)
                    token = I(0)
                z, v = advance(z, I(n_k * (2 * d))), advance(v, I(n_v * d))
                record, to = advance(record, I(n_v * RECORD)), advance(to, I(n_v * d))
            # Copies of the last row, each by one of the lanes of the row of the state.
            end, last = I(begin + n_rows + own), I(place + n_rows - 1)
            to = advance(to, I(own * I(n_v * d)))
            while end < rows and sequences[end] == sequence and positions[end] == last:
                to[0] = result
                end, to = I(end + LANES), advance(to, I(LANES * I(n_v * d)))
            number = I(number + cuda.gridDim.z)
            begin, n_rows = nth_run(positions, sequences, rows, number, lane)

    return delta_steps
