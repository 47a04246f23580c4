"""The element types of the cache of a model, if none are given."""

from engine.cache.types import CACHE_TYPES, F16, Types
from engine.gguf.file import GGUF
from engine.gguf.quants import FORMATS
from engine.models.config import ModelConfig
from engine.models.needs import cache_specs

I8, I12 = (Types(CACHE_TYPES[name], CACHE_TYPES[name]) for name in ("i8", "i12"))


def default_types(config: ModelConfig, gguf: GGUF) -> Types:
    """The element types of keys and values that a file has by default: a function of the file alone, so that every device
    computes the same bits.

    - i8, if most bytes of the layers' weights are quantized. Products with such weights round every activation to 8 bits, so
      a cache of 8 bits adds little to the divergence from float32 (``docs/kv-quantization.md``).
    - i12, if they are float32, float16, or bfloat16: nothing else is rounded to 8 bits.
    - f16, if a layer stores latents or compressed rows, or has heads that cannot be divided into blocks of 32 elements, and
      if the model makes embeddings.
    """
    if config.pooling or not config.causal:
        return F16
    quantized, floats = 0, 0
    for name, tensor in gguf.tensors.items():
        if name.startswith("blk.") and len(tensor.shape) > 1 and tensor.type in FORMATS:
            if FORMATS[tensor.type].quantized:
                quantized += tensor.nbytes
            else:
                floats += tensor.nbytes
    types = I8 if quantized > floats else I12
    refused = any(spec.refusal(types, config.architecture) for spec in cache_specs(config, 1))
    return F16 if refused else types
