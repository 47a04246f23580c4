"""One file per family of architectures: the formula of its layer, its metadata keys, its entries of the registry."""
