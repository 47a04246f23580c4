"""The grammar of calls in JSON that the prompt describes."""

from engine.serving.calls.qwen3 import Qwen3Calls
from engine.serving.formats.generic import Generic


class GenericCalls(Qwen3Calls):
    """Calls as :class:`engine.serving.formats.generic.Generic` reads them: the name and the arguments in JSON."""

    FORMAT = Generic
