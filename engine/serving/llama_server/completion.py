"""``POST /completion``: the continuation of a text or of token ids, in llama-server's words."""

import math
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from engine.checks import described
from engine.decode.generation import request_of
from engine.sampling.params import SamplerParams
from engine.sampling.token_logprob import TokenLogprob
from engine.serving.answer import Answer, Ask, Delta
from engine.serving.aside import aside
from engine.serving.errors import Refusal
from engine.serving.exchange import Plan, respond
from engine.serving.fields import Fields, is_token_id
from engine.serving.limits import Limits
from engine.serving.llama_server.progress import Progress
from engine.serving.llama_server.shapes import error_body, parameters
from engine.serving.llama_server.tokens import MOST_IDS
from engine.serving.openai.shapes import logprob_of, timings_of
from engine.serving.permitted import read_permitted
from engine.serving.sampling import clamped, read_bias, read_repetitions, read_stop
from engine.serving.served import Served
from engine.serving.streams import merged, sse
from engine.serving.structured import read_form
from engine.tools.formats.events import Content
from engine.tools.formats.plain import plain

if TYPE_CHECKING:
    from engine.llm import LLM

STOP_TYPES = {"stop": "eos", "length": "limit"}


async def completion(request: Request) -> Response:
    """Continue a prompt, as a whole or as a stream.

    ``prompt`` is a text, a list of token ids, or a list of both.  Control tokens in its texts are recognized, since a prompt
    is what a chat template has written; ``parse_special: false`` takes them as text.
    """
    return await respond(request, _read, _failed, error=error_body)


async def _read(fields: Fields, served: Served) -> Plan:
    ask = await read_ask(fields, served.llm, served.limits)
    progress = None
    if fields.flag("return_progress", False) and fields.flag("stream", False):
        progress = ask.options["on_prefill"] = Progress()
    tokens = fields.flag("return_tokens", False)
    whole = partial(_whole, served=served, ask=ask, with_tokens=tokens)
    return Plan([ask], whole, partial(_chunks, served=served, ask=ask, progress=progress))


async def read_ask(fields: Fields, llm: "LLM", limits: Limits) -> Ask:
    """What a request asks for."""
    ids = await aside(fields.size, partial(read_prompt, fields, llm))
    n_predict = fields.whole("n_predict", fields.whole("max_tokens", -1, -1), -2)
    top = fields.whole("n_probs", 0, 0, limits.top_logprobs, "--top-logprobs")
    default = SamplerParams(**llm.sampling)
    options: dict[str, Any] = {
        "max_tokens": clamped(None if n_predict < 0 else n_predict, llm, len(ids)),
        "seed": fields.whole("seed", -1, -1, 2**64 - 1),
        "temperature": fields.number("temperature", default.temperature),
        "top_k": fields.whole("top_k", default.top_k, -1),
        "top_p": fields.number("top_p", default.top_p, 0),
        "min_p": fields.number("min_p", default.min_p, 0, 1),
        "typical_p": fields.number("typical_p", default.typical_p, 0),
        "repeat_penalty": fields.number("repeat_penalty", default.repeat_penalty, 0.01, 10),
        "repeat_last_n": fields.whole("repeat_last_n", default.repeat_last_n, -1),
        "presence_penalty": fields.number("presence_penalty", default.presence_penalty, -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", default.frequency_penalty, -2, 2),
        "ignore_eos": fields.flag("ignore_eos", False),
        "logit_bias": read_bias(fields, llm, limits),
        **read_repetitions(fields, llm, limits),
        "grammar": await read_form(fields, llm, limits),
    }
    stop, permitted = read_stop(fields, limits), read_permitted(fields, llm)
    slot = fields.whole("id_slot", -1, -1, len(llm.slots) - 1, "-np")
    return Ask(ids, plain, options, logprobs=top or None, stop=stop, permitted=permitted, slot=slot)


def read_prompt(fields: Fields, llm: "LLM") -> list[int]:
    """The token ids of the prompt.  Raises Refusal."""
    value, special = fields.required("prompt"), fields.flag("parse_special", True)
    if isinstance(value, dict):  # llama-server's form of a prompt with images
        given = Fields(value, fields.name("prompt"))
        if given.get("multimodal_data"):
            raise given.refuse(
                "multimodal_data", "is not supported by this server, which reads text only: leave it out"
            )
        value = given.required_text("prompt_string")
    parts = [value] if isinstance(value, str) else fields.items("prompt", MOST_IDS, f"at most {MOST_IDS}")
    if len(parts) > 1 and all(isinstance(part, str) for part in parts):
        raise fields.refuse("prompt", "must be one prompt: send several in requests of their own")
    ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, str):
            ids += llm.tokenizer.encode(part, add_special=i == 0, parse_special=special, at_least=llm.check_least)
        elif is_token_id(part, llm.config.n_vocab):
            ids.append(part)
        else:
            problem = f"must be a text or a token id, 0 to {llm.config.n_vocab - 1}, not {described(part)}"
            raise fields.refuse(f"prompt[{i}]", problem)
    if not ids:
        raise fields.refuse("prompt", "is empty: give a text or token ids")
    return ids


