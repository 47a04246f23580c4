"""The grammar of calls in JSON that the prompt describes."""

from engine.tools.calls.qwen3 import Qwen3Calls
from engine.tools.formats.generic import Generic


class GenericCalls(Qwen3Calls):
    """Calls as :class:`engine.tools.formats.generic.Generic` reads them: the name and the arguments in JSON."""

    FORMAT = Generic
