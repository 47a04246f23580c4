"""Matrix products on a GPU, dense and of experts, and the layouts they read."""
