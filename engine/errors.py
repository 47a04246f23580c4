"""The errors shown to users: each message is one sentence that says what is wrong and what to do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FLAGS = {
    "n_ctx": "-c",
    "batch_size": "-b",
    "parallel": "-np",
    "n_threads": "-t",
    "max_tokens": "-n",
    "cache_type": "--cache-type",
    "kv_budget": "--kv-budget",
    "cache_disk": "--cache-disk",
    "cache_disk_path": "--cache-disk-path",
    "device": "--device",
    "device_draft": "--device-draft",
    "gpu_memory": "--gpu-memory",
    "split_mode": "--split-mode",
    "tensor_split": "--tensor-split",
    "draft_model": "--draft-model",
    "ds4_rounding": "--ds4-rounding",
    "mtp": "--mtp",
    "pooling": "--pooling",
    "truncate": "--truncate",
}
"""The flags of the arguments that messages name."""

_ARGUMENT = re.compile(rf'\b({"|".join(FLAGS)})=(\.\.\.|True|False|"(\w+)")')

_by_flags = False


@contextmanager
def named_by_flags() -> Iterator[None]:
    """In a command line: let errors name flags, ``-c`` instead of ``n_ctx=...``."""
    global _by_flags
    before, _by_flags = _by_flags, True
    try:
        yield
    finally:
        _by_flags = before


def _flag(argument: re.Match[str]) -> str:
    """An argument as a flag."""
    name, value, text = argument.groups()
    flag = FLAGS[name]
    return flag.replace("--", "--no-") if value == "False" else f"{flag} {text}" if text else flag


class EngineError(Exception):
    """Base of every error that a user can fix; ``str(error)`` is one sentence, shown without a traceback."""

    # Messages name arguments as Python writes them, in one of the forms of _ARGUMENT.
    def __str__(self) -> str:
        return _ARGUMENT.sub(_flag, super().__str__()) if _by_flags else super().__str__()


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
    """A prompt that does not fit the context, or a cache that cannot be rewound that far.

    Attributes
    ----------
    n_prompt, n_ctx : int or None
        If a prompt does not fit: its tokens, or at least so many if it is too long to be tokenized, and the size of the
        context. Otherwise None.
    """

    def __init__(self, message: str, n_prompt: int | None = None, n_ctx: int | None = None) -> None:
        super().__init__(message)
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class UsageError(EngineError):
    """An argument outside its range, or arguments that contradict one another."""


class NoToken(UsageError):
    """Nothing is left to choose the next token from, because of biases, logits processors or a grammar."""


class FetchError(EngineError):
    """A model that could not be found, fetched or verified."""


class DeviceError(EngineError):
    """A GPU that is missing, too old, out of memory, or that reported an error."""


class DeviceMemoryError(DeviceError):
    """Memory of a GPU that is too small for a model, its cache or its intermediate results."""
