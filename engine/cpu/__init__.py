"""CPU kernels: the mirrors of ``engine/cuda``, file by file and name by name."""
