"""One layer of the bundled model: the operations that its forward pass calls for one token, and the values between them."""

from typing import TYPE_CHECKING, Any

import numpy as np

from docs.figures import bundled
from engine.arrays import Batch
from engine.cache.kv import AttentionCache
from engine.cpu.products.repack import Records
from engine.ops.activation import Activation
from engine.ops.heads import Heads
from engine.ops.weight import Weight

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "A layer of the bundled model, operation by operation"
SIZE = (480, 790)


class Recorder:
    """A backend that writes down each operation before it runs it."""

    def __init__(self, ops: Any, names: dict[int, str]) -> None:
        """names: the names of vectors, by address."""
        self.calls: list[dict[str, Any]] = []
        self._ops = ops
        self._names = names
        self._values: dict[int, int] = {}
        # Values stay alive, so that no address is used twice.
        self._kept: list[np.ndarray] = []

    def value(self, array: np.ndarray) -> int:
        """The number of a value, in the order in which values first appear."""
        self._kept.append(array)
        return self._values.setdefault(array.ctypes.data, len(self._values))

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)

        def call(*arguments: Any) -> Any:
            noted: dict[str, Any] = {"operation": name, "in": [], "matrices": [], "vectors": []}
            for given in arguments:
                if isinstance(given, (Records, Weight)):
                    noted["matrices"].append([short(given.name), given.rows, given.columns, given.format.name])
                elif isinstance(given, Heads):
                    norms = given.q_norm is not None, given.k_norm is not None
                    noted["heads"] = [given.n_head, given.n_head_kv, given.d_k, given.d_v, *norms]
                elif isinstance(given, Activation):
                    noted["activation"] = given.kind
                elif isinstance(given, AttentionCache):
                    noted["cache"] = [given.k_type.name, given.v_type.name, given.window]
                elif isinstance(given, np.ndarray) and given.ctypes.data in self._names:
                    noted["vectors"].append(self._names[given.ctypes.data])
                elif isinstance(given, np.ndarray) and given.dtype == np.float32 and given.shape[0] == 1:
                    noted["in"].append(self.value(given))
            result = operation(*arguments)
            results = result if isinstance(result, list) else [result]
            noted["out"] = [[self.value(array), array.shape[-1]] for array in results]
            self.calls.append(noted)
            return result

        return call


def short(name: str) -> str:
    """The name of a tensor without its layer and suffix."""
    return name.removeprefix("blk.0.").removesuffix(".weight")


def facts() -> dict[str, Any]:
    """The operations of the first layer for one token at position 0."""
    model = bundled.model().model
    bundled.model().reset()
    names = model.config.layers[0].norms._asdict()
    norms = {getattr(model.layers[0], place).weight.ctypes.data: name for place, name in names.items() if name}
    batch = Batch(*np.zeros((3, 1), np.int32))
    model.prepare(0, 1, model.sequence)
    x = model.ops.embed(model.token_embd, batch.tokens, model.config.embedding_scale)
    ops = model.ops
    model.ops = recorder = Recorder(ops, norms)
    try:
        recorder.value(x)
        model.block(0, x, batch)
    finally:
        model.ops = ops
        bundled.model().reset()
    return {"width": x.shape[-1], "layers": model.config.n_layer, "calls": recorder.calls}


SAYS = {
    "rms_norm": "x / √(mean x² + ε), times",
    "matmul": "times each of",
    "matmul_add": "times {}, then added to x",
    "swiglu": "silu(gate) · up",
}

LEFT, BOX, NOTES, SCALE = 62, 138, 214, 110 / 1024


def notes(call: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines next to an operation, and their colors."""
    matrices = [f"{name}: {rows} × {columns}, {kind}" for name, rows, columns, kind in call["matrices"]]
    found: list[tuple[str, str]] = []
    if "heads" in call:
        n, n_kv, d_k, _, q_norm, k_norm = call["heads"]
        k_type, v_type, window = call["cache"]
        types = k_type if k_type == v_type else f"{k_type}, {v_type}"
        found = [
            (f"{n} heads of q share {n_kv} of k and v", "text"),
            (f"{d_k} wide; q and k {'normalized and ' * (q_norm and k_norm)}rotated", "text"),
            (f"k, v → cache ({types}), then", "green"),
            (f"all keys and values{' of the window' * bool(window)} ← cache", "green"),
        ]
    elif (what := call.get("activation", call["operation"])) in SAYS:
        text = SAYS[what]
        if call["vectors"]:
            text += " " + ", ".join(call["vectors"])
        if "{}" in text:
            text = text.format(", ".join(name for name, *_ in call["matrices"]))
        found = [(text, "text")]
    return found + [(line, "purple") for line in matrices]


def names(call: dict[str, Any]) -> list[str]:
    """Names of the results of an operation: of a product, those of its matrices."""
    ends = [name.rpartition("_")[2] for name, *_ in call["matrices"]]
    return ends if len(call["out"]) > 1 else [""]


def values(page: "Page", y: float, found: list[tuple[str, int]]) -> None:
    """Values as bars to scale, with their names and numbers of elements."""
    x, labels = float(LEFT), []
    for name, width in found:
        page.box(x, y, width * SCALE, 11, "blue", 0.35)
        x += width * SCALE + 5
        labels.append(f"{name} {width}".strip())
    page.text(x + 5, y + 10, ", ".join(labels), "blue")


def draw(facts: dict[str, Any], page: "Page") -> None:
    """Top to bottom in the order of the calls; a value that is used later goes down on the left."""
    page.text(LEFT, 22, f"x, the stream of one token: {facts['width']} numbers", bold=True)
    y = 32.0
    values(page, y, [("x", facts["width"])])
    stream: dict[int, float] = {0: y + 5.5}
    rail = 30
    previous = {0}
    for call in facts["calls"]:
        lines = notes(call)
        height = max(30.0, 17 * len(lines) + 8)
        top = y + 31
        page.line([(LEFT + 30, y + 12), (LEFT + 30, top)], arrow=True)
        page.box(LEFT, top, BOX, height, "muted", 0.12, radius=4)
        page.text(LEFT + BOX / 2, top + height / 2 + 5, call["operation"], anchor="middle", mono=True, bold=True)
        first = top + height / 2 + 5 - 8.5 * (len(lines) - 1)
        for i, (line, color) in enumerate(lines):
            page.text(NOTES, first + 17 * i, line, color, 12.5)
        for used in call["in"]:
            if used not in previous:
                at = top + height / 2
                page.line([(LEFT, stream[used]), (rail, stream[used]), (rail, at), (LEFT, at)], "orange", 2, arrow=True)
                page.text(rail - 8, (stream[used] + at) / 2 + 4, "x", "orange", 13, "end", bold=True)
        y = top + height + 9
        page.line([(LEFT + 30, top + height), (LEFT + 30, y)])
        previous = {number for number, _ in call["out"]}
        widths = [(name, width) for name, (_, width) in zip(names(call), call["out"], strict=True)]
        values(page, y, [("x", width) for _, width in widths] if call["operation"] == "matmul_add" else widths)
        for number in previous:
            stream[number] = y + 5.5
    page.line([(LEFT + 30, y + 12), (LEFT + 30, y + 36)], arrow=True)
    page.text(LEFT + 44, y + 34, f"x of the next layer; the model has {facts['layers']}")
