"""The launches of matrix products: activations are quantized to int8 once per unit, then a launch multiplies up to three
matrices."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TypeAlias

from engine.cuda.products import matmul as kernels
from engine.cuda.products import quantize, warpgroup_chain, warpgroup_matmul, wide_matmul
from engine.cuda.products.repack import TILE
from engine.cuda.products.warpgroup_chain import TileShape
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.recorder import Chains, Int8, Recorder
from engine.cuda.runtime.tensor import Argument, DeviceWeight, Tensor
from engine.cuda.runtime.values import Deferred, plain, quantized
from engine.gguf.quants import CHAINS

DEEP_TILES = 2
"""The most tiles per multiprocessor for which a warp of a matrix product keeps two records in flight."""


def matmul(
    recorder: Recorder,
    x: Tensor | Deferred,
    weights: Sequence[DeviceWeight],
    residual: Tensor | None = None,
    bias: Tensor | None = None,
) -> list[Tensor]:
    """Record x [rows, K] times each weight [R, K], plus the bias [R], added to the residual [rows, R], if there are any:
    float32 [rows, R] for each.  A bias needs a residual, and :func:`can_add_bias`."""
    rows = x.shape[0]
    outputs = [recorder.empty((rows, weight.rows)) for weight in weights]
    by_layout: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for i, weight in enumerate(weights):
        warpgroups = rows > NARROW_ROWS and by_warpgroups(recorder, weight)
        by_layout[weight.format.unit if weight.format.quantized else 0, warpgroups].append(i)
    floats = plain(recorder, x) if (0, False) in by_layout else None
    for (unit, warpgroups), members in by_layout.items():
        if floats is not None and unit == 0:
            _matmul_floats(recorder, floats, [weights[i] for i in members], residual, [outputs[i] for i in members])
            continue
        # Group matrices by format, so that a launch contains the code of each format once.
        members.sort(key=lambda i: weights[i].format.name)
        runs, multiply = [members], _matmul_quantized
        if rows > NARROW_ROWS:
            # A launch contains the code of one format, or of two that are joined below.
            runs = [list(run) for _, run in groupby(members, key=lambda i: weights[i].format.name)]
            multiply = _matmul_wide
        groups = [run[first : first + 3] for run in runs for first in range(0, len(run), 3)]
        given = [([weights[i] for i in group], [outputs[i] for i in group]) for group in groups]
        if warpgroups:
            _matmul_warpgroups(recorder, x, _joined(given), residual)
            continue
        activations = quantized(recorder, x, unit)
        for chosen, outs in given:
            multiply(recorder, activations, rows, chosen, residual, bias, outs)
    return outputs


def by_warpgroups(recorder: Recorder, weight: DeviceWeight) -> bool:
    """Whether warpgroups multiply the matrix with many rows."""
    device = recorder.device
    return warpgroup_chain.takes(weight.format.name, device.compute_capability, device.shared_memory)


def can_add_bias(weight: DeviceWeight, rows: int) -> bool:
    """Whether the product of ``rows`` rows with this matrix can add a bias."""
    return weight.format.quantized and rows <= NARROW_ROWS


def results(outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The results of one launch by name: "result" for the first, then "result_1" and so on."""
    return {f"result_{i}" if i else "result": out for i, out in enumerate(outputs)}


def _matmul_quantized(
    recorder: Recorder,
    x: Int8,
    rows: int,
    weights: list[DeviceWeight],
    residual: Tensor | None,
    bias: Tensor | None,
    outputs: list[Tensor],
) -> None:
    entry, columns = weights[0].format, weights[0].columns
    units = columns // entry.unit
    tiles = list(accumulate(weight.tiles for weight in weights))
    formats = tuple(weight.format.name for weight in weights)
    spare = 3 - len(weights)
    arguments: tuple[Argument, ...] = (
        *(weights + weights[:1] * spare),
        *(outputs + outputs[:1] * spare),
        residual or 0,
        *(tiles + [tiles[-1]] * spare)[:2],
        *([weight.rows for weight in weights] + [0] * spare),
        units,
        *x,
        rows,
        bias or 0,
    )
    most = kernels.compiled_rows(rows)
    multiprocessors = recorder.device.multiprocessors
    at_once = tiles[-1] <= kernels.SINGLE_WARPS // units * multiprocessors
    single = units if rows <= 8 and entry.unit == 256 and at_once else 0
    deep = not single and rows <= 8 and tiles[-1] <= DEEP_TILES * multiprocessors
    further = (True,) if bias else ()
    kernel = kernels.matmul_quantized(formats, most, residual is not None, deep, single, *further)
    recorder.launch(kernel, (tiles[-1],), 32 * kernels.warps(units, single > 0), arguments, **results(outputs))


