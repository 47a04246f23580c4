"""Built-in chat templates for models whose file has none: the turns of each family, those of DeepSeek-V4 with tools."""

from collections.abc import Container
from pathlib import Path

_SYSTEM_FIRST = (
    "{% if messages and messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] | trim + '\\n\\n' %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
)

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_DEEPSEEK4 = Path(__file__).with_name("deepseek4.jinja").read_text(encoding="utf-8")

TEMPLATES: dict[str, str] = {
    "chatml": _CHATML,
    "deepseek4": "{% set release = '' %}" + _DEEPSEEK4,
    "deepseek4-0731": "{% set release = '0731' %}" + _DEEPSEEK4,
    "gemma": (
        "{{ bos_token }}" + _SYSTEM_FIRST + "{% for message in messages %}"
        "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}"
        "{{ (system if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "llama2": (
        "{% if messages and messages[0]['role'] == 'system' %}"
        "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
        "{% set messages = messages[1:] %}"
        "{% else %}{% set system = '' %}{% endif %}"
        "{% for message in messages %}"
        "{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'] | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{{ message['content'] | trim + '<|eot_id|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}" + _SYSTEM_FIRST + "{% for message in messages %}"
        "{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + (system if loop.first else '') + message['content'] + '[/INST]' }}"
        "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "phi3": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "qwen": (
        "{% if messages and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}" + _CHATML
    ),
    "zephyr": (
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
}


def template_of(architecture: object, name: object, tokens: Container[str]) -> str | None:
    """The source of the template of a model whose file has none, by the values of ``general.architecture`` and
    ``general.name`` and its tokens; None if no template is known to be its own."""
    if architecture != "deepseek4" or "<｜User｜>" not in tokens or "<｜Assistant｜>" not in tokens:
        return None
    return TEMPLATES["deepseek4-0731" if "0731" in str(name) else "deepseek4"]
