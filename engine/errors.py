"""The errors shown to users: each message is one sentence that says what is wrong and what to do."""

from pathlib import Path


class EngineError(Exception):
    """Base of every error that a user can fix; ``str(error)`` is one sentence, shown without a traceback."""


class GGUFError(EngineError):
    """A GGUF file that violates the format or requests something impossible.

    Attributes
    ----------
    path : Path
        The file.
    field : str
        The header field, metadata key or tensor.
    offset : int or None
        The byte position in the file; None if a rule spans several places.
    problem : str
        What is wrong there.
    """

    def __init__(self, path: Path | str, field: str, offset: int | None, problem: str) -> None:
        self.path = Path(path)
        self.field = field
        self.offset = offset
        self.problem = problem
        where = f" at byte {offset}" if offset is not None else ""
        super().__init__(f"{self.path}: {field}{where}: {problem}")


class ModelError(EngineError):
    """A well-formed file whose model this engine cannot run: architecture, tensor format, or shapes that disagree."""


class NotFinite(ModelError):
    """Logits that are infinite or NaN: a damaged file, or arithmetic that overflowed."""


class TokenizerError(EngineError):
    """A vocabulary that cannot be used, or token ids outside it."""


class TemplateError(EngineError):
    """A chat template that is missing, too large or unsafe, or that refuses the given messages."""


class ContextError(EngineError):
    """A prompt that does not fit the context, or a cache that cannot be rewound that far."""


class UsageError(EngineError):
    """An argument outside its range, or arguments that contradict one another."""


class NoToken(UsageError):
    """Nothing is left to choose the next token from, because of biases, logits processors or a grammar."""


class FetchError(EngineError):
    """A model that could not be found, fetched or verified."""


class DeviceError(EngineError):
    """A GPU that is missing, too old, out of memory, or that reported an error."""
