"""The version of the installed distribution, and that of the arithmetic."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("bitmirror")
except PackageNotFoundError:
    __version__ = "0+unknown"

ARITHMETIC = 2
"""The version of the laws that define every result: formulas, orders of additions, roundings.  Engines with the same number
give the same bits, whatever their own versions are.

1: chunks of attention joined one after another; states of delta nets after each token.
2: chunks joined in groups of eight; states of delta nets after each 16 positions (``docs/laws.md``)."""
