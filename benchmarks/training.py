"""What the training of networks that draft has in common: the target on this engine, and texts (needs PyTorch)."""

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch  # type: ignore[import-not-found]

from engine.arrays import Array, Batch
from engine.decode.evaluate import evaluate
from engine.devices import open_device
from engine.gguf.file import GGUF, read_gguf
from engine.models.base import Model
from engine.models.registry import build, read_config, without_mtp
from engine.ops.operations import Ops
from engine.text.tokenizer import Tokenizer

EPS, BASE = 1e-6, 10000.0
"""The epsilon of norms and the base of rotations of the networks."""


class Joined:
    """Takes the place of the network's fusion: all taps side by side."""

    def apply(self, ops: Ops, taps: Sequence[Array]) -> Array:
        """float32 [rows, the sum of all widths]."""
        return ops.join_columns(taps)


class Kept:
    """Takes the place of the network: keeps what it would read of the latest sequence."""

    def __init__(self, model: Model, width: int, length: int) -> None:
        self._model = model
        self.rows = model.ops.zeros((1, length, width), np.float32)
        self.hidden = self.rows

    def follow(self, batch: Batch[Array], hidden: Array) -> None:
        """Keep the rows of a pass."""
        self._model.ops.keep_rows(self.rows, hidden, batch)


