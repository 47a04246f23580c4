"""Refusals: why a request is not answered, independent of the interface it came through."""

from collections.abc import Mapping, MutableMapping
from typing import Any

from engine.checks import shown
from engine.errors import ContextError, DeviceError, EngineError, NotFinite

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_supported_error",
    503: "overloaded_error",
}
"""What a status means, in the words of the interfaces."""


MOST_NOTED = 300
"""Characters of a refusal that the log has."""


class Refusal(Exception):
    """A request that is not answered.

    Attributes
    ----------
    message : str
        One sentence that says what to do.
    status : int
        HTTP status.
    kind : str
        The kind of error, as the interfaces name it.
    param : str or None
        The field of the body that is wrong, such as ``messages[2].content``.
    code : str or None
        A word for programs, such as ``context_length_exceeded``.
    retry_after : int or None
        Seconds after which the request may succeed.
    more : mapping of str to int
        Numbers that belong to the error, in llama-server's words: of a prompt that is too long, ``n_prompt_tokens`` and
        ``n_ctx``.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        more: Mapping[str, int] | None = None,
    ) -> None:
        # A name that the client gave may hold half a character, which UTF-8 cannot express.
        message, param = _written(message), None if param is None else _written(param)
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = KINDS.get(status, "server_error")
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.more = dict(more or {})

    def headers(self) -> Mapping[str, str]:
        """The headers of the answer."""
        # Clients repeat requests after 5xx and 429 by themselves; only a busy server wants that.
        return {"x-should-retry": "false"} if self.retry_after is None else {"retry-after": str(self.retry_after)}


def _written(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def note(scope: MutableMapping[str, Any], refusal: Refusal) -> None:
    """Let the line of the log say why a request was refused, or why its answer ended early."""
    scope.setdefault("state", {}).setdefault("notes", {})["refused"] = shown(refusal.message, MOST_NOTED)


def refusal_of(error: Exception, fields: Mapping[str, object] | None = None) -> Refusal:
    """The refusal that an exception amounts to.

    fields: the body of the request.  An error of the engine begins with the name of the argument that is out of range; if the
    body has a field of this name, it is the one to blame.
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, ContextError):
        more = {}
        if error.n_prompt is not None and error.n_ctx is not None:
            more = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
        return Refusal(str(error), code="context_length_exceeded", more=more)
    if isinstance(error, DeviceError):
        return Refusal(str(error), 503, retry_after=60)
    if isinstance(error, NotFinite):
        return Refusal(str(error), 500)
    if isinstance(error, EngineError):
        first = str(error).partition(" ")[0]
        return Refusal(str(error), param=first if fields is not None and first in fields else None)
    return Refusal("the request could not be answered because of a defect of this program; the log has details.", 500)
