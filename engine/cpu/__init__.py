"""CPU kernels, one file per operation; GPU kernels will mirror them file by file and name by name."""
