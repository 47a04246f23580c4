"""From the instructions and items of a request to the messages of OpenAI's chat."""

from engine.checks import described
from engine.serving.conversation import read_call, read_content, read_message
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.responses.sealed import opened
from engine.tools.turns import Message


def read_messages(fields: Fields, limits: Limits) -> list[Message]:
    """The conversation as the messages of OpenAI's chat, with the instructions first.

    What the model has said between two messages of others is several items, but one message, as ``/v1/chat/completions``
    would have returned it.  Only messages that follow each other stay apart.
    """
    instructions = fields.text("instructions")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    value = fields.required("input")
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list):
        raise fields.refuse("input", f"must be a text or a list of items, not {described(value)}")
    if not value:
        raise fields.refuse("input", "is empty: give a text or at least one item")
    names: dict[str, str] = {}
    before = ""
    for item in fields.objects("input", limits.messages, "--messages"):
        kind = item.text("type", "message")
        message = _message(item, kind, names)
        if message is None:
            continue
        if message["role"] == "assistant" and before and not before == kind == "message":
            _join(messages[-1], message)
        else:
            messages.append(message)
        before = kind if message["role"] == "assistant" else ""
    return messages


def _message(item: Fields, kind: str, names: dict[str, str]) -> Message | None:
    """An item as a message, None if it says nothing; notes in ``names`` which functions are called."""
    if kind == "message":
        return read_message(item)
    if kind == "reasoning":
        thought = _thought(item)
        return {"role": "assistant", "content": "", "reasoning_content": thought} if thought else None
    if kind == "function_call":
        id = item.required_text("call_id")
        names[id] = item.required_text("name")
        return {"role": "assistant", "content": "", "tool_calls": [read_call(item, id)]}
    if kind == "function_call_output":
        item.required("output")
        text, name = read_content(item, "output"), item.text("name")
        if name and item.get("call_id") is None:
            # No call asked for this result, and some templates take a result only after its call.
            return {"role": "user", "content": f"{name}: {text}"}
        id = item.required_text("call_id")
        result: Message = {"role": "tool", "tool_call_id": id, "content": text}
        if id in names:
            result["name"] = names[id]
        return result
    if kind == "item_reference":
        raise item.refuse("type", "is 'item_reference', and this server stores no items: send the item itself")
    known = "messages, thoughts (reasoning), function_call and function_call_output"
    raise item.refuse("type", f"is {kind[:40]!r}, and this server reads {known} only: leave the item out")


def _thought(item: Fields) -> str:
    """The text of a thought.  A summary is none, and what another service has sealed only that service can read."""
    texts = [part.text("text", "") for part in item.objects("content", 65536, "at most 65536")]
    return "".join(texts) or opened(item.text("encrypted_content", ""))


def _join(message: Message, more: Message) -> None:
    """Adds what the model said next to a message of it; further texts and thoughts begin on a new line."""
    for name in ("content", "reasoning_content"):
        if texts := [each[name] for each in (message, more) if each.get(name)]:
            message[name] = "\n".join(texts)
    if "tool_calls" in more:
        message["tool_calls"] = [*message.get("tool_calls", ()), *more["tool_calls"]]