# --- answers -------------------------------------------------------------------------------------------------------


async def _whole(answers: list[Answer], served: Served, ask: Ask, with_tokens: bool) -> Mapping[str, Any]:
    deltas = [delta async for _, delta in merged(answers)]
    ids = [id for delta in deltas for id in delta.ids]
    text = "".join(map(_text, deltas))
    body: dict[str, Any] = {"index": 0, "content": text, "tokens": ids if with_tokens else []}
    body |= _end(answers[0], served, ask, "\n" in text)
    return body | _probabilities([token for delta in deltas for token in delta.logprobs], served, ask)


async def _chunks(answers: list[Answer], served: Served, ask: Ask, progress: Progress | None) -> AsyncIterator[str]:
    lines = False
    if progress is not None:
        async for told in progress.until(answers[0]):
            yield sse(_chunk(answers[0], "", []) | {"prompt_progress": told})
    async for answer, delta in merged(answers):
        if not delta.ids and not _text(delta):
            continue
        lines = lines or "\n" in _text(delta)
        yield sse(_chunk(answer, _text(delta), delta.ids) | _probabilities(delta.logprobs, served, ask))
    yield sse({"index": 0, "content": "", "tokens": []} | _end(answers[0], served, ask, lines))


def _chunk(answer: Answer, text: str, ids: list[int]) -> dict[str, Any]:
    """What an object of a stream says besides what it may have of its own."""
    chunk: dict[str, Any] = {"index": 0, "content": text, "tokens": ids, "stop": False}
    slot = request_of(answer.generation).slot
    return chunk | {"id_slot": slot, "tokens_predicted": answer.n_completion, "tokens_evaluated": answer.n_prompt}


def _end(answer: Answer, served: Served, ask: Ask, lines: bool) -> dict[str, Any]:
    """What the last object of an answer says besides its text; lines: whether that has a line break."""
    settings = parameters(request_of(answer.generation).sampler.params)
    given = ask.options["logit_bias"] | dict.fromkeys(
        sorted(served.llm.tokenizer.eog_ids) if ask.options["ignore_eos"] else (), -math.inf
    )
    # As in llama-server, null stands for minus infinity.
    biases = [{"token": id, "bias": bias if math.isfinite(bias) else None} for id, bias in given.items()]
    more = {
        "seed": answer.generation.seed,
        "n_predict": ask.options["max_tokens"],
        "stop": list(ask.stop),
        "ignore_eos": ask.options["ignore_eos"],
        "logit_bias": biases,
    }
    return {
        "id_slot": request_of(answer.generation).slot,
        "stop": True,
        "model": served.name,
        "tokens_predicted": answer.n_completion,
        "tokens_evaluated": answer.n_prompt,
        "generation_settings": {**settings, **more},
        "prompt": served.llm.tokenizer.decode(ask.prompt, special=True),
        "has_new_line": lines,
        "truncated": False,
        "stop_type": "word" if answer.stop_text else STOP_TYPES[answer.finish_reason],
        "stopping_word": answer.stop_text,
        "tokens_cached": answer.n_prompt + answer.n_completion,
        "timings": timings_of(answer),
    }


def _text(delta: Delta) -> str:
    return "".join(event.text for event in delta.events if isinstance(event, Content))


def _probabilities(tokens: list[TokenLogprob], served: Served, ask: Ask) -> dict[str, Any]:
    """The log-probabilities of tokens, if they were asked for."""
    if ask.logprobs is None:
        return {}

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return logprob_of(served.llm.tokenizer, token)

    found = [entry(token) | {"top_logprobs": [entry(other) for other in token.top]} for token in tokens]
    return {"completion_probabilities": found}


def _failed(refusal: Refusal) -> str:
    return sse(error_body(refusal))
