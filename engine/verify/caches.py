"""What the caches of one model on two devices hold, compared."""

from collections.abc import Iterator

from engine.llm import LLM
from engine.verify.layout import remembered
from engine.verify.lockstep import Check


def cache_checks(cpu: LLM, other: LLM) -> Iterator[Check]:
    """Comparisons of the keys, values and states that the next token of the sequence in slot 0 can see.  A part of ``other``
    may be on any device; both models have read the same tokens."""
    n, models = other.sequence.length, (cpu.model, other.model)
    for (what, mine), (_, theirs) in zip(*(remembered(model, n) for model in models), strict=True):
        yield Check(f"{what}: ", mine, theirs)
    for index, il in enumerate(cpu.config.owners):
        contents = (model.cache.layers[index].contents(n, model.placement.memory(il).download) for model in models)
        for (what, mine), (_, theirs) in zip(*contents, strict=True):
            yield Check(f"{what} of layer {il}, among the visible positions", mine, theirs)
