"""One file per family of architectures: the formula of a layer, the metadata keys, and the entries in the registry."""
