"""A trace as text for a terminal."""

import math
from collections.abc import Iterable

from engine.sampling.token_logprob import TokenLogprob
from engine.trace.trace import Trace, TracedLayer, TracedStream, top_weights

WIDE = 60
"""Columns from which the lines of a part are indented below its name."""

SPACE = "\xa0"
"""Stands for a space at which no line is broken.  A token that contains it shows it as an escape."""

PER_HEAD = 3
"""The positions to list per head."""


def lines_of(trace: Trace, columns: int) -> list[str]:
    """The lines of a trace, none of which is wider than ``columns`` unless a single word is."""
    last = _quoted(trace.texts[trace.ids[-1]])
    out = [
        *_wrapped(f"token {len(trace.ids) - 1}, {last}, on its way through {_counted(len(trace.layers))}", "", columns),
        "",
        *_heading("embedding", f"norm {trace.embedding.norm:.3g}", columns),
        *_says(trace.embedding, columns),
    ]
    for layer in trace.layers:
        out += ["", *_layer(trace, layer, columns)]
    if trace.drafts is not None:
        out += ["", *_drafts(trace, columns)]
    return out


def _layer(trace: Trace, layer: TracedLayer, columns: int) -> Iterable[str]:
    kinds = ", ".join(kind for kind in (layer.mixer, layer.network) if kind)
    added = "".join(f", {part} added {norm:.3g}" for part, norm in layer.added.items())
    yield from _heading(f"layer {layer.index}", f"{kinds}; norm {layer.stream.norm:.3g}{added}", columns)
    yield from _says(layer.stream, columns)
    if (attention := layer.attention) is not None:
        for head, sink in enumerate(attention.sinks):
            seen = [
                f"{_quoted(trace.texts[trace.ids[at]])}@{at} {_percent(weight)}"
                for at, weight in top_weights(attention, head, PER_HEAD)
            ]
            if sink:
                seen.append(f"sink {_percent(sink)}")
            yield from _part("" if head else "heads", seen, columns, f"{head}: ")
    if layer.experts:
        yield from _part("experts", [f"{expert} {_percent(weight)}" for expert, weight in layer.experts], columns)
    if layer.states:
        yield from _part("states", [f"{norm:.3g}" for norm in layer.states], columns)
    if layer.missing:
        yield from _part("note", [layer.missing], columns)


def _says(stream: TracedStream, columns: int) -> list[str]:
    return _part("says", map(_likely, stream.lens), columns)


def _likely(token: TokenLogprob) -> str:
    return f"{_quoted(token.text)} {_percent(math.exp(token.logprob))}"


def _drafts(trace: Trace, columns: int) -> list[str]:
    drafts, texts = trace.drafts, trace.texts
    assert drafts is not None
    found = []
    for draft in drafts.drafts:
        instead = f" for {_quoted(texts[draft.own])}" if draft.own is not None and draft.fate == "refused" else ""
        found.append(f"{_quoted(texts[draft.id])} {draft.fate}{instead}")
    heading = _heading("drafts", f"{drafts.source}, after {_quoted(texts[drafts.after])}", columns)
    return [*heading, *_part("fate", found, columns)]


def _heading(name: str, rest: str, columns: int) -> list[str]:
    return _wrapped(f"{name:<10} {rest}" if columns >= WIDE else f"{name}: {rest}", "  ", columns)


def _part(name: str, items: Iterable[str], columns: int, before: str = "") -> list[str]:
    if columns >= WIDE:
        first, indent = f"  {name:<9}{before}", " " * (11 + len(before))
    else:
        first, indent = f"  {f'{name}: ' if name else ''}{before}", "    "
    return _wrapped(first + ", ".join(items), indent, columns)


def _wrapped(text: str, indent: str, columns: int) -> list[str]:
    """A text in lines of at most ``columns`` cells, of which all but the first are indented."""
    from rich.cells import cell_len  # which is slow to import

    lines = []
    line, *words = text.split(" ")
    for word in words:
        longer = f"{line} {word}"
        if line.strip() and cell_len(longer) > columns:
            lines.append(line)
            longer = indent + word
        line = longer
    return [each.replace(SPACE, " ") for each in [*lines, line]]


def _quoted(text: str) -> str:
    """The text of a token in quotes, in which no line is broken."""
    return repr(text).replace(" ", SPACE)


def _percent(weight: float) -> str:
    return f"{100 * weight:.1f}%"


def _counted(n: int) -> str:
    return f"{n} layer{'s' if n != 1 else ''}"
