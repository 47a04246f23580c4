"""The GPU backend: kernels that give the bits of ``engine/cpu``, in files of the same names where one file is enough."""
