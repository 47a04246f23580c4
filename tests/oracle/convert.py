"""Small random models through llama.cpp's converter, against ``transformers``: ``python -m tests.oracle.convert --llama-cpp
FOLDER --table FILE`` in the root of the repository (``... convert llama qwen3`` for some).

A development script: next to this package it needs ``torch``, ``transformers``, ``safetensors``, ``sentencepiece``,
``protobuf`` and the sources of llama.cpp (``--llama-cpp``, or ``LLAMA_CPP`` in the environment).

Each model of ``models.py`` is written as a folder of Hugging Face with weights in bfloat16 (``folders.py``), converted in
several ways by the script of llama.cpp (``converter.py``), and loaded by this engine on the CPU with a cache of float32.
The logits of a prompt are compared with those that ``transformers`` computes in float64 from the same weights.  What fails
is a line of the table with its reason.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
import transformers
from gguf import GGUFReader, quants

import engine
from engine.gguf.file import GGUF
from engine.models.registry import ARCHITECTURES
from tests.copies import write_table
from tests.families import Tensors, rewritten
from tests.oracle import folders, make, tokens
from tests.oracle.encoders import CASES as ENCODERS
from tests.oracle.models import CASES, Case, Family, prompts

VARIANTS = {
    "f32": ["--outtype", "f32"],
    "bf16": ["--outtype", "bf16"],
    "split": ["--outtype", "f32", "--split-max-tensors", "9"],
    "qkv": ["--outtype", "f32", "--fuse-qkv"],
    "experts": ["--outtype", "f32", "--fuse-gate-up-exps"],
    "trunk": ["--outtype", "f32", "--no-nextn"],
    "mtp": ["--outtype", "f32", "--mtp"],
    "q8_0": ["--outtype", "q8_0"],
}
"""Options of the converter; "trunk" and "mtp" of models with a layer that drafts."""

PROMPT = 1
"""Which prompt is compared: 70 tokens, more than a window and a chunk of attention."""


COLUMNS = {
    "f32": "F32",
    "argmax": "same token",
    "drafts": "drafts",
    "bf16": "BF16",
    "split": "split",
    "qkv": "fused qkv",
    "experts": "fused experts",
    "trunk": "without drafts",
    "mtp": "in two files",
    "q8_0": "Q8_0",
    "ids": "ids",
}
"""Results and their titles."""

OLD = ("deepseek2-joined",)
"""Models that differ from others only in what older converters wrote."""


class Refused(Exception):
    """What somebody said who did not do their part."""


def reference(
    case: Case | Family, weights: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray | None, list[tuple[int, np.ndarray]]]:
    """Float64 [n, n_vocab]: logits, and those of the first layer that drafts, if there is one; then the tokens of a chain of
    drafts after the prompt, each with the logits after it."""
    with make.Double(), torch.no_grad():
        model, extra = make.load(case, torch.float64, weights)
        prompt = torch.from_numpy(prompts(case)[PROMPT])
        own = model(prompt[None], use_cache=False).logits[0].double().numpy()
        if not case.n_mtp:
            return own, None, []
        drafters = make.load_drafters(case, model, extra, torch.float64)
        hidden = make.outputs(model, prompt, drafters)
        every, tokens, rows = make.drafts(model, drafters, prompt, hidden, int(own[-1].argmax()))
        return own, every.double().numpy(), list(zip(tokens, rows.double().numpy(), strict=True))


def difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, in standard deviations."""
    return float(np.abs(logits - expected).max() / expected.std())


def check_same(found: GGUF, own: GGUF, prefixes: tuple[str, ...]) -> None:
    """Assert that a converted file has the tensors of our own, and its keys that begin with ``prefixes``."""
    assert set(found.tensors) == set(own.tensors), set(found.tensors) ^ set(own.tensors)
    for name, tensor in own.tensors.items():
        other = found.tensors[name]
        assert (other.type, other.shape) == (tensor.type, tensor.shape), name
        assert np.array_equal(other.data, tensor.data), name
    for key, value in own.metadata.items():
        if key.startswith(prefixes):
            assert np.array_equal(found.metadata[key], value), key


