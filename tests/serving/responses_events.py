"""What every stream of Responses must be."""

import re
from typing import Any


def check(events: Any) -> None:
    """What the client's accumulator does not: every item begins, has its text in pieces, and ends, one after the other."""
    kinds = "".join(
        f"{each.type.removeprefix('response.').split('.')[0]}.{each.type.split('.')[-1]} "
        for each in events
        if hasattr(each, "output_index")
    )
    text = r"content_part.added (output_text.delta )*output_text.done content_part.done "
    thought = text.replace("output_text", "reasoning_text")
    call = r"(function_call_arguments.delta )*function_call_arguments.done "
    assert re.fullmatch(f"(output_item.added ({text}|{thought}|{call})output_item.done )*", kinds), kinds
    numbers = [each.output_index for each in events if hasattr(each, "output_index")]
    assert numbers == sorted(numbers)
    items = {each.output_index: each.item for each in events if each.type == "response.output_item.done"}
    for index, item in items.items():
        own = [each for each in events if getattr(each, "output_index", None) == index]
        assert {each.item_id for each in own if hasattr(each, "item_id")} <= {item.id}
        pieces = "".join(each.delta for each in own if each.type.endswith(".delta"))
        assert pieces == (item.arguments if item.type == "function_call" else item.content[0].text)
