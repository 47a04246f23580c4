"""Train a network of EAGLE-3 (Li et al. 2025) for a model on source code, with the hidden states of this engine as data.

    python -m benchmarks.train_eagle3 MODEL.gguf -o network.gguf --code FOLDER [FOLDER ...] [--minutes 4] [--device cuda]

Needs PyTorch.  The texts are the Python files in the folders; every hundredth file is held out.  The target reads them in
sequences of its trained context, and its residual stream before the layers ``--taps`` and after the last one is kept.

The network is unrolled as it drafts (the paper's training-time test).  Step j gets g_P, what the target computes at position
P, and the token of P + 1 + j, and predicts the token of P + 2 + j.  It attends to the keys of step 0 up to P, and to its own
keys of steps 1 to j.  Its output y takes the place of g in step j + 1.  The loss is the cross-entropy with the target's own
distribution.

The file has matrices in ``--quant`` and uses the embedding and the output matrix of the target.  At the end, the first drafts
of the file by this engine are compared with those of PyTorch, and the share of right drafts on held-out texts is printed by
place in the chain.
"""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import gguf
import torch  # type: ignore[import-not-found]
from torch import nn  # type: ignore[import-not-found]
from torch.nn import functional  # type: ignore[import-not-found]

import engine
from benchmarks.training import BASE, EPS, Target, cross_entropy, finish, fit, keys, parser, read_texts, rms


class Network(nn.Module):  # type: ignore[misc]
    """The network, with the names of the file."""

    def __init__(self, target: Target, args: argparse.Namespace) -> None:
        super().__init__()
        n, d, f = target.width, args.head_dim, args.n_ff
        self.n_head, self.n_head_kv, self.head_dim = args.n_head, args.n_head_kv, d
        linear = {
            "fc": (n, n * len(args.taps)),
            "attn_q": (args.n_head * d, 2 * n),
            "attn_k": (args.n_head_kv * d, 2 * n),
            "attn_v": (args.n_head_kv * d, 2 * n),
            "attn_output": (n, args.n_head * d),
            "ffn_gate": (f, n),
            "ffn_up": (f, n),
            "ffn_down": (n, f),
        }
        # At first g is the last tap, and attention and network add little to it.
        small = {"fc": 0.1, "attn_output": 0.1, "ffn_down": 0.1}
        self.w = nn.ParameterDict(
            {k: nn.Parameter(torch.randn(s) * small.get(k, 1.0) * s[1] ** -0.5) for k, s in linear.items()}
        )
        with torch.no_grad():
            self.w["fc"][:, -n:] += torch.eye(n)
        names = ("attn_norm", "attn_norm_2", "ffn_norm", "output_norm")
        self.norms = nn.ParameterDict({name: nn.Parameter(torch.ones(n)) for name in names})
        output = "output.weight" if "output.weight" in target.gguf.tensors else "token_embd.weight"
        self.register_buffer("embedding", torch.from_numpy(target.tensor("token_embd.weight").copy()))
        self.register_buffer("head", torch.from_numpy(target.tensor(output).copy()))
        self.register_buffer("target_norm", torch.from_numpy(target.tensor("output_norm.weight").copy()))
        self.register_buffer("rates", BASE ** (-torch.arange(0, d, 2) / d))

    def fused(self, states: Any) -> Any:
        """g [batch, tokens, n] of what the network reads [batch, tokens, taps, n]."""
        return functional.linear(states.flatten(2), self.w["fc"])

    def wanted(self, output: Any) -> Any:
        """The target's logits, from its output before the norm."""
        return functional.linear(rms(output, self.target_norm), self.head)

    def _rotated(self, x: Any, at: Any) -> Any:
        """Pairs (2i, 2i + 1) of x [batch, tokens, heads, d]."""
        angles = at[:, None, None] * self.rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def step(self, g: Any, tokens: Any, number: int, memory: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """y and the logits of step ``number`` for g and tokens [batch, positions]; memory: keys and values of all steps."""
        batch, n = tokens.shape
        e = rms(functional.embedding(tokens, self.embedding).to(g.dtype), self.norms["attn_norm"])
        x = torch.cat([e, rms(g, self.norms["attn_norm_2"])], -1)
        at = torch.arange(n, device=g.device) + number

        def heads(name: str, count: int) -> Any:
            return functional.linear(x, self.w[name]).view(batch, n, count, self.head_dim)

        q = self._rotated(heads("attn_q", self.n_head), at).transpose(1, 2)
        repeat = self.n_head // self.n_head_kv
        k = self._rotated(heads("attn_k", self.n_head_kv), at).repeat_interleave(repeat, 2).transpose(1, 2)
        v = heads("attn_v", self.n_head_kv).repeat_interleave(repeat, 2).transpose(1, 2)
        memory.append((k, v))
        scores = q @ memory[0][0].transpose(2, 3)
        hidden = torch.ones(n, n, dtype=torch.bool, device=g.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True) for key, _ in memory[1:]]
        weights = torch.softmax(torch.cat([scores, *own], -1).float() * self.head_dim**-0.5, -1).to(g.dtype)
        o = weights[..., :n] @ memory[0][1]
        for i, (_, value) in enumerate(memory[1:]):
            o = o + weights[..., n + i : n + i + 1] * value
        y = g + functional.linear(o.transpose(1, 2).flatten(2), self.w["attn_output"])
        b = rms(y, self.norms["ffn_norm"])
        inner = functional.silu(functional.linear(b, self.w["ffn_gate"])) * functional.linear(b, self.w["ffn_up"])
        y = y + functional.linear(inner, self.w["ffn_down"])
        return y, functional.linear(rms(y, self.norms["output_norm"]), self.head.to(y.dtype))


