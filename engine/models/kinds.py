"""GGUF files that are not a supported model: their kinds, and error messages that say what to do."""

from engine.checks import shown
from engine.errors import ModelError
from engine.gguf.file import GGUF

PARTS = {
    "mmproj": "a projector (mmproj), which turns images or sound into what a model reads: give the file of the model, which "
    "runs without it.",
    "adapter": "an adapter (LoRA), which changes a model and is none by itself: give the file of a model into which it has "
    "been merged, such as by llama.cpp's llama-export-lora.",
    "imatrix": "an importance matrix (imatrix), which a model is quantized with: give the file of the model.",
    "vocab": "a vocabulary without weights: give a file of the whole model.",
}
"""The ends of the error messages for files that are not models, after "is ", by ``general.type``."""

OLLAMA = {"gptoss": "gpt-oss", "qwen25vl": "qwen2vl", "olmo3": "olmo2", "glm4moelite": "deepseek2"}
"""Architecture names that only Ollama uses, in files with its own tensor names and layouts, and the names in llama.cpp."""

NEAREST = {
    "afmoe": "qwen3moe",
    "baichuan": "llama",
    "bitnet": "llama",
    "chatglm": "glm4",
    "deci": "llama",
    "deepseek": "deepseek2",
    "deepseek2-ocr": "deepseek2",
    "eurobert": "bert",
    "exaone": "exaone4",
    "exaone-moe": "exaone4",
    "falcon": "llama",
    "gemma": "gemma2",
    "gptj": "llama",
    "gptneox": "llama",
    "grovemoe": "qwen3moe",
    "internlm2": "llama",
    "jamba": "qwen35",
    "jina-bert-v2": "bert",
    "jina-bert-v3": "bert",
    "mamba": "qwen35",
    "mamba2": "granitehybrid",
    "minicpm": "granite",
    "minicpm3": "deepseek2",
    "modern-bert": "bert",
    "mpt": "llama",
    "neo-bert": "bert",
    "nemotron": "arcee",
    "nomic-bert-moe": "nomic-bert",
    "olmo": "olmo2",
    "phi2": "phi3",
    "phimoe": "phi3",
    "qwen": "qwen2",
    "smallthinker": "qwen3moe",
    "stablelm": "llama",
    "starcoder": "llama",
    "starcoder2": "qwen2",
    "xverse": "llama",
}
"""Architectures of llama.cpp that the engine does not support, each with the supported one that is closest in origin or
design."""

_ADAPTER = (".lora_a", ".lora_b")
_IMATRIX = (".in_sum2", ".counts")
_VISION = ("v.", "a.", "mm.")


def check_kind(gguf: GGUF) -> None:
    """Raise ModelError for a file that is only a part of a model or an addition to one, or that only Ollama can read."""
    kind = kind_of(gguf)
    if kind in PARTS:
        raise ModelError(f"{gguf.path} is {PARTS[kind]}")
    name = gguf.metadata.get("general.architecture")
    if isinstance(name, str) and name in OLLAMA:
        raise ModelError(
            f"{gguf.path} was made by Ollama in a form of its own, with the architecture {name!r}: take a GGUF file of this "
            f"model that llama.cpp's converter has made, in which it is {OLLAMA[name]!r}."
        )


def kind_of(gguf: GGUF) -> str:
    """The kind of a file: a key of ``PARTS``, or "model".  It is determined from ``general.type``, or from the tensors."""
    # In a damaged file, the values may have any type.
    given, architecture = (gguf.metadata.get(f"general.{key}") for key in ("type", "architecture"))
    if isinstance(given, str) and given in PARTS:
        return given
    if isinstance(architecture, str) and architecture == "clip":
        return "mmproj"
    for kind, ends in (("adapter", _ADAPTER), ("imatrix", _IMATRIX)):
        if gguf.tensors and all(name.endswith(ends) for name in gguf.tensors):
            return kind
    return "vocab" if not gguf.tensors and "tokenizer.ggml.tokens" in gguf.metadata else "model"


def check_towers(gguf: GGUF) -> None:
    """Raise ModelError for a file of a text model that also contains the tensors of a vision or audio tower."""
    tower = next((name for name in sorted(gguf.tensors) if name.startswith(_VISION)), None)
    if tower is not None:
        raise ModelError(
            f"{gguf.path} was made by Ollama in a form of its own, with tensors for images or sound in the file of the text "
            f"({shown(tower)}): take a GGUF file of this model that llama.cpp's converter has made."
        )


def unsupported(gguf: GGUF, name: str, known: tuple[str, ...]) -> ModelError:
    """The error for an architecture ``name`` that is not one of the ``known`` ones.  The message names the closest one."""
    nearest = f"the nearest that runs is {NEAREST[name]}, and " if name in NEAREST else ""
    return ModelError(
        f"{gguf.path}: architecture {shown(name)!r} is not supported; {nearest}this engine runs {', '.join(known)}."
    )
