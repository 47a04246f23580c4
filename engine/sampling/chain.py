"""The order in which samplers run."""

ORDER = "penalties;dry;top_k;typ_p;top_p;min_p;xtc;temperature"
"""The samplers in their order, in llama.cpp's words."""

ORDERS = (ORDER, ORDER.replace("top_k", "top_n_sigma;top_k"))
"""The ways to write that order: llama.cpp also has a sampler that is off by default."""
