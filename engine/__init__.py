"""bitmirror: an LLM inference engine that gives the same bits on every path.

>>> import engine
>>> llm = engine.load()                                     # the model that ships with the package
>>> print(llm.complete("def add(a, b):", max_tokens=8, temperature=0).text)  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.decode.generation import Generation
    from engine.decode.timings import Timings
    from engine.llm import LLM
    from engine.loading import load

__all__ = ["LLM", "Generation", "Timings", "load"]

_HOMES = {"LLM": "llm", "load": "loading", "Generation": "decode.generation", "Timings": "decode.timings"}


def __getattr__(name: str) -> Any:
    """Names of the API, imported on first use: ``--help`` must not wait for a compiler to load."""
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"engine.{_HOMES[name]}"), name)
