"""Train a network of DSpark (DFlash with a Markov head) for a model on source code, with the hidden states of this engine as
data.

    python -m benchmarks.train_dflash MODEL.gguf -o network.gguf --code FOLDER [FOLDER ...] [--minutes 4] [--device cuda]

Needs PyTorch.  The texts are the Python files in the folders; every hundredth file is held out.  The target reads them in
sequences of its trained context, and its residual stream before the layers ``--taps`` and after the last one is kept.

A step takes ``--anchors`` positions of each sequence and computes the block that would follow each of them: its rows attend
to the keys before the block, which are made of the target's states, and to one another.  The Markov head gets the tokens of
the text.  The loss is the cross-entropy with the target's own distribution at each place, where later places count less, and
that of the confidence head with whether the likeliest draft is the target's likeliest token.

The file has matrices in ``--quant`` and uses the embedding and the output matrix of the target.  At the end, the first drafts
of the file by this engine are compared with those of PyTorch, and the share of right drafts on held-out texts is printed by
place in the block.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np
import torch  # type: ignore[import-not-found]
from torch import nn  # type: ignore[import-not-found]
from torch.nn import functional  # type: ignore[import-not-found]

import engine
from benchmarks.training import BASE, EPS, Target, cross_entropy, finish, fit, keys, parser, read_texts, rms

MASK = 1
"""The mask token: one that no text of the training contains."""

SMALL = {"attn_output": 0.1, "ffn_down": 0.1, "markov_w2": 0.1}
"""Factors of initial weights, so that layers and corrections add little at first."""


class Network(nn.Module):  # type: ignore[misc]
    """The network, with the names of the file."""

    def __init__(self, target: Target, args: argparse.Namespace) -> None:
        super().__init__()
        n, d, f, n_vocab = target.width, args.head_dim, args.n_ff, target.config.n_vocab
        self.n_head, self.n_head_kv, self.head_dim, self.n_layer = args.n_head, args.n_head_kv, d, args.layers
        layer = {
            "attn_q": (args.n_head * d, n),
            "attn_k": (args.n_head_kv * d, n),
            "attn_v": (args.n_head_kv * d, n),
            "attn_output": (n, args.n_head * d),
            "ffn_gate": (f, n),
            "ffn_up": (f, n),
            "ffn_down": (n, f),
        }
        shapes = {f"blk_{il}_{name}": shape for il in range(args.layers) for name, shape in layer.items()}
        shapes |= {"fc": (n, n * len(args.taps)), "markov_w1": (n_vocab, args.rank), "markov_w2": (n_vocab, args.rank)}
        self.w = nn.ParameterDict()
        for name, shape in shapes.items():
            factor = next((value for part, value in SMALL.items() if name.endswith(part)), 1.0)
            self.w[name] = nn.Parameter(torch.randn(shape) * factor * shape[1] ** -0.5)
        sizes = {"attn_norm": n, "attn_q_norm": d, "attn_k_norm": d, "ffn_norm": n}
        norms = {f"blk_{il}_{name}": size for il in range(args.layers) for name, size in sizes.items()}
        norms |= {"enc_output_norm": n, "output_norm": n}
        self.norms = nn.ParameterDict({name: nn.Parameter(torch.ones(size)) for name, size in norms.items()})
        self.judge = nn.Linear(n + args.rank, 1)
        output = "output.weight" if "output.weight" in target.gguf.tensors else "token_embd.weight"
        self.register_buffer("embedding", torch.from_numpy(target.tensor("token_embd.weight").copy()))
        self.register_buffer("head", torch.from_numpy(target.tensor(output).copy()))
        self.register_buffer("target_norm", torch.from_numpy(target.tensor("output_norm.weight").copy()))
        self.register_buffer("rates", BASE ** (-torch.arange(0, d, 2) / d))

    def wanted(self, output: Any) -> Any:
        """The target's logits, from its output before the norm."""
        return functional.linear(rms(output, self.target_norm), self.head)

    def _heads(self, x: Any, name: str, count: int, at: Any = None) -> Any:
        """Heads of x [batch, rows, n], normalized and rotated to the positions at [batch, rows] unless they are values:
        [batch, count, rows, d]."""
        y = functional.linear(x, self.w[name]).unflatten(-1, (count, self.head_dim)).transpose(1, 2)
        if at is None:
            return y
        y = rms(y, self.norms[name + "_norm"])
        angles = at[:, None, :, None] * self.rates
        cos, sin = angles.cos().to(y.dtype), angles.sin().to(y.dtype)
        a, b = y.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def outputs(self, states: Any, tokens: Any, anchors: Any, size: int) -> Any:
        """The normalized outputs [batch, blocks, size, n] of the blocks that begin at anchors [batch, blocks]; states [batch,
        n_tokens, taps, n_embd], tokens [batch, n_tokens]."""
        batch, n_tokens = tokens.shape
        blocks, device = anchors.shape[1], tokens.device
        g = rms(functional.linear(states.flatten(2), self.w["fc"]), self.norms["enc_output_norm"])
        given = torch.full((batch, blocks, size), MASK, device=device)
        given[:, :, 0] = tokens.gather(1, anchors)
        x = functional.embedding(given.flatten(1), self.embedding).to(g.dtype)
        here = (anchors[:, :, None] + torch.arange(size, device=device)).flatten(1)
        past = torch.arange(n_tokens, device=device)
        hidden = (past >= anchors[:, :, None]).repeat_interleave(size, 1)[:, None]
        repeat, before = self.n_head // self.n_head_kv, past.expand(batch, -1)
        for il in range(self.n_layer):
            blk = f"blk_{il}_"
            a = rms(x, self.norms[blk + "attn_norm"])
            q = self._heads(a, blk + "attn_q", self.n_head, here)
            kv = [
                (self._heads(y, blk + "attn_k", self.n_head_kv, at), self._heads(y, blk + "attn_v", self.n_head_kv))
                for y, at in ((g, before), (a, here))
            ]
            (k, v), (own_k, own_v) = ((k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)) for k, v in kv)
            scores = (q @ k.transpose(2, 3)).masked_fill(hidden, float("-inf"))
            q, own_k, own_v = (y.unflatten(2, (blocks, size)) for y in (q, own_k, own_v))
            own = (q @ own_k.transpose(3, 4)).flatten(2, 3)
            p = torch.softmax(torch.cat([scores, own], -1).float() * self.head_dim**-0.5, -1).to(g.dtype)
            inside = p[..., n_tokens:].unflatten(2, (blocks, size)) @ own_v
            o = p[..., :n_tokens] @ v + inside.flatten(2, 3)
            x = x + functional.linear(o.transpose(1, 2).flatten(2), self.w[blk + "attn_output"])
            b = rms(x, self.norms[blk + "ffn_norm"])
            inner = functional.silu(functional.linear(b, self.w[blk + "ffn_gate"]))
            x = x + functional.linear(inner * functional.linear(b, self.w[blk + "ffn_up"]), self.w[blk + "ffn_down"])
        return rms(x, self.norms["output_norm"]).unflatten(1, (blocks, size))

    def logits(self, y: Any, before: Any) -> tuple[Any, Any]:
        """The logits of drafts, and those of the confidence in them: outputs y [..., n], the tokens before them [...]."""
        w1 = functional.embedding(before, self.w["markov_w1"]).to(y.dtype)
        corrected = functional.linear(y, self.head.to(y.dtype)) + functional.linear(w1, self.w["markov_w2"])
        return corrected, self.judge(torch.cat([y, w1], -1).detach()).squeeze(-1)


