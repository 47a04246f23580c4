"""Parts of requests of Anthropic's interface."""

HELLO = [{"role": "user", "content": "def add(a, b):"}]

WEATHER = {"name": "weather", "description": "Tells it", "input_schema": {"type": "object", "properties": {}}}
CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "How is it?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I must look.", "signature": "x"},
            {"type": "redacted_thinking", "data": "y"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "Say it."},
            {"type": "text", "text": "Briefly."},
        ],
    },
    {"role": "system", "content": "100 tokens are left."},
]
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"}
SYSTEM = [
    BILLING,
    {"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "kind."},
]
