"""bitmirror: an LLM inference engine that gives the same bits on every path.

>>> import engine
>>> llm = engine.load(n_ctx=256)                            # the model that ships with the package
>>> llm.complete("def add(a, b):\\n    return", max_tokens=3, temperature=0).text
' a + b'
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.decode.generation import Generation
    from engine.decode.timings import Timings
    from engine.errors import (
        ContextError,
        DeviceError,
        DeviceMemoryError,
        EngineError,
        FetchError,
        GGUFError,
        ModelError,
        TemplateError,
        TokenizerError,
        UsageError,
    )
    from engine.grammar.grammar import Grammar
    from engine.llm import LLM
    from engine.loading import load
    from engine.options import ChatOptions, Options
    from engine.replay import Verification
    from engine.sampling.token_logprob import TokenLogprob
    from engine.sampling_params import SamplingParams
    from engine.speculative.params import SpeculationParams
    from engine.stream import Stream
    from engine.text.template.chat import ChatTemplate
    from engine.tools.call import ToolCall
    from engine.trace.trace import Trace
    from engine.version import __version__

__all__ = [
    "LLM",
    "ChatOptions",
    "ChatTemplate",
    "ContextError",
    "DeviceError",
    "DeviceMemoryError",
    "EngineError",
    "FetchError",
    "GGUFError",
    "Generation",
    "Grammar",
    "ModelError",
    "Options",
    "SamplingParams",
    "SpeculationParams",
    "Stream",
    "TemplateError",
    "Timings",
    "TokenLogprob",
    "TokenizerError",
    "ToolCall",
    "Trace",
    "UsageError",
    "Verification",
    "__version__",
    "load",
]

_HOMES = {
    "LLM": "llm",
    "load": "loading",
    "Generation": "decode.generation",
    "Grammar": "grammar.grammar",
    "SamplingParams": "sampling_params",
    "Stream": "stream",
    "Timings": "decode.timings",
    "TokenLogprob": "sampling.token_logprob",
    "Verification": "replay",
    "Options": "options",
    "ChatOptions": "options",
    "ToolCall": "tools.call",
    "Trace": "trace.trace",
    "SpeculationParams": "speculative.params",
    "ChatTemplate": "text.template.chat",
    "__version__": "version",
} | {name: "errors" for name in __all__ if name.endswith("Error")}


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Names of the API, imported on first use: ``--help`` must not wait for a compiler to load."""
        if name not in _HOMES:
            raise AttributeError(f"module 'engine' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"engine.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return __all__
