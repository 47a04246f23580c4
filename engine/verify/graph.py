"""Comparison of a recorded pass run as a graph, in which kernels overlap, with the same pass run kernel by kernel."""

import numpy as np

from engine.cuda.backend import Backend
from engine.cuda.runtime.tensor import Plan
from engine.verify.check import Check, Difference, Site


def first_of_graph(ops: Backend, plan: Plan) -> str:
    """A text that names the first launch of a pass that writes different values in a captured graph than when each launch
    waits for the one before it."""
    alone: list[list[np.ndarray]] = []
    ops.observe(lambda seen: alone.append([ops.download(out) for out in seen.values.values()]))
    try:
        ops.start(plan)
    finally:
        ops.observe(None)

    def checks(n: int) -> list[Check]:
        """The checks of launch n, after the first n + 1 launches were captured and run."""
        part = Plan(plan.launches[: n + 1], None, plan.devices)
        ops.capture(part)
        assert part.graph
        part.graph.launch()
        found = [ops.download(out) for out in plan.launches[n].outputs]
        pairs = zip(alone[n], found, strict=True)
        return [Check("output, alone (CPU) and in the graph (GPU): ", a, b) for a, b in pairs]

    low, high = 0, len(plan.launches) - 1
    if not any(check.differing.any() for check in checks(high)):
        return (
            "operation by operation every kernel is right, and so is the same pass when it is captured again: "
            "the result changes from run to run."
        )
    while low < high:
        middle = (low + high) // 2
        if any(check.differing.any() for check in checks(middle)):
            high = middle
        else:
            low = middle + 1
    kernel = plan.launches[high].kernel
    site = Site(None, f"launch {high + 1} of {len(plan.launches)}", "", kernel.kernel.name, kernel.name)
    wrong = [check for check in checks(high) if check.differing.any()]
    shown = str(Difference(site, wrong[0], "")) if wrong else f"{site}: different in one of two runs."
    return (
        "operation by operation every kernel is right; run as a graph, where a kernel begins before the one before it has "
        f"ended, the first that differs is:\n{shown}"
    )
