"""Kernels to write: ``python -m exercises check k1``."""

NAMES = ("add", "gate", "blend", "warp_sums", "choose", "rms_norm", "rotate", "quantize", "product", "chunk")
"""The kernels, in rising order."""
