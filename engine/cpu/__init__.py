"""CPU kernels, one file per operation; GPU kernels mirror them file by file and name by name."""

# This import must run before the first kernel is declared.
import engine.compile.numba_cache  # noqa: F401