def compared(net: Network, states: Any, tokens: Any, anchors: Any, size: int) -> tuple[Any, Any, Any]:
    """Logits of drafts [batch, blocks, size, n_vocab], of confidence, and the target's logits at the same places; the last of
    the states [batch, n_tokens, taps + 1, n_embd] is the output."""
    y = net.outputs(states[:, :, :-1], tokens, anchors, size)
    places = anchors[:, :, None] + torch.arange(size, device=tokens.device)
    before = tokens.gather(1, places.flatten(1)).view(places.shape)
    index = places.flatten(1)[..., None].expand(-1, -1, states.shape[-1])
    output = states[:, :, -1].gather(1, index).unflatten(1, places.shape[1:])
    return *net.logits(y, before), net.wanted(output)


def rates(net: Network, target: Target, held: Sequence[Sequence[int]], size: int, device: str) -> list[float]:
    """The share of first choices that are the target's, by place, where all earlier ones of the block are."""
    right, seen = [0] * size, [0] * size
    with torch.no_grad():
        for ids in held:
            states, tokens = torch.from_numpy(target.states(ids)).to(device)[None], torch.tensor([ids], device=device)
            anchors = torch.arange(1, len(ids) - size, 5, device=device)[None]
            logits, _, wanted = compared(net, states, tokens, anchors, size)
            same = logits.argmax(-1) == wanted.argmax(-1)
            alive = torch.ones_like(same[..., 0])
            for place in range(size):
                seen[place] += int(alive.sum())
                alive = alive & same[..., place]
                right[place] += int(alive.sum())
    return [a / max(b, 1) for a, b in zip(right, seen, strict=True)]


