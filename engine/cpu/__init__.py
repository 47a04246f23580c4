"""The CPU backend: kernels that are the mirrors of those in ``engine/cuda``, and how threads run them."""

# This import must run before the first kernel is declared.
import engine.compile.numba_cache  # noqa: F401