def unrolled(net: Network, states: Any, tokens: Any, steps: int) -> Iterator[tuple[Any, Any]]:
    """The logits of each step, and those that the target has there: states [batch, n, taps, n_embd], the last one being the
    output; tokens [batch, n]."""
    n = tokens.shape[1] - steps
    g, memory = net.fused(states[:, :n, :-1]), list[tuple[Any, Any]]()
    for number in range(steps):
        g, logits = net.step(g, tokens[:, 1 + number : n + 1 + number], number, memory)
        yield logits, net.wanted(states[:, 1 + number : n + 1 + number, -1])


def rates(net: Network, target: Target, held: Sequence[Sequence[int]], steps: int, device: str) -> list[float]:
    """The share of first choices that are the target's, by step, where all earlier ones of the chain are."""
    right, seen = [0] * steps, [0] * steps
    with torch.no_grad():
        for ids in held:
            states = torch.from_numpy(target.states(ids)).to(device)[None]
            alive = None
            for number, (logits, wanted) in enumerate(unrolled(net, states, torch.tensor([ids], device=device), steps)):
                same = logits.argmax(-1) == wanted.argmax(-1)
                if alive is None:
                    alive = torch.ones_like(same)
                seen[number] += int(alive.sum())
                alive = alive & same
                right[number] += int(alive.sum())
    return [a / max(b, 1) for a, b in zip(right, seen, strict=True)]


def write(net: Network, target: Target, args: argparse.Namespace) -> None:
    """The file, as llama.cpp's conversion names its tensors and keys."""
    writer = gguf.GGUFWriter(args.output, "eagle3")
    writer.add_name(f"EAGLE-3 network of {target.config.name}")
    numbers = {
        "block_count": 1,
        "context_length": target.n_ctx,
        "embedding_length": target.width,
        "feed_forward_length": args.n_ff,
        "attention.head_count": net.n_head,
        "attention.head_count_kv": net.n_head_kv,
        "attention.key_length": net.head_dim,
        "attention.value_length": net.head_dim,
        "rope.dimension_count": net.head_dim,
        "vocab_size": target.config.n_vocab,
        "target_hidden_size": target.width,
        "rope.freq_base": BASE,
        "attention.layer_norm_rms_epsilon": EPS,
        "target_layers": list(args.taps),
    }
    keys(writer, numbers)
    matrices = {"fc.weight" if name == "fc" else f"blk.0.{name}.weight": weight for name, weight in net.w.items()}
    norms = {name if name == "output_norm" else f"blk.0.{name}": weight for name, weight in net.norms.items()}
    finish(writer, matrices, {f"{name}.weight": weight for name, weight in norms.items()}, args.quant)


def agreement(net: Network, target: Target, args: argparse.Namespace, ids: Sequence[int]) -> float:
    """The share of positions where a draft of the file by this engine is PyTorch's choice, on the beginnings of a text."""
    llm: Any = engine.load(args.model, draft_model=args.output, device=args.device, n_ctx=target.n_ctx)
    states = torch.from_numpy(target.states(ids)).to(args.device)[None]
    with torch.no_grad():
        g = net.fused(states[:, :-1, :-1])
        _, logits = net.step(g, torch.tensor([ids[1:]], device=args.device), 0, [])
    places = range(1, len(ids), 9)
    found = []
    for n in places:
        llm.read(ids[:n])
        found.append(int(llm.model.drafter.forward(ids[n], n, llm.model.sequence).argmax()))
    own = [int(logits[0, n - 1].argmax()) for n in places]
    return sum(a == b for a, b in zip(found, own, strict=True)) / len(own)


def main() -> None:
    """The command line."""
    flags = parser("train_eagle3", __doc__ or "")
    flags.add_argument("--steps", type=int, default=4, help="drafts of a chain in training")
    args = flags.parse_args()
    torch.manual_seed(1)
    target = Target(args.model, args.device, args.taps)
    data = read_texts(target, args)
    net = Network(target, args).to(args.device)

    def loss_of(states: Any, tokens: Any) -> tuple[Any, str]:
        steps = unrolled(net, states, tokens, args.steps)
        return sum(0.8**number * cross_entropy(*step).mean() for number, step in enumerate(steps)), ""

    net = fit(net, data, args, loss_of)
    write(net, target, args)
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.2f} MB")
    found = rates(net, target, data.held[:32], args.steps, args.device)
    print("right, by place:", " ".join(f"{rate:.3f}" for rate in found))
    print(f"drafts of the file as by PyTorch: {agreement(net, target, args, data.held[0][:400]):.3f}")


if __name__ == "__main__":
    main()
