"""Answers drafted by an assistant, which reads what the target remembers: token for token equal to those without it, whatever
the cache's type; its logits against float64; the share of drafts kept; the targets it fits."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import engine
from engine.cache.types import BLOCK
from engine.errors import GGUFError, ModelError, UsageError
from engine.gguf.file import GGUF, read_gguf
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.assistant import AssistantDraft
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from engine.synthetic.shape import Gemma4Shape, Shape
from engine.synthetic.shapes import shapes
from tests.conftest import golden, shared_model
from tests.cpu.test_quantized_cache import contents, rotated
from tests.speculative.test_drafted_answers import PROMPTS, options_do_not_show
from tests.tiers import few

N_CTX = 320
COUNT = 16
PLAIN = SpeculationParams(enabled=False)
KINDS = ["f16", "q8_0", "q4_0", "i12"]


def load(kind: str, n_ctx: int = N_CTX, assistant: bool = True) -> engine.LLM:
    target, draft = (shared_model(f"pycoder-gemma4{part}-Q4_K_M.gguf") for part in ("", "-assistant"))
    options: dict[str, Any] = {"draft_model": draft} if assistant else {}
    return engine.load(target, device="cpu", n_ctx=n_ctx, n_threads=1, cache_type=kind, **options)


@pytest.fixture(scope="module")
def llms() -> dict[str, engine.LLM]:
    """The trained model and its assistant, with each type of cache."""
    return {kind: load(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def llm(llms: dict[str, engine.LLM]) -> engine.LLM:
    return llms["f16"]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts from the first step on, and no pauses."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)


def source(llm: engine.LLM) -> AssistantDraft:
    assert isinstance(llm.draft, AssistantDraft)
    return llm.draft


def drafts(llm: engine.LLM, known: list[int], count: int) -> list[int]:
    """The tokens proposed after ``known``, in greedy decoding."""
    llm.read(known[:-1])
    greedy = Sampler(SamplerParams(temperature=0.0), llm.config.n_vocab)
    return source(llm).propose(known, count, greedy, 0.0, False, llm.sequence).tokens


# --- the text --------------------------------------------------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_do_not_show(llms: dict[str, engine.LLM], kind: str, temperature: float) -> None:
    """Drafts of the assistant, and drafts that are never right."""
    llm = llms[kind]
    n = llm.config.n_vocab
    drafted = accepted = 0
    for i, prompt in enumerate(PROMPTS if kind == "f16" else PROMPTS[::5]):
        given: dict[str, Any] = {"max_tokens": COUNT, "temperature": temperature, "seed": i, "ignore_eos": True}
        expected = llm.complete(prompt, speculation=PLAIN, **given).ids
        params = SpeculationParams(draft_max=(0, 1, 3, 15)[i % 4], lookup=i % 5 == 4)
        found = llm.complete(prompt, speculation=params, **given)
        assert found.ids == expected
        assert found.speculation is not None
        assert set(found.speculation.drafted_by) <= {"assistant", "lookup", "history"}
        drafted += found.speculation.drafted_by["assistant"]
        accepted += found.speculation.accepted_by["assistant"]
        if i % 4 == 0:
            first = len(llm.tokenize(prompt))
            script = source(llm).script = np.full(N_CTX, -1, np.int32)
            script[first : first + COUNT] = [(token + 1) % n for token in expected]
            wrong = llm.complete(prompt, speculation=SpeculationParams(draft_max=3), **given)
            script[first : first + COUNT] = expected
            right = llm.complete(prompt, speculation=SpeculationParams(draft_max=3), **given)
            source(llm).script = None
            assert wrong.ids == right.ids == expected
            assert wrong.speculation is not None and right.speculation is not None
            assert wrong.speculation.drafted > 0 == wrong.speculation.accepted
            assert right.speculation.accepted == right.speculation.drafted > COUNT / 2
    assert drafted > 50 and accepted > drafted / 5


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(
    "params", [{"sequential": True}, {"draft_p_min": 0.5}, {"accept": "ratio"}, {"accept": "p-min"}, {"draft_min": 2}]
)
def test_options(llms: dict[str, engine.LLM], params: dict[str, Any], kind: str) -> None:
    options_do_not_show(llms[kind], params, COUNT)


def test_drafting_ends_where_it_is_unsure(llm: engine.LLM) -> None:
    known = llm.tokenize(PROMPTS[6])
    llm.read(known[:-1])
    greedy = Sampler(SamplerParams(temperature=0.0), llm.config.n_vocab)
    lengths = [
        len(source(llm).propose(known, 10, greedy, p, False, llm.sequence).tokens) for p in (0.0, 0.3, 0.6, 0.9, 1.0)
    ]
    assert lengths[0] == 10 and lengths == sorted(lengths, reverse=True) and lengths[-1] < 10


def test_log_probabilities_are_the_same(llm: engine.LLM) -> None:
    given: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0.8, "seed": 1, "logprobs": 3}
    expected = llm.complete(PROMPTS[1], speculation=PLAIN, **given)
    assert llm.complete(PROMPTS[1], **given).logprobs == expected.logprobs  # every bit


@pytest.mark.parametrize("kind", few(KINDS))
def test_without_the_assistant_the_answer_is_the_same(llms: dict[str, engine.LLM], kind: str) -> None:
    bare = load(kind, assistant=False)
    assert bare.draft is None and bare.cache_bytes == llms[kind].cache_bytes
    for temperature in (0.0, 1.0):
        given: dict[str, Any] = {"max_tokens": COUNT, "temperature": temperature, "seed": 9}
        assert bare.complete(PROMPTS[0], **given).ids == llms[kind].complete(PROMPTS[0], **given).ids


@pytest.mark.parametrize("kind", few(KINDS))
def test_prompts_of_one_token_and_the_end_of_the_context(kind: str, tmp_path: Path) -> None:
    """The first token has no token before it from which an assistant could continue."""
    target = make_model(tmp_path / "t.gguf", "tiny-gemma4-e", "Q8_0", seed=1)
    assistant = make_model(tmp_path / "a.gguf", "tiny-gemma4-e-assistant", "Q8_0", seed=1)
    llm: Any = engine.load(target, device="cpu", n_ctx=48, n_threads=1, cache_type=kind, draft_model=assistant)
    assert [llm.model.drafter._memories[il] for il in range(2)] == [2, 3]  # the tail has none
    for temperature in (0.0, 1.0):
        for prompt in ([7], [7, 8], [3] * 47):
            given: dict[str, Any] = {"temperature": temperature, "seed": 2, "ignore_eos": True}
            llm.reset()
            expected = llm.complete(prompt, speculation=PLAIN, **given)
            for most in (1, 15):
                llm.reset()
                found = llm.complete(prompt, speculation=SpeculationParams(draft_max=most), **given)
                assert (found.ids, found.finish_reason) == (expected.ids, "length")
                assert len(prompt) + len(found.ids) >= 48
                assert found.speculation is not None and (found.speculation.drafted > 0 or len(prompt) == 47)


# --- how many drafts are kept ----------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(("temperature", "kept"), [(0.0, 0.68), (0.8, 0.56)])
def test_acceptance(llms: dict[str, engine.LLM], temperature: float, kept: float) -> None:
    """llama.cpp keeps this share of three drafts; with a quantized cache it should be about the same."""
    shares = {}
    items = golden("models", "golden", "pycoder-gemma4-Q4_K_M.json")["items"]
    for kind, llm in llms.items():
        drafted = accepted = 0
        for i, item in enumerate(items):
            params = SpeculationParams(draft_max=3, draft_min=3)
            given: dict[str, Any] = {"max_tokens": 48, "temperature": temperature, "seed": i, "speculation": params}
            found = llm.complete(item["prompt_tokens"], **given)
            assert found.speculation is not None
            drafted, accepted = drafted + found.speculation.drafted, accepted + found.speculation.accepted
        assert drafted > 100
        shares[kind] = accepted / drafted
    assert abs(shares["f16"] - kept) < 0.12
    assert min(shares["q8_0"], shares["q4_0"], shares["i12"]) > 0.8 * shares["f16"]


# --- prompts that are resumed ----------------------------------------------------------------------------------


def test_a_conversation_is_drafted_as_a_fresh_start(llm: engine.LLM) -> None:
    """Whatever has been read, drafted and rolled back before, drafts are those of a model that has read nothing else."""
    fresh = load("f16")
    rng = np.random.default_rng(1)
    first = llm.tokenize(PROMPTS[16] * 3)
    answer = llm.complete(first, max_tokens=30, temperature=0, ignore_eos=True).ids
    assistant: Any = llm.model.drafter
    longer, kept = first + answer, assistant.hidden.shape[1]
    assert kept == 64 and len(first) > kept + 10
    prompts = [
        longer,  # all but the last token is in the cache
        longer + llm.tokenize(PROMPTS[3], special=False),
        first,  # the same again
        first[:-20],  # a part of it
        longer[:-10] + rng.integers(10, 500, 7).tolist(),
        first[: len(first) - kept - 3] + [100, 101],  # longer ago than outputs are kept
        [*first[:5], 77],
        [first[0], 77],
        longer,
    ]
    for prompt in prompts:
        fresh.reset()
        expected = drafts(fresh, prompt, 5)
        assert drafts(llm, prompt, 5) == expected
        assert drafts(llm, prompt, 5) == expected  # what drafts have stored there does not matter
        given: dict[str, Any] = {"max_tokens": 8, "temperature": 0.8, "seed": 3, "ignore_eos": True}
        params = SpeculationParams(draft_max=4, draft_min=4)
        fresh.reset()
        one, other = (each.complete(prompt, speculation=params, **given) for each in (llm, fresh))
        assert one.ids == other.ids and one.speculation is not None and other.speculation is not None
        assert one.speculation.accepted_by == other.speculation.accepted_by


# --- its logits ------------------------------------------------------------------------------------------------

Tensors = dict[str, np.ndarray]


def tensors(path: Path) -> Tensors:
    """float64."""
    return {
        name: gguf.quants.dequantize(tensor.data.reshape(*tensor.shape[:-1], -1), tensor.type)
        .astype(np.float64)
        .reshape(tensor.shape)
        for name, tensor in read_gguf(path).tensors.items()
    }


def rms(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return normed


def rotate(x: np.ndarray, position: int, base: float, factors: np.ndarray | float) -> np.ndarray:
    """Pairs (i, i + n / 2) of x [..., n]."""
    half = x.shape[-1] // 2
    angle = position * base ** (-np.arange(half) / half) / factors
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def in_8_bits(q: np.ndarray) -> np.ndarray:
    """Each block of 32 of q [heads, d], rotated, as integers of at most 127 times a scale."""
    turned = rotated(q)
    step = np.repeat(np.abs(turned.reshape(len(q), -1, BLOCK)).max(axis=2), BLOCK, axis=1) / 127
    return rotated(np.rint(turned / step) * step)


def draft(
    shape: Shape, w: Tensors, e: np.ndarray, h: np.ndarray, position: int, caches: dict[bool, Any], quantized: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and h of the next draft, in float64, by the assistant's definition: e is the target's (scaled) embedding of the
    token, h its output one position before; caches[sliding]: keys and values [positions, heads, d]; ``quantized``: queries
    have 8 bits."""
    assert shape.gemma4 is not None
    x = w["nextn.pre_projection.weight"] @ np.concatenate([e, h])
    for il, slides in enumerate(shape.gemma4.sliding(shape.n_layer)):
        blk = f"blk.{il}."
        d = shape.gemma4.head_dim_sliding if slides else shape.head_dim
        q = (w[blk + "attn_q.weight"] @ rms(x, w[blk + "attn_norm.weight"])).reshape(shape.n_head, d)
        q = rms(q, w[blk + "attn_q_norm.weight"])
        q = rotate(q, position, 1e4, 1.0) if slides else rotate(q, position, shape.rope_base, w["rope_freqs.weight"])
        q = in_8_bits(q) if quantized else q
        # Its position is a token that is not stored yet: a window contains it and the positions before it that fill it.
        low = max(0, position - shape.window + 1) if slides else 0
        keys, values = (part[low:position] for part in caches[slides])
        o = []
        for head in range(shape.n_head):
            g = head // (shape.n_head // keys.shape[1])
            score = keys[:, g] @ q[head]
            p = np.exp(score - score.max())
            o.append(p @ values[:, g] / p.sum())
        a = w[blk + "attn_output.weight"] @ np.concatenate(o)
        y = x + rms(a, w[blk + "post_attention_norm.weight"])
        u = rms(y, w[blk + "ffn_norm.weight"])
        gate, up = w[blk + "ffn_gate.weight"] @ u, w[blk + "ffn_up.weight"] @ u
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        f = rms(w[blk + "ffn_down.weight"] @ (gate * up), w[blk + "post_ffw_norm.weight"])
        x = (y + f) * w[blk + "layer_output_scale.weight"]
    y = rms(x, w["output_norm.weight"])
    return w["token_embd.weight"] @ y, w["nextn.post_projection.weight"] @ y


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random targets and assistants in float32, so that only the cache is rounded."""
    folder = tmp_path_factory.mktemp("tiny")
    names = [f"tiny-gemma4{kind}{part}" for kind in ("", "-e") for part in ("", "-assistant")]
    return {name: make_model(folder / f"{name}.gguf", name, "F32", seed=4) for name in names}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["tiny-gemma4", "tiny-gemma4-e"])
@pytest.mark.parametrize("kinds", [("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("f16", "q4_0")])
def test_logits_against_float64(tiny: dict[str, Path], name: str, kinds: tuple[str, str]) -> None:
    """Chains of drafts within the window and beyond, from the outputs after the trunk's last norm."""
    assistant = f"{name}-assistant"
    llm: Any = engine.load(
        tiny[name],
        device="cpu",
        n_ctx=N_CTX,
        n_threads=1,
        cache_type_k=kinds[0],
        cache_type_v=kinds[1],
        draft_model=tiny[assistant],
    )
    trunk, w, shape = tensors(tiny[name]), tensors(tiny[assistant]), shapes()[assistant]
    memories = {True: 2, False: 3} if name == "tiny-gemma4-e" else {True: 4, False: 5}
    ids = np.random.default_rng(6).integers(0, llm.config.n_vocab, 130).tolist()
    table = trunk["token_embd.weight"]
    for n in (1, 2, 32, 33, 130):
        llm.reset()
        logits = llm.logits(ids[:n])[-1]
        h = np.array(llm.model.drafter.hidden[0, (n - 1) % 64], np.float64)
        # It is what the head reads.
        z = table @ h
        assert np.abs(30 * np.tanh(z / 30) - logits).max() < 1e-4
        caches = {slides: unrolled(llm.cache.layers[il], n) for slides, il in memories.items()}
        llm.model.drafter.stand(n)
        token, far, quantized = 11, [], kinds[0].startswith("q")
        for step in range(4):
            found = llm.model.drafter.forward(token, n + step, llm.model.sequence)
            e = table[token] * np.sqrt(table.shape[1])
            expected, following = draft(shape, w, e, h, n, caches, quantized)
            # The rounding of float32 is 2e-6.  An element of a query that is rounded to another integer would show as an
            # error of a thousandth; there is none here.
            assert np.abs(found - expected).max() < 1e-5 * expected.std()
            moved, _ = draft(shape, w, e, h, n + step, caches, quantized) if step else (expected, None)
            far.append(np.abs(moved - expected).max() / expected.std())
            h, token = following, int(np.argmax(expected))
        assert n == 1 or max(far) > 0.1  # else the test would not depend on the position


