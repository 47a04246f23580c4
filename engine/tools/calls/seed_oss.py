"""The grammar of calls of Seed OSS."""

from engine.tools.calls.qwen3_coder import Qwen3CoderCalls
from engine.tools.formats.seed_oss import SeedOss


class SeedOssCalls(Qwen3CoderCalls):
    """Calls as :class:`engine.tools.formats.seed_oss.SeedOss` reads them: strings as plain text, other values as JSON."""

    FORMAT = SeedOss
    OPENINGS = FORCED = ("<seed:tool_call>",)
    CALL, CALL_END = "\n<function={}>\n", "</function>\n</seed:tool_call>"
    NAME_END, LINE_END = ">", ""
