"""The cost of a quantized key-value cache in quality: distributions of next tokens, against those with a float16 cache.

    python -m benchmarks.cache_types MODEL.gguf --text FILE [--types q8_0 q4_0 q8_0/q4_0] [-n 1024]

Every token of the text is predicted from those before it.  For each pair of types (keys/values, or one for both) it
prints the mean and the largest Kullback-Leibler divergence from the result with a float16 cache, in nats, how often the
likeliest token is the same, and the perplexities.
"""

import argparse
from pathlib import Path

import numpy as np

import engine

TYPES = ("f32", "q8_0", "q8_0/q4_0", "q4_0/q8_0", "q4_0")


def log_probabilities(path: str, ids: list[int], device: str, types: str) -> np.ndarray:
    """The log-probabilities after each token: float64 [len(ids), n_vocab]."""
    k, _, v = types.partition("/")
    llm = engine.load(path, device=device, n_ctx=len(ids), cache_type_k=k, cache_type_v=v or k)
    logits = llm.logits(ids).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def perplexity(logs: np.ndarray, ids: list[int]) -> float:
    """The perplexity of all tokens but the first."""
    return float(np.exp(-logs[np.arange(len(ids) - 1), ids[1:]].mean()))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="a file with text of a kind the model was trained on")
    parser.add_argument("--types", nargs="+", default=list(TYPES), help="pairs such as q8_0/q4_0, or one for both")
    parser.add_argument("-n", type=int, default=1024, help="tokens of the text (1024)")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    llm = engine.load(args.model, device=args.device, n_ctx=64)
    ids = llm.tokenize(args.text.read_text())[: args.n]
    plain = log_probabilities(args.model, ids, args.device, "f16")
    print(f"{llm.config.name}, {len(ids)} tokens; perplexity with f16 {perplexity(plain, ids):.4f}")
    print(f"{'keys/values':<12} {'mean KL':>10} {'99 %':>9} {'largest':>9} {'same top':>9} {'perplexity':>11}")
    for types in args.types:
        logs = log_probabilities(args.model, ids, args.device, types)
        kl = np.maximum((np.exp(plain) * (plain - logs)).sum(axis=1), 0.0)
        same = (plain.argmax(axis=1) == logs.argmax(axis=1)).mean()
        spread = f"{kl.mean():10.2e} {np.quantile(kl, 0.99):9.2e} {kl.max():9.2e}"
        print(f"{types:<12} {spread} {same:9.2%} {perplexity(logs, ids):11.4f}", flush=True)


if __name__ == "__main__":
    main()
