"""The grammar of calls of gpt-oss."""

from engine.tools.calls.tagged import NONE, Tagged
from engine.tools.formats.gpt_oss import GptOss

_CHANNEL, _MESSAGE, _NEXT = "<|channel|>", "<|message|>", "<|start|>assistant"


class GptOssCalls(Tagged):
    """Calls as :class:`engine.tools.formats.gpt_oss.GptOss` reads them: messages whose arguments are JSON.

    Where the tag after a call ends the answer, as it does in the vocabulary of gpt-oss, there is no second call.
    """

    FORMAT = GptOss

    def forced(self, thought: str, text: str = "") -> str:
        following, call = self.rules.text(_NEXT), self._call()
        before = "" if thought == NONE else f"({self._text(['analysis'])} {following})* "
        calls = call + (f" ({following} {call})*" if self._goes_on else "")
        if not text:
            return before + calls
        head = f"{self.rules.text(_CHANNEL)} {self.rules.plain('final')} {self.rules.text(_MESSAGE)}"
        return f"{before}({calls} | {head} {self.rules.rule(text)})"

    def free(self) -> str:
        channels = ["analysis", "commentary", "final"]
        call, text = self._call(), self._text(channels)
        message = self.rules.rule(f"{text} | {call}") if self._goes_on else text
        return f"({message} {self.rules.text(_NEXT)})* ({self._text(channels, last=True)} | {call})"

    @property
    def _goes_on(self) -> bool:
        """Whether another message may follow a call."""
        return self.several and not self.rules.ends("<|call|>")

    def _text(self, channels: list[str], last: bool = False) -> str:
        """A text in one of the channels and the tag after it; last: an end of the answer may stand for the tag."""
        names = " | ".join(map(self.rules.plain, channels))
        head = f"{self.rules.text(_CHANNEL)} ({names}) {self.rules.text(_MESSAGE)}"
        body = self.rules.until("<|end|>")
        if last:
            body = f"({body} | {self.rules.untagged()})"
        return self.rules.rule(f"{head} {body}")

    def _call(self) -> str:
        """A call and the tag after it.  The function may be named in the role or in the channel."""
        text, bodies = self.rules.text, []
        for function in self.functions:
            to = text(f" to=functions.{function.name}")
            in_role = f"{to} {text(_CHANNEL)} {self.rules.plain('commentary')}"
            in_channel = f"{text(_CHANNEL)} {self.rules.plain('commentary')} {to}"
            json = f'" " ({text("<|constrain|>")})? "json" {text(_MESSAGE)}'
            arguments = self.rules.json(function.schema, function.strict)
            bodies.append(f"({in_role} | {in_channel}) {json} {arguments} {text('<|call|>')}")
        return self.alternatives(bodies)
