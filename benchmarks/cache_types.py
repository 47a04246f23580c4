"""The cost of a key-value cache's type in quality: distributions of next tokens, against those with a float32 cache.

    python -m benchmarks.cache_types MODEL.gguf --text FILE [--types i12 q8_0 q8_0/q4_0] [-n 1024] [--depth 0] [--float]

Every token of the text is predicted from those before it.  For each pair of types (keys/values, or one for both) it
prints the mean and the largest Kullback-Leibler divergence from the result with the type of ``--base``, in nats, how often
the likeliest token is the same, and the perplexities.  ``--depth`` tokens are read before those that are measured; the text
is repeated if it is too short.

The products of a quantized model round activations to int8, and a change of a last bit may be rounded to another integer.
That hides what an accurate type costs.  ``--float`` measures a copy of the model whose weights are float32.
"""

import argparse
import tempfile
from pathlib import Path

import gguf
import numpy as np

import engine

TYPES = ("f16", "i12", "q8_0", "i8", "q8_0/q4_0", "q4_0/q8_0", "q4_0")


def write_float_copy(path: str, out: Path) -> None:
    """Write a model with its weights as float32: those of a quantized matrix are what it represents."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data.astype(np.float32, copy=False))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def log_probabilities(path: str, before: list[int], ids: list[int], device: str, types: str) -> np.ndarray:
    """The log-probabilities after each token of a text that follows another: float64 [len(ids), n_vocab]."""
    k, _, v = types.partition("/")
    with engine.load(path, device=device, n_ctx=len(before + ids), cache_type_k=k, cache_type_v=v or k) as llm:
        if before:
            llm.prefill(before)
            logits = np.stack([llm.step(token) for token in ids]).astype(np.float64)
        else:
            logits = llm.logits(ids).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def perplexity(logs: np.ndarray, ids: list[int]) -> float:
    """The perplexity of all tokens but the first."""
    return float(np.exp(-logs[np.arange(len(ids) - 1), ids[1:]].mean()))


def compare(path: str, args: argparse.Namespace) -> None:
    """Print the table for one file."""
    llm = engine.load(path, device=args.device, n_ctx=64)
    text = llm.tokenize(args.text.read_text())
    llm.close()
    text *= -(-(args.depth + args.n) // len(text)) if args.depth else 1
    before, ids = text[: args.depth], text[args.depth : args.depth + args.n]
    plain = log_probabilities(path, before, ids, args.device, args.base)
    weights = "float32 weights" if args.float else "its own weights"
    counts = f"{len(ids)} tokens behind {len(before)}"
    print(f"{llm.config.name}, {weights}, {counts}; perplexity with {args.base} {perplexity(plain, ids):.4f}")
    print(f"{'keys/values':<12} {'mean KL':>10} {'99 %':>9} {'largest':>9} {'same top':>9} {'perplexity':>11}")
    for types in args.types:
        logs = log_probabilities(path, before, ids, args.device, types)
        kl = np.maximum((np.exp(plain) * (plain - logs)).sum(axis=1), 0.0)
        same = (plain.argmax(axis=1) == logs.argmax(axis=1)).mean()
        spread = f"{kl.mean():10.2e} {np.quantile(kl, 0.99):9.2e} {kl.max():9.2e}"
        print(f"{types:<12} {spread} {same:9.2%} {perplexity(logs, ids):11.4f}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="a file with text of a kind the model was trained on")
    parser.add_argument("--types", nargs="+", default=list(TYPES), help="pairs such as q8_0/q4_0, or one for both")
    parser.add_argument("--base", default="f32", help="what they are compared with (f32)")
    parser.add_argument("-n", type=int, default=1024, help="tokens of the text (1024)")
    parser.add_argument("--depth", type=int, default=0, help="tokens before those (0)")
    parser.add_argument("--float", action="store_true", help="measure a copy of the model with float32 weights")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if not args.float:
        compare(args.model, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "float.gguf"
        write_float_copy(args.model, copy)
        compare(str(copy), args)


if __name__ == "__main__":
    main()