def unrolled(layer: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of positions 0 to n - 1; for those that the window has passed, arbitrary ones."""
    keys, values = contents(layer)
    return keys[:n], values[:n]


# --- targets ---------------------------------------------------------------------------------------------------


def refused(target: Path, assistant: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        engine.load(target, device="cpu", n_ctx=64, n_threads=1, draft_model=assistant, **options)
    sentence = str(caught.value)
    assert str(assistant) in sentence and str(target) in sentence and "\n" not in sentence
    return sentence


def test_an_assistant_of_another_model_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    said = refused(tiny["tiny-gemma4-e"], tiny["tiny-gemma4-assistant"])
    assert "models of 256 dimensions and 289 tokens" in said and "is gemma4 of 288 and 289" in said
    assert "use that model's assistant" in said
    other = make_model(tmp_path / "llama.gguf", "tiny-qwen3", "Q8_0")
    assert "is qwen3 of 256 and 289" in refused(other, tiny["tiny-gemma4-assistant"])
    # KV heads that its layers do not find in the target.
    for gemma, head_dim in (
        (Gemma4Shape(3, 64, 3, n_shared=3, n_embd_out=256), 96),
        (Gemma4Shape(3, 32, 2, n_shared=3, n_embd_out=256), 96),
    ):
        wrong = Shape("gemma4-assistant", 3, 160, 6, 1, head_dim, 256, 289, 512, 1e6, 1e-6, window=32, gemma4=gemma)
        path = make_model(tmp_path / "wrong.gguf", wrong, "Q8_0")
        assert "layer 0 of" in refused(tiny["tiny-gemma4"], path)
    gemma = Gemma4Shape(3, 64, 2, n_shared=3, n_embd_out=256)
    wrong = Shape("gemma4-assistant", 3, 160, 4, 1, 64, 256, 289, 512, 1e6, 1e-6, window=32, gemma4=gemma)
    assert "layer 2 of" in refused(tiny["tiny-gemma4"], make_model(tmp_path / "wrong.gguf", wrong, "Q8_0"))


def test_other_tokens_are_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    data = tiny["tiny-gemma4-assistant"].read_bytes()
    assert data.count(b"<|im_end|>") > 0
    path = tmp_path / "other.gguf"
    path.write_bytes(data.replace(b"<|im_end|>", b"<|im_mid|>"))
    said = refused(tiny["tiny-gemma4"], path)
    assert "cannot draft for" in said and "'<|im_mid|>' in it and '<|im_end|>' in the model" in said


def test_a_draft_file_whose_architecture_is_no_text(tiny: dict[str, Path], tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "gemma4-assistant")
    writer.kv_data[0].clear()
    writer.add_array("general.architecture", [1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(GGUFError, match="general.architecture"):
        engine.load(tiny["tiny-gemma4"], device="cpu", n_ctx=64, draft_model=tmp_path / "odd.gguf")


def test_tables_of_angles_are_the_targets_own_where_they_are_the_same(tiny: dict[str, Path]) -> None:
    llm: Any = engine.load(
        tiny["tiny-gemma4"], device="cpu", n_ctx=64, n_threads=1, draft_model=tiny["tiny-gemma4-assistant"]
    )
    assistant = llm.model.drafter
    assert len({id(rotary) for rotary in llm.model._rotaries.values()}) == 2
    assert assistant._rotaries.keys() == llm.model._rotaries.keys()
    assert all(rotary is llm.model._rotaries[rope] for rope, rotary in assistant._rotaries.items())


def test_an_assistant_without_a_tensor(tiny: dict[str, Path], tmp_path: Path) -> None:
    data = tiny["tiny-gemma4-assistant"].read_bytes()
    for name in (b"nextn.post_projection.weight", b"blk.2.attn_q.weight", b"blk.1.layer_output_scale.weight"):
        assert data.count(name) == 1
        path = tmp_path / "short.gguf"
        path.write_bytes(data.replace(name, b"x" + name[1:]))
        with pytest.raises(ModelError) as caught:
            engine.load(tiny["tiny-gemma4"], device="cpu", n_ctx=64, draft_model=path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_devices(tiny: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="abacus"):
        engine.load(tiny["tiny-gemma4"], device="cpu", draft_model=tiny["tiny-gemma4-assistant"], device_draft="abacus")


def test_it_counts_what_a_draft_reads(tiny: dict[str, Path]) -> None:
    llm: Any = engine.load(tiny["tiny-gemma4"], device="cpu", n_ctx=64, draft_model=tiny["tiny-gemma4-assistant"])
    assistant: GGUF = read_gguf(tiny["tiny-gemma4-assistant"])
    assert source(llm).cost == assistant.n_bytes == llm.model.drafter.n_bytes
