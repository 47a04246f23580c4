"""Compare a model here and in llama.cpp, in one process: speed, and the distance between the log-probabilities.

    python -m benchmarks.beside_llama_cpp speed MODEL.gguf
    python -m benchmarks.beside_llama_cpp distance MODEL.gguf GOLDEN.json

Needs ``pip install llama-cpp-python`` (a development tool, not a dependency).  GOLDEN.json holds greedy continuations of
an independent run: a list "greedy" of objects with prompt_ids, ids and, per step, top_logprobs ([id, value] pairs).
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import engine
from engine.cpu.embed import dequantize
from engine.gguf.file import read_gguf

PROMPT, ANSWER, REPEATS = 256, 64, 3


def speed(path: str) -> None:
    """Alternates the two engines; prints the rates of each repetition and the ratio of the medians."""
    import llama_cpp

    ours = engine.load(path, n_ctx=1024)
    ours.compile()
    threads = ours.n_threads
    theirs = llama_cpp.Llama(
        path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
    )
    ids = np.random.default_rng(0).integers(5, ours.config.n_vocab - 5, PROMPT).tolist()
    rates: dict[str, list[tuple[float, float]]] = {"ours": [], "llama.cpp": []}
    for _ in range(REPEATS + 1):
        ours.reset()
        begun = time.perf_counter()
        ours.prefill(ids)
        read = time.perf_counter()
        for token in ids[:ANSWER]:
            ours.step(token)
        rates["ours"].append((PROMPT / (read - begun), ANSWER / (time.perf_counter() - read)))
        theirs.reset()
        begun = time.perf_counter()
        theirs.eval(ids)
        read = time.perf_counter()
        for token in ids[:ANSWER]:
            theirs.eval([token])
        rates["llama.cpp"].append((PROMPT / (read - begun), ANSWER / (time.perf_counter() - read)))
    medians = {}
    for name, pairs in rates.items():
        medians[name] = np.median(np.array(pairs[1:]), axis=0)  # the first round warms both up
        print(f"{name:10} prompt {medians[name][0]:7.1f} t/s   answer {medians[name][1]:6.1f} t/s")
    ratio = medians["ours"] / medians["llama.cpp"]
    print(f"{'ratio':10} prompt {ratio[0]:7.2f}       answer {ratio[1]:6.2f}")


def distance(path: str, golden: str) -> None:
    """Mean absolute difference, over the golden top tokens, between each two of five computations of the model."""
    import llama_cpp

    items = json.loads(Path(golden).read_text(encoding="utf-8"))["greedy"]
    top = [pairs for item in items for pairs in item["top_logprobs"]]
    ids = np.array([[i for i, _ in pairs] for pairs in top])
    runs = {"golden": np.array([[value for _, value in pairs] for pairs in top])}

    def add(name: str, logits_of: Any) -> None:
        rows = [logits_of(i["prompt_ids"] + i["ids"])[len(i["prompt_ids"]) - 1 : -1] for i in items]
        wide = np.concatenate(rows).astype(np.float64)
        wide -= wide.max(axis=1, keepdims=True)
        wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
        runs[name] = np.take_along_axis(wide, ids, axis=1)

    for flash in (True, False):
        llama = llama_cpp.Llama(path, n_ctx=1024, logits_all=True, flash_attn=flash, verbose=False)

        def one_by_one(tokens: list[int], llama: Any = llama) -> np.ndarray:
            llama.reset()
            for token in tokens:
                llama.eval([token])
            scores: np.ndarray = np.array(llama.scores[: len(tokens)])
            return scores

        add(f"llama.cpp, flash attention {'on' if flash else 'off'}", one_by_one)
    add("ours", engine.load(path, n_ctx=1024).logits)
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "float32.gguf"
        write_float32(path, wide)
        add("ours on float32 weights and activations", engine.load(wide, n_ctx=1024, cache_type="f32").logits)
    for name, values in runs.items():
        print(f"{name:42}", *(f"{np.abs(values - other).mean():.4f}" for other in runs.values()))


def write_float32(source: str, target: Path) -> None:
    """Writes the model with every weight widened to float32, so that activations are not quantized."""
    model = read_gguf(source)
    writer = gguf.GGUFWriter(target, model.require("general.architecture", "str"))
    kinds = {kind.name.lower().replace("int", "i").replace("float", "f"): kind for kind in gguf.GGUFValueType}
    names = {"string": "str", "ui8": "u8", "ui16": "u16", "ui32": "u32", "ui64": "u64"}
    kinds = {names.get(name, name): kind for name, kind in kinds.items()}
    for key, value in model.metadata.items():
        if key == "general.architecture":
            continue
        if model.kinds[key].endswith("[]"):
            writer.add_array(key, value if isinstance(value, list) else np.asarray(value).tolist())
        else:
            writer.add_key_value(key, value, kinds[model.kinds[key]])
    for tensor in model.tensors.values():
        writer.add_tensor(tensor.name, dequantize(tensor.type, tensor.data).reshape(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if sys.argv[1] == "speed":
        speed(*sys.argv[2:])
    else:
        distance(*sys.argv[2:])