class Target:
    """The model that the network drafts for, on this engine."""

    def __init__(self, path: Path, device: str, taps: Sequence[int]) -> None:
        self.gguf: GGUF = read_gguf(path)
        config = without_mtp(read_config(self.gguf))
        self.n_ctx, self.taps = config.n_ctx_train, (*taps, config.n_layer)
        self.width = config.n_embd
        config = replace(config, taps=self.taps, n_embd_draft=config.n_embd * len(self.taps))
        self.model = build(config, self.gguf, open_device(device), self.n_ctx)
        self._kept = Kept(self.model, config.n_embd_draft, self.n_ctx + 1)
        self.model.drafter, self.model.fusion = self._kept, Joined()  # type: ignore[assignment]
        self.model.ops.loaded()
        self.config, self.tokenizer = config, Tokenizer.from_gguf(self.gguf)

    def states(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [tokens, taps, n_embd]: what the network reads of at most ``n_ctx`` tokens, and the output."""
        self.model.sequence.truncate(0)
        size = self.model.cache.max_rows
        for first in range(0, len(tokens), size):
            part = np.array(tokens[first : first + size], np.int32)
            at = np.arange(first, first + part.size, dtype=np.int32)
            evaluate(self.model, part, at, 1, self.model.sequence)
        rows = self.model.ops.download(self._kept.rows)[0, : len(tokens)]
        return rows.reshape(len(tokens), len(self.taps), self.width)

    def tensor(self, name: str) -> np.ndarray:
        """A tensor of its file, dequantized."""
        tensor = self.gguf.tensors[name]
        return gguf.quants.dequantize(tensor.data.reshape(*tensor.shape[:-1], -1), tensor.type).reshape(tensor.shape)


def rms(x: Any, weight: Any) -> Any:
    """The normalized rows of x [..., n] times weight [n]."""
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS).to(x.dtype) * weight


def texts(folders: Sequence[Path], tokenizer: Tokenizer, length: int, most: int) -> tuple[list[list[int]], ...]:
    """Sequences of ``length`` tokens of the files in folders, up to ``most`` for training, and those held out."""
    files = sorted({file for folder in folders for file in folder.rglob("*.py") if 2000 < file.stat().st_size < 200000})
    random.Random(1).shuffle(files)
    found: tuple[list[list[int]], list[list[int]]] = ([], [])
    for i, file in enumerate(files):
        own, enough = found[i % 100 == 0], (64 if i % 100 == 0 else most)
        if len(own) >= enough:
            continue
        ids = tokenizer.encode(file.read_text(encoding="utf-8", errors="replace")[:100000])
        own += [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)][:8]
        if len(found[0]) >= most and len(found[1]) >= 64:
            break
    return found


def finish(writer: gguf.GGUFWriter, matrices: Mapping[str, Any], others: Mapping[str, Any], quant: str) -> None:
    """Write the file: matrices in the format ``quant``, other tensors in float32."""
    kind = gguf.GGMLQuantizationType[quant]
    for name, weight in matrices.items():
        data = gguf.quants.quantize(weight.detach().float().cpu().numpy(), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    for name, weight in others.items():
        writer.add_tensor(name, weight.detach().float().cpu().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def keys(writer: gguf.GGUFWriter, numbers: Mapping[str, int | float | list[int]]) -> None:
    """Add keys with the prefix of the architecture."""
    for key, value in numbers.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        kinds.get(type(value), writer.add_array)(f"{writer.arch}.{key}", value)


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """The flags that all trainings have.  name: that of the module; about: its docstring."""
    found = argparse.ArgumentParser(f"python -m benchmarks.{name}", description=about.partition("\n")[0])
    found.add_argument("model", type=Path)
    found.add_argument("-o", "--output", type=Path, required=True)
    found.add_argument("--code", type=Path, nargs="+", required=True)
    found.add_argument("--device", default="cuda")
    found.add_argument("--minutes", type=float, default=4.0)
    found.add_argument("--sequences", type=int, default=3000, help="of the trained context, for training")
    found.add_argument("--batch", type=int, default=16)
    found.add_argument("--rate", type=float, default=1e-3)
    found.add_argument("--taps", type=int, nargs="+", default=[2, 4, 6])
    found.add_argument("--n-ff", type=int, default=1024)
    found.add_argument("--n-head", type=int, default=4)
    found.add_argument("--n-head-kv", type=int, default=2)
    found.add_argument("--head-dim", type=int, default=128)
    found.add_argument("--quant", default="Q5_0")
    return found


@dataclass
class Data:
    """Texts and what the target computes of them.

    tokens: [sequences, n_ctx].
    states: [sequences, n_ctx, taps + 1, n_embd], the last of which is the output.
    held: texts that are held out.
    """

    tokens: Any
    states: Any
    held: list[list[int]]


def read_texts(target: Target, args: argparse.Namespace) -> Data:
    """The texts of ``args.code``, read by the target."""
    train, held = texts(args.code, target.tokenizer, target.n_ctx, args.sequences)
    began, kind = time.perf_counter(), torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    states = torch.stack([torch.from_numpy(target.states(ids)).to(args.device, kind) for ids in train])
    tokens, took = torch.tensor(train, device=args.device), time.perf_counter() - began
    print(f"{tokens.numel()} tokens, {len(held)} held-out sequences, states in {took:.0f} s", flush=True)
    return Data(tokens, states, held)


def fit(net: Any, data: Data, args: argparse.Namespace, loss_of: Callable[[Any, Any], tuple[Any, str]]) -> Any:
    """Train a network for ``args.minutes``, and return it in float32.

    loss_of: the loss for states and tokens of some sequences, and what is printed beside it.
    """
    optimizer = torch.optim.AdamW(net.parameters(), args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    half = data.states.dtype == torch.bfloat16
    began, n, done = time.perf_counter(), 0, 0.0
    while done < 1:
        done = min(1.0, (time.perf_counter() - began) / (60 * args.minutes))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (n + 1) / 100) * (0.5 + 0.5 * np.cos(np.pi * done)) + 1e-6
        chosen = torch.randint(len(data.tokens), (args.batch,), device=args.device)
        with torch.autocast(args.device.partition(":")[0], torch.bfloat16, enabled=half):
            loss, beside = loss_of(data.states[chosen], data.tokens[chosen])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        n += 1
        if n % 100 == 0 or done == 1:
            took = time.perf_counter() - began
            print(f"step {n}, {took:.0f} s, loss {float(loss.detach()):.3f}{beside}", flush=True)
    return net.float()


def cross_entropy(logits: Any, wanted: Any) -> Any:
    """The cross-entropy with the distribution of the target's logits ``wanted``: [...] of logits [..., n_vocab]."""
    soft = torch.softmax(wanted.float(), -1).detach()
    return -(soft * torch.log_softmax(logits.float(), -1)).sum(-1)
