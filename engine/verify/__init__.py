"""The comparison of a model on the CPU with the same model on a GPU, bit by bit."""
