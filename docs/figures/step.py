"""A step of an answer on a GPU: the kernels that its graph consists of, recorded for a GPU that is not present."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import engine
from engine.arrays import Batch
from engine.cuda.runtime.tensor import DeviceWeight
from engine.cuda.target import Target
from engine.decode.device_steps import AHEAD
from engine.decode.request import Request
from engine.decode.running import InFlightRequest, Running
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.speculation import NOTHING

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "The kernels of one step on a GPU"
SIZE = (480, 672)
TARGET = "sm_90"


class Graph:
    """A captured graph that is never launched."""

    def launch(self) -> None:
        """Nothing."""


class Recording(Target):
    """An absent GPU that keeps the launches of the latest capture: the kernel's name, blocks, threads per block, and the
    arguments."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.captured: list[tuple[str, int, int, Any]] = []
        self._capturing = False

    def launch(self, specialization: Any, *launch: Any) -> None:
        """Note the kernel and its grid."""
        grid, threads, arguments, *_ = launch
        blocks = math.prod(grid) if isinstance(grid, tuple) else grid
        if self._capturing:
            self.captured.append((specialization.kernel.name, int(blocks), int(threads), arguments))
        super().launch(specialization, *launch)

    @contextmanager
    def capture(self) -> Iterator[Any]:
        """Forget the launches before."""
        self.captured, self._capturing = [], True
        yield Graph()
        self._capturing = False


def matrices(objects: Iterable[Any]) -> Iterator[tuple[int, str]]:
    """The addresses and names of all matrices in objects, their attributes and their items."""
    for one in objects:
        if isinstance(one, (list, tuple)):
            yield from matrices(one)
        elif isinstance(one, DeviceWeight):
            yield one.address, ".".join(part for part in one.name.split(".") if part not in ("blk", "weight"))
        elif is_dataclass(one):
            yield from matrices(vars(one).values())


def facts() -> dict[str, Any]:
    """The launches of a step of the bundled model: before the layers, of one layer, of the rest."""
    target = Recording(TARGET)
    llm = engine.load(device=target, n_ctx=1024)
    model, ops = llm.model, llm.model.ops
    sampler = Sampler(SamplerParams(seed=1), llm.config.n_vocab)
    steps = llm.device_steps(sampler.params)
    assert steps is not None
    run = Running(Request([0], sampler, 1), model.sequence, steps)
    steps.begin(run)
    steps.start([InFlightRequest(run, NOTHING)])
    names = dict(matrices([model.token_embd, model.output, *model.layers]))
    launches = [
        [name, blocks, threads, list(dict.fromkeys(names[given] for given in arguments if given in names))]
        for name, blocks, threads, arguments in target.captured
    ]

    def count(layers: int) -> int:
        """The launches of the embedding and the first layers."""

        def forward() -> Any:
            batch = Batch(ops.tokens[:1], ops.positions[:1], ops.sequences[:1])
            x = ops.embed(model.token_embd, batch.tokens, model.config.embedding_scale)
            for il in range(layers):
                x = model.block(il, x, batch)
            return x

        return len(ops.record(forward).launches)

    ends = [count(n) for n in range(llm.config.n_layer + 1)]
    layers = [[name for name, *_ in launches[a:b]] for a, b in zip(ends, ends[1:], strict=False)]
    assert all(layer == layers[0] for layer in layers)
    passed = len(
        ops.record(lambda: model.compute(Batch(ops.tokens[:1], ops.positions[:1], ops.sequences[:1]), 1)).launches
    )
    return {
        "gpu": TARGET,
        "n_layer": llm.config.n_layer,
        "before": launches[: ends[0]],
        "layer": [[*node[:3], [name.removeprefix("0.") for name in node[3]]] for node in launches[ends[0] : ends[1]]],
        "after": launches[ends[-1] : passed],
        "choice": launches[passed:],
        "total": len(launches),
        "ahead": AHEAD,
    }


SAYS = {
    "embed_quantized": "the token's row",
    "rms_norm_quantize": "norm, then int8",
    "rope": "rotation; k, v → cache",
    "attend_chunks": "attention by chunk",
    "combine_quantize": "chunks joined, int8",
    "quantize": "silu(gate) · up, int8",
    "maxima": "the largest logits",
    "draw": "filters, noise, choice",
    "accept": "next token, position",
}
"""What a kernel does, where it multiplies no matrices."""

LEFT, BOX, SAY, HIGH, GAP = 66, 226, 302, 23, 9


def draw(facts: dict[str, Any], page: "Page") -> None:
    """The nodes of the graph, top to bottom."""
    page.text(LEFT - 46, 22, f"One step is one graph of {facts['total']} kernels", bold=True)
    page.text(LEFT - 46, 40, f"the bundled model on {facts['gpu']}; blocks × threads of each", "muted")

    def node(y: float, name: str, blocks: int, threads: int, weights: list[str], color: str) -> None:
        page.box(LEFT, y, BOX, HIGH, color, 0.16, 1, radius=4)
        page.text(LEFT + 8, y + 16, name, "text", 12.5, mono=True)
        page.text(LEFT + BOX - 8, y + 16, f"{blocks} × {threads}", "muted", 12, "end")
        says = "times " + ", ".join(weight.removeprefix("attn_").removeprefix("ffn_") for weight in weights)
        page.text(SAY, y + 16, SAYS.get(name, says if weights else ""), color, 12.5)

    y = first = 60.0
    parts = (("before", "purple"), ("layer", "blue"), ("after", "purple"), ("choice", "green"))
    for part, color in parts:
        if part == "layer":
            height = len(facts[part]) * (HIGH + GAP) - GAP + 16
            page.box(LEFT - 14, y - 8, page.width - LEFT + 2, height, color, 0, 1, radius=6)
            page.text(LEFT - 20, y - 8 + height / 2 + 5, f"{facts['n_layer']} ×", color, 14, "end", bold=True)
        for i, one in enumerate(facts[part]):
            node(y, *one, color)
            gap = GAP if i + 1 < len(facts[part]) else GAP + 14
            if part != "choice" or gap == GAP:
                page.line([(LEFT + 30, y + HIGH), (LEFT + 30, y + HIGH + gap)], arrow=True)
            y += HIGH + gap
    y += 4 - GAP
    back = [(LEFT + 30, y - 18), (LEFT + 30, y), (10, y), (10, first + HIGH / 2), (LEFT, first + HIGH / 2)]
    page.line(back, "green", 1.6, arrow=True)
    page.text(20, y + 21, "Token and position stay in the GPU's memory, where the next step", "green", 12.5)
    page.text(20, y + 38, f"reads them. The host launches {facts['ahead']} steps ahead.", "green", 12.5)