def run_converter(llama_cpp: Path, calls: Sequence[Sequence[str]], log: Path) -> list[str]:
    """What each call of the converter ended with; "" is success."""
    command = [sys.executable, "-m", "tests.oracle.converter", str(llama_cpp)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("w", encoding="utf-8") as errors:
        done = subprocess.run(
            command,
            input=json.dumps(calls),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            check=True,
        )
    return json.loads(done.stdout)


class Trial:
    """A model, its files, and what became of them."""

    def __init__(self, case: Case | Family, folder: Path, llama_cpp: Path) -> None:
        self.case, self.folder = case, folder
        self.results: dict[str, Any] = {}
        self.notes: list[str] = []
        weights = folders.rounded(case)
        self.ids = folders.write(case, weights, folder / "hf")
        self.expected, self.drafts, self.chain = reference(case, weights)
        names = [name for name in VARIANTS if case.n_mtp or name not in ("trunk", "mtp")]
        # The converter takes a Qwen3-Next without a layer that drafts only if it is told so.
        extra = ["--no-nextn"] if case.architecture == "qwen3next" and not case.n_mtp else []
        fixed = [str(folder / "hf"), *extra, "--outfile"]
        calls = [[*fixed, str(folder / f"{name}.gguf"), *VARIANTS[name]] for name in names]
        self.ends = dict(zip(names, run_converter(llama_cpp, calls, folder / "log.txt"), strict=True))

    def path(self, variant: str) -> Path:
        """The file of a variant, or the first of them."""
        found = sorted(self.folder.glob(f"{variant}*.gguf"))
        if not found:
            raise Refused(f"converter: {self.ends[variant] or 'no file'}")
        return found[0]

    def wide(self, path: Path) -> Path:
        """The file with all numbers in float32, where the converter keeps some in fewer bits whatever it is told."""
        every = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        if all(tensor.tensor_type.name in ("F32", "I32") for tensor in every.values()):
            return path

        def change(given: Tensors) -> Tensors:
            kinds = {name: every[name].tensor_type for name in given}
            return {k: w if kinds[k].name == "I32" else quants.dequantize(w, kinds[k]) for k, w in given.items()}

        return rewritten(path, self.folder / f"wide-{path.name}", change)

    def compare(self, variant: str) -> None:
        """Load a file, and compare its logits; one with nothing but the layer that drafts together with that of the trunk."""
        apart = variant == "mtp"
        layer: dict[str, Any] = {"draft_model": self.path("mtp")} if apart else {}
        path = self.path("trunk" if apart else variant)
        path = self.wide(path) if variant in ("f32", "trunk") else path
        # The converter writes the layer of deepseek4 to a file of its own only.
        drafts_too = self.drafts is not None and (apart or variant != "trunk" and self.case.architecture != "deepseek4")
        if variant in ("qkv", "experts") and not self.fuses(variant):
            return
        if variant == "experts" and self.case.architecture == "nemotron_h_moe":
            return  # whose experts have no gate, so that the converter leaves out half of them
        try:
            llm: Any = engine.load(path, device="cpu", cache_type="f32", n_ctx=512, **layer)
            prompt = prompts(self.case)[PROMPT].tolist()
            ours = np.asarray(llm.logits(prompt))
            worst = difference(ours, self.expected)
            drafts = self.drafting(llm, prompt) if drafts_too else None
            if variant == "f32":
                self.results["architecture"] = llm.config.architecture
                self.results["argmax"] = f"{int((ours.argmax(1) == self.expected.argmax(1)).sum())} of {len(prompt)}"
                same = llm.tokenizer.encode(tokens.TEXT, add_special=False) == self.ids
                self.results["ids"] = "same" if same else "others"
                self.results["drafts"] = drafts
            elif drafts is not None:
                worst = max(worst, drafts)
            llm.reset()
            llm.complete("Then", max_tokens=4, temperature=0)
        except engine.EngineError as error:
            raise Refused(f"engine: {error}") from error
        if variant != "q8_0":
            self.results[variant] = worst
        elif any(tensor.tensor_type.name == "Q8_0" for tensor in GGUFReader(path).tensors):
            self.results[variant] = float(np.sqrt(np.square(ours - self.expected).mean()) / self.expected.std())

    def fuses(self, variant: str) -> bool:
        """Whether the converter fuses anything: it does so for some architectures."""
        fused, plain = (GGUFReader(self.path(name)).tensors for name in (variant, "f32"))
        return {tensor.name for tensor in fused} != {tensor.name for tensor in plain}

    def drafting(self, llm: Any, prompt: list[int]) -> float:
        """The difference of the logits of the layers that draft: of the first one at a few positions, and of a chain."""
        assert self.drafts is not None
        if llm.model.drafter is None:
            raise Refused("engine: no layer that drafts")
        worst = 0.0
        for at in (0, 15, len(prompt) - 1):
            llm.reset()
            if at:
                llm.logits(prompt[:at])
            worst = max(
                worst, difference(llm.model.drafter.forward(prompt[at], at, llm.model.sequence), self.drafts[at])
            )
        llm.reset()
        llm.logits(prompt)
        for number, (token, expected) in enumerate(self.chain):
            found = llm.model.drafter.forward(token, len(prompt) + number, llm.model.sequence, number)
            worst = max(worst, difference(found, expected))
        return worst

    def run(self) -> None:
        for variant in self.ends:
            try:
                self.compare(variant)
            except Refused as refused:
                self.results[variant] = str(refused)
            except Exception as error:
                traceback.print_exc()
                self.results[variant] = f"engine: {type(error).__name__}: {error}"


def assistant(case: Case, folder: Path, llama_cpp: Path) -> dict[str, Any]:
    """The difference of an assistant's drafts from the outputs of its target, both converted."""
    both = (CASES[case.target], case)
    for one in both:
        folders.write(one, folders.rounded(one), folder / one.name)
    files = [folder / f"{one.name}.gguf" for one in both]
    calls = [[str(f.with_suffix("")), "--outfile", str(f), *VARIANTS["f32"]] for f in files]
    if any(ends := run_converter(llama_cpp, calls, folder / "log.txt")):
        return {"drafts": f"converter: {ends}"}
    with make.Double():
        places, expected = make.chains(case, torch.float64, folders.rounded)
    worst = 0.0
    try:
        llm: Any = engine.load(files[0], draft_model=files[1], device="cpu", cache_type="f32", n_ctx=512)
        for place, logits in zip(places, expected, strict=True):
            at, step = place["position"], place["step"]
            if step == 0:
                llm.reset()
                llm.logits(prompts(case)[place["prompt"]][:at].tolist())
                llm.model.drafter.stand(at)
            worst = max(
                worst, difference(llm.model.drafter.forward(place["token"], at + step, llm.model.sequence), logits)
            )
    except engine.EngineError as error:
        return {"drafts": f"engine: {error}"}
    return {"drafts": worst}


def trial(name: str, llama_cpp: Path, keep: Path | None) -> dict[str, Any]:
    """The results of a model: differences, or reasons."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = (keep or Path(scratch)) / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        case = CASES[name]
        try:
            if case.target:
                assert isinstance(case, Case)
                return assistant(case, folder, llama_cpp)
            one = Trial(folders.adapted(case), folder, llama_cpp)
            one.run()
        except Exception as error:
            traceback.print_exc()
            return {"f32": f"transformers: {type(error).__name__}: {error}"}
        return one.results


def _cell(result: Any, notes: list[str]) -> str:
    """A number, a word, or the number of a note."""
    if result is None:
        return ""
    if isinstance(result, float):
        return f"{result:.1e}".replace("e-0", "e-")
    if ": " not in result:
        return str(result)
    # What differs from one file of a model to the next is no reason.
    note = re.sub(r"\S*/(\S+\.gguf: )?|; this engine runs .*| for MODEL_TENSORS of .*", "", result)
    if note not in notes:
        notes.append(note)
    return f"[{notes.index(note) + 1}]"


def table(results: dict[str, dict[str, Any]]) -> str:
    """The results as Markdown, and the notes below it."""
    notes: list[str] = []
    lines = [
        f"| model | architecture | {' | '.join(COLUMNS.values())} |",
        "| --- | --- |" + " ---: |" * len(COLUMNS),
    ]
    for name, result in results.items():
        cells = [_cell(result.get(column), notes) for column in COLUMNS]
        architecture = result.get("architecture", CASES[name].architecture)
        lines.append(f"| {name} | `{architecture}` | {' | '.join(cells)} |")
    clean = [" ".join(note.replace("|", "\\|").replace("<", "&lt;").split()) for note in notes]
    return "\n".join([*lines, "", *(f"{i}. {note}" for i, note in enumerate(clean, 1))]).rstrip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a model or an architecture; all by default")
    parser.add_argument("--llama-cpp", type=Path, default=os.environ.get("LLAMA_CPP"), help="the sources of llama.cpp")
    parser.add_argument("--keep", type=Path, help="a folder for the files, which are deleted otherwise")
    parser.add_argument("--table", type=Path, help="a file for the table")
    a = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    every = {n: c for n, c in CASES.items() if n not in OLD}
    # Encoders have a comparison of their own (``tests/oracle/convert_encoders.py``).
    if missing := set(ARCHITECTURES) - {c.architecture for c in (*every.values(), *ENCODERS.values())}:
        raise SystemExit(f"no model of {', '.join(missing)}")
    if unknown := set(a.names) - {*every, *ARCHITECTURES}:
        raise SystemExit(f"no model {', '.join(unknown)}; there are {', '.join(every)}")
    if a.llama_cpp is None:
        raise SystemExit("give the sources of llama.cpp with --llama-cpp")
    results = {}
    for name in (n for n, c in every.items() if not a.names or {n, c.architecture} & set(a.names)):
        results[name] = trial(name, Path(a.llama_cpp), a.keep)
        print(name, results[name], flush=True)
    if a.table:
        write_table(a.table, "conversions", table(results))
    else:
        print(table(results))
