"""Limits of requests; each is a flag of ``bitmirror serve``, and each is named when it refuses a request."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The most that a client may ask for.

    Attributes
    ----------
    header_seconds : float
        Seconds in which the header of a request must arrive.
    body_bytes : int
        Bytes of a body, counted while it is read.
    body_seconds : float
        Seconds in which a body must arrive.
    json_depth : int
        Levels of nesting in a body.
    json_items : int
        Commas and opening brackets in a body, those in texts included. About as many values are parsed, during which nothing
        else is done.
    messages, tools, stop, logit_bias, prompts : int
        Entries of these lists of a request.
    n : int
        Answers to one prompt.
    top_logprobs : int
        Log-probabilities per token.
    schema_bytes : int
        Bytes of a JSON schema, a grammar or a regular expression.
    queue : int
        Requests that wait until others are done; further ones are refused.
    reader_seconds : float
        Seconds after which a client that reads nothing of its answer is disconnected.
    backlog : int
        Tokens of an answer that wait to be sent, after which its computation pauses.
    """

    header_seconds: float = 10.0
    body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    json_depth: int = 64
    json_items: int = 1 << 18
    messages: int = 4096
    tools: int = 128
    stop: int = 16
    logit_bias: int = 300
    prompts: int = 1024
    n: int = 8
    top_logprobs: int = 20
    schema_bytes: int = 64 << 10
    queue: int = 512
    reader_seconds: float = 60.0
    backlog: int = 256