def write(net: Network, target: Target, args: argparse.Namespace) -> None:
    """The file, as llama.cpp's conversion names its tensors and keys."""
    writer = gguf.GGUFWriter(args.output, "dflash")
    writer.add_name(f"DSpark network of {target.config.name}")
    numbers = {
        "block_count": net.n_layer,
        "context_length": target.n_ctx,
        "embedding_length": target.width,
        "feed_forward_length": args.n_ff,
        "attention.head_count": net.n_head,
        "attention.head_count_kv": net.n_head_kv,
        "attention.key_length": net.head_dim,
        "attention.value_length": net.head_dim,
        "rope.dimension_count": net.head_dim,
        "rope.freq_base": BASE,
        "attention.layer_norm_rms_epsilon": EPS,
        "vocab_size": target.config.n_vocab,
        "block_size": args.size,
        "sample_from_anchor": True,
        "has_confidence_head": True,
        "target_layers": list(args.taps),
    }
    keys(writer, numbers)
    writer.add_mask_token_id(MASK)
    matrices = {in_file(name): weight for name, weight in net.w.items()}
    others = {in_file(name): weight for name, weight in net.norms.items()}
    others |= {"conf_proj.weight": net.judge.weight, "conf_proj.bias": net.judge.bias}
    finish(writer, matrices, others, args.quant)


def in_file(name: str) -> str:
    """The name of a parameter in the file."""
    if name.startswith("blk_"):
        _, il, rest = name.split("_", 2)
        return f"blk.{il}.{rest}.weight"
    return name.replace("enc_", "enc.") + ".weight"


def agreement(net: Network, target: Target, args: argparse.Namespace, ids: Sequence[int]) -> float:
    """The share of positions where the first draft of the file by this engine is PyTorch's choice."""
    llm: Any = engine.load(args.model, draft_model=args.output, device=args.device, n_ctx=target.n_ctx)
    states, tokens = (torch.from_numpy(np.asarray(x)).to(args.device)[None] for x in (target.states(ids), ids))
    places = list(range(1, len(ids) - args.size, 9))
    with torch.no_grad():
        logits, _, _ = compared(net, states, tokens, torch.tensor([places], device=args.device), args.size)
    found = []
    for n in places:
        llm.read(ids[:n])
        found.append(int(llm.model.drafter.forward(ids[n], n, llm.model.sequence, 0, args.size).argmax()))
    own = logits[0, :, 0].argmax(-1).tolist()
    return sum(a == b for a, b in zip(found, own, strict=True)) / len(own)


def main() -> None:
    """The command line."""
    flags = parser("train_dflash", __doc__ or "")
    flags.add_argument("--anchors", type=int, default=64, help="blocks of a sequence in a step")
    flags.add_argument("--size", type=int, default=6, help="drafts of a block")
    flags.add_argument("--layers", type=int, default=2)
    flags.add_argument("--rank", type=int, default=32, help="of the Markov head")
    flags.set_defaults(n_ff=448)
    args = flags.parse_args()
    torch.manual_seed(1)
    target = Target(args.model, args.device, args.taps)
    data = read_texts(target, args)
    net = Network(target, args).to(args.device)
    weight = 0.8 ** torch.arange(args.size, device=args.device)

    def loss_of(states: Any, tokens: Any) -> tuple[Any, str]:
        anchors = torch.randint(1, target.n_ctx - args.size, (args.batch, args.anchors), device=args.device)
        logits, confidence, wanted = compared(net, states, tokens, anchors, args.size)
        right = (logits.argmax(-1) == wanted.argmax(-1)).float()
        judged = functional.binary_cross_entropy_with_logits(confidence.float(), right)
        share = " ".join(f"{x:.2f}" for x in right.mean((0, 1)).tolist())
        return (cross_entropy(logits, wanted) * weight).mean() + 0.1 * judged, f", right {share}"

    net = fit(net, data, args, loss_of)
    write(net, target, args)
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.2f} MB")
    found = rates(net, target, data.held[:32], args.size, args.device)
    print("right, by place:", " ".join(f"{rate:.3f}" for rate in found))
    print(f"drafts of the file as by PyTorch: {agreement(net, target, args, data.held[0][:400]):.3f}")


if __name__ == "__main__":
    main()