def computes(recorder: Recorder, results: Sequence[Tensor]) -> bool:
    """Whether the latest launch is a product with these results, all of one shape, which :func:`give` can give."""
    launch = recorder.latest
    if launch is None or launch.kernel.kernel is not kernels.matmul_quantized:
        return False
    wanted = [(result.address, results[0].shape) for result in results]
    return [(output.address, output.shape) for output in launch.outputs] == wanted


def give(recorder: Recorder, n_peers: int, places: Sequence[int]) -> None:
    """Let the product of the latest launch also give its results to ``n_peers`` other owners.  places: the further arguments
    of ``matmul_give``."""
    launch = recorder.latest
    assert launch is not None
    formats, most, add, deep, single, *biased = launch.kernel.constants
    kernel = kernels.matmul_give(formats, most, add, deep, single, bool(biased), n_peers)
    recorder.replace_latest(kernel, (*launch.arguments, *places))


def _matmul_wide(
    recorder: Recorder,
    x: Int8,
    rows: int,
    weights: list[DeviceWeight],
    residual: Tensor | None,
    bias: Tensor | None,
    outputs: list[Tensor],
) -> None:
    entry = weights[0].format
    tiles = list(accumulate(weight.tiles for weight in weights))
    spare = 3 - len(weights)
    given, units = weights + weights[:1] * spare, weights[0].columns // entry.unit
    written: tuple[Argument, ...] = (
        *(outputs + outputs[:1] * spare),
        *(residual or 0, residual is not None),
        *(tiles + [tiles[-1]] * spare),
        *([weight.rows for weight in weights] + [0] * spare),
    )
    kernel, grid, threads = wide_matmul.geometry(entry.name, rows, tiles[-1], recorder.device.shared_memory)
    recorder.launch(kernel, grid, threads, (*given, *written, units, *x, rows), **results(outputs))


Product: TypeAlias = tuple[list[DeviceWeight], list[Tensor]]
"""Up to three matrices with their outputs."""


def _joined(products: Sequence[Product]) -> list[Product]:
    """Products of one format each, of which two successive ones become one where a single launch can multiply both."""
    found: list[Product] = []
    for product in products:
        orders = [(found[-1], product), (product, found[-1])] if found else []
        fitting = [(first, last) for first, last in orders if _fit(first[0], last[0])]
        if fitting:
            (weights, outputs), (further, further_outputs) = fitting[0]
            found[-1] = weights + further, outputs + further_outputs
        else:
            found.append(product)
    return found


def _fit(weights: list[DeviceWeight], further: list[DeviceWeight]) -> bool:
    """Whether a launch can multiply ``weights``, of one format, and behind whole warpgroups of them ``further``, a single
    matrix of another format."""
    name, other = weights[0].format.name, further[0].format.name
    is_single = all(weight.format.name == name for weight in weights)
    if len(weights) > 2 or len(further) > 1 or not is_single or other == name:
        return False
    whole = sum(weight.tiles for weight in weights) % warpgroup_chain.GROUP_TILES == 0
    return whole and warpgroup_chain.can_share(name, other)


def _matmul_warpgroups(
    recorder: Recorder, x: Tensor | Deferred, products: Sequence[Product], residual: Tensor | None
) -> None:
    """Products of the same activations."""
    rows, units = x.shape[0], x.shape[1] // quantize.RUN
    # The kernel finds the end of a matrix by its number of rows, so it must begin at its first one, unless tiles are whole.
    sizes = [
        warpgroup_matmul.ProductSize(sum(w.tiles for w in weights), not any(w.rows % TILE for w in weights))
        for weights, _ in products
    ]
    any_layout = not isinstance(x, Deferred) or x.any_layout
    launches = warpgroup_matmul.launches_of_all(rows, sizes, units, recorder.device.multiprocessors, any_layout)
    (_, first_shape), *_ = launches[0]
    activations = quantized(recorder, x, quantize.RUN, layout=first_shape.tiles)
    for (weights, outputs), own in zip(products, launches, strict=True):
        first = 0
        for count, shape in own:
            _multiply_tiles(recorder, activations, rows, weights, residual, outputs, (first, first + count), shape)
            first += count


