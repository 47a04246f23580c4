"""8. The kernel that the engine uses.

    python examples/ladder/8_engine.py

Against step 7, ``engine/cuda/products/matmul.py``

* multiplies by up to 16 rows of activations, and up to three matrices in one launch, for all formats;
* limits the registers, so that three blocks fit on a multiprocessor;
* requests its first record before it waits for the kernel that computes the activations (``wait_for_inputs``), and lets the
  next kernel begin before it ends itself (``let_next_begin``), so that the memory is never idle between two kernels;
* keeps two records in flight if the matrix has few rows, and gives each unit a warp of its own if it has very few.

None of this changes the order of the sums.
"""

from ladder import product

from engine.cuda.products.matmul import matmul_quantized, warps

step = matmul_quantized(("Q4_K",), 1, False, False)
MATRICES = ("records", "records", "records", "out", "out", "out", None)  # one matrix, its result, no residual
SIZES = ("tiles", "tiles", "rows", 0, 0, "units")
ACTIVATIONS = ("tensor_q", "tensor_d", "tensor_sums", 1, None)  # one row, no bias

if __name__ == "__main__":
    arguments = (*MATRICES, *SIZES, *ACTIVATIONS)
    product(__doc__, step, lambda rows, units: (rows // 16, 32 * warps(units, False)), arguments)
