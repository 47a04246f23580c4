"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("bitmirror")
except PackageNotFoundError:
    __version__ = "0+unknown"