def _multiply_tiles(
    recorder: Recorder,
    x: Int8,
    rows: int,
    weights: Sequence[DeviceWeight],
    residual: Tensor | None,
    outputs: list[Tensor],
    which: tuple[int, int],
    shape: TileShape,
) -> None:
    """Multiply some tiles by warpgroups: from the first of ``which`` up to the second, running over all matrices."""
    units = weights[0].columns // weights[0].format.unit
    given: list[int] = []
    names: list[str] = []
    out: list[int] = []
    ends: list[int] = []
    n_rows: list[int] = []
    begin = skipped = 0
    for weight, output in zip(weights, outputs, strict=True):
        # The part of the matrix.
        low, high = max(which[0] - begin, 0), min(which[1] - begin, weight.tiles)
        begin += weight.tiles
        if low < high:
            skipped = low
            names.append(weight.format.name)
            given.append(weight.address + low * units * TILE * weight.format.unit_bytes)
            out.append(output.address + 4 * TILE * low)
            ends.append(high - low)
            n_rows.append(weight.rows)
    other = names[-1:] if names[-1] != names[0] else []
    # Spare matrices have no tiles; one of another format is the third.
    spare, place = 3 - len(given), len(given) - len(other)
    for values, value in ((given, given[0]), (out, out[0]), (ends, 0), (n_rows, 0)):
        values[place:place] = [value] * spare
    tiles = list(accumulate(ends))
    written: tuple[Argument, ...] = (
        *out,
        *(residual.address + 4 * TILE * skipped if residual is not None else 0, residual is not None),
        *tiles,
        *n_rows,
    )
    split = shape.split > 1
    chains = recorder.empty((warpgroup_matmul.chain_floats(shape, rows, tiles[-1]),)) if split else None
    kernel = warpgroup_matmul.matmul_warpgroups(names[0], shape.tiles, shape.groups, split, *other)
    arguments = (*given, *written, units, x.q, rows, CHAINS // shape.split, chains or 0)
    written_now = {"chains": chains} if chains else results(outputs)
    recorder.launch(kernel, shape.grid(rows, tiles[-1]), shape.threads, arguments, **written_now)
    if chains:
        kernel, grid = warpgroup_matmul.matmul_chains(shape.tiles), warpgroup_matmul.chains_grid(shape, rows, tiles[-1])
        n_chains = -(-units // -(-units // CHAINS))
        added: tuple[Argument, ...] = chains, *written, n_chains, rows
        if tiles[-1] == sum(weight.tiles for weight in weights):
            whole = Chains(chains, n_chains, shape.tiles, residual)
            recorder.add_chains(kernel, grid, added, whole, **results(outputs))
        else:
            recorder.launch(kernel, grid, 256, added, **results(outputs))


def _matmul_floats(
    recorder: Recorder,
    x: Tensor,
    weights: Sequence[DeviceWeight],
    residual: Tensor | None,
    outputs: Sequence[Tensor],
) -> None:
    (rows, columns), add = x.shape, residual is not None
    pairs = sorted(zip(weights, outputs, strict=True), key=lambda pair: pair[0].format.name)
    for name, run in groupby(pairs, key=lambda pair: pair[0].format.name):
        members = list(run)
        if rows > NARROW_ROWS:
            for weight, out in members:
                most, each = kernels.wide_shape(rows, weight.rows, recorder.device.multiprocessors)
                kernel = kernels.matmul_float_wide(name, most, add, each)
                grid = kernels.wide_grid(rows, weight.rows, most, each)
                arguments: tuple[Argument, ...] = (weight, x, rows, columns, weight.rows, residual or 0, out)
                recorder.launch(kernel, grid, 256, arguments, result=out)
            continue
        for group in (members[first : first + 3] for first in range(0, len(members), 3)):
            own, outs, spare = [w for w, _ in group], [out for _, out in group], [0] * (3 - len(group))
            n_rows = [w.rows for w in own]
            # Few results are spread over all multiprocessors.
            count = rows * sum(n_rows)
            warps = max(1, min(8, count // recorder.device.multiprocessors))
            arguments = (*own, *spare, *n_rows, *spare, x, rows, columns, residual or 0, *outs, *spare)
            kernel = kernels.matmul_float(name, add)
            recorder.launch(kernel, (-(-count // warps),), 32 * warps, arguments, **results(outs))
