"""A conversation in which the model calls a function: python examples/call_tools.py"""

import bitmirror

city = {"type": "object", "properties": {"city": {"enum": ["Berlin", "Paris"]}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": city}}]
forced = {"type": "function", "function": {"name": "weather"}}
params = bitmirror.SamplingParams(max_tokens=64, seed=1)
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
with bitmirror.load(n_ctx=1024) as llm:
    asked = llm.chat(messages, tools=tools, tool_choice=forced, chat_template="chatml", sampling_params=params)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in asked.tool_calls]
    answer = llm.chat([*messages, asked.message, *results], chat_template="chatml", sampling_params=params)
print([(call.name, call.arguments) for call in asked.tool_calls], asked.finish_reason, repr(answer.content))
