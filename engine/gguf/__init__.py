"""GGUF files: bytes to validated metadata and mapped tensors, and the block formats of their weights."""
