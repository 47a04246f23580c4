"""CPU kernels, one file per operation; GPU kernels mirror them file by file and name by name."""

from engine.compile.numba_cache import install

install()  # before the first kernel is declared
