"""The memory that a model needs for caches, snapshots, and intermediate results of passes."""

from collections.abc import Iterable

from engine.cache.kv import pass_rows
from engine.cache.spec import CacheSpec, Ring
from engine.cache.types import Types
from engine.limits import DECODE_ROWS, DRAFTED_ROWS
from engine.models.config import ModelConfig
from engine.models.placement import Placement
from engine.ops.crossing import SLOTS
from engine.ops.operations import AnyOperations

SLICE = 1024
"""The most rows that each of several GPUs reads at a time of a pass over a prompt (``engine/models/relay.py``).  With M
slices, N GPUs take about (M + N - 1) / M times as long as if none had to wait."""


def context_bytes(
    config: ModelConfig,
    ops: AnyOperations,
    types: Types,
    n_ctx: int,
    rows: int,
    rewind: int,
    n_sequences: int = 1,
    capacity: int = 0,
    placement: Placement | None = None,
    owner: int = 0,
) -> int:
    """The memory in bytes that a model needs in addition to its weights: caches, page tables, rotation angles, and
    intermediate results of passes.

    n_ctx: the maximum number of positions of a sequence.
    rows: the maximum number of rows in a pass that reads a prompt.
    rewind: the number of tokens that recurrent layers can always roll back.
    n_sequences: the number of sequences.
    capacity: the number of positions that all sequences share; 0: ``n_ctx`` for each sequence.
    placement: the devices of the parts; the result is then the memory on the device of ``ops``.  None: all parts are there.
    owner: of several devices that share the layers (``ops.owners``), the one whose memory is the result.
    """
    share = owner, len(ops.owners)
    most = pass_rows(rows, n_ctx, ops.decode_rows)
    sizes = n_ctx, most, types, n_sequences, capacity
    every = zip(config.owners, cache_specs(config, rewind, ops.decode_rows), strict=True)
    specs = [spec for il, spec in every if placement is None or placement.memory(il) is ops]
    if share[1] > 1:
        specs = [spec.part(*share) for spec in specs]
    cache = sum(spec.n_bytes(*sizes) for spec in specs) + table_bytes(specs, types, n_ctx, n_sequences)
    if config.mtp and (placement is None or placement.last is ops):
        cache += drafting_bytes(config, most, rewind, n_sequences)
    if placement is not None and placement.relayed:
        most = min(most, max(SLICE, ops.decode_rows))
        cache += relayed_bytes(config, most)
    divided = placement is not None and not placement.relayed and len(placement.devices) > 1
    own = ops.owners[owner]
    batch = 0 if divided else batch_bytes(config, own, n_ctx, n_sequences, share)
    return cache + angle_bytes(config, n_ctx) + pass_bytes(config, own, n_ctx, most, share) + batch


def relayed_bytes(config: ModelConfig, rows: int) -> int:
    """The memory in bytes for what goes from one GPU to the next in passes of up to ``rows`` rows."""
    taps = len(config.taps) * config.n_embd
    return 4 * rows * (SLOTS + 1) * (crossing_width(config) + told_width(config) + taps)


def pass_bytes(config: ModelConfig, ops: AnyOperations, n_ctx: int, rows: int, share: tuple[int, int] = (0, 1)) -> int:
    """An estimate of the memory in bytes for intermediate results of passes of up to ``rows`` rows.

    share: the number of the device among those that share the layers, and their number.  Each has whole rows of most results.
    """
    mixers = [layer.mixer.part(*share) for layer in config.all_layers]
    scratch = max(mixer.scratch_bytes(ops, n_ctx, rows) for mixer in mixers)
    scores = max(mixer.score_bytes(n_ctx) for mixer in mixers)
    # Passes of less than an eighth of the rows have memory of their own for scores (``engine/cpu/runtime/pool.py``).
    return scratch + rows * (row_bytes(config) + scores + scores // 7)


def batch_bytes(
    config: ModelConfig, ops: AnyOperations, n_ctx: int, n_sequences: int, share: tuple[int, int] = (0, 1)
) -> int:
    """An estimate of the memory in bytes for decode batches of more rows than one answer has, besides the passes that read
    prompts; 0 if there are none.

    n_sequences: the number of sequences.
    share: see :func:`pass_bytes`.
    """
    most = max(min(n_sequences, ops.decode_answers), drafted_rows(ops, n_sequences))
    if most <= ops.decode_rows:
        return 0
    rows = ops.padded_rows(most, True)
    scratch = max(layer.mixer.part(*share).scratch_bytes(ops, n_ctx, rows) for layer in config.all_layers)
    # Prompts of so few rows have room in the memory of longer ones.
    products = ops.product_bytes(rows, max(_row_elements(config)))
    # The logits of smaller batches stay in memory of their own.
    return scratch + products + rows * (row_bytes(config) + 3 * 4 * config.n_vocab)


def drafted_rows(ops: AnyOperations, n_sequences: int) -> int:
    """The maximum number of rows in a decode batch with drafts of a model that has so many sequences."""
    return max(ops.decode_rows, min(ops.drafted_rows, DRAFTED_ROWS * n_sequences))


def cache_specs(config: ModelConfig, rewind: int, decode_rows: int = DECODE_ROWS) -> list[CacheSpec]:
    """The specifications of the caches of all layers that have one.  Those of layers that draft come last.

    rewind: the number of tokens that recurrent layers can always roll back.
    decode_rows: the maximum number of rows in a decode batch.
    """
    return [config.all_layers[il].mixer.cache_spec(rewind, decode_rows) for il in config.owners]


def table_bytes(specs: Iterable[CacheSpec], types: Types, n_ctx: int, n_sequences: int) -> int:
    """The size in bytes of the page tables, one for each kind of page."""
    kinds = {paging for spec in specs for paging in spec.page_bytes(types)}
    return 4 * n_sequences * sum(paging.chunks(n_ctx) for paging in kinds)


def drafting_bytes(config: ModelConfig, rows: int, rewind: int, n_sequences: int) -> int:
    """The memory in bytes for the values that layers that draft keep between passes, besides keys and values.

    rows: the maximum number of rows in a pass.
    rewind: the number of tokens that recurrent layers can always roll back.
    n_sequences: the number of sequences.
    """
    if config.block:
        return 4 * DECODE_ROWS * (config.n_vocab + config.n_embd)
    return 4 * hidden_width(config) * hidden_ring(rows, rewind).capacity * n_sequences


def hidden_ring(max_rows: int, rewind: int) -> Ring:
    """The ring of the trunk's outputs for the latest tokens.  The layer that drafts reads the output of the position before
    a token."""
    return Ring(1, max(max_rows, rewind) + 1)


def recurrent_bytes(config: ModelConfig) -> int:
    """The size in bytes of a segment of all recurrent layers, which is a state and its updates or tokens, plus the parts of a
    snapshot that belong to layers with compressed rows or short convolutions; 0 if there are no such layers."""
    return sum(spec.snapshot_bytes for spec in cache_specs(config, 1))


def snapshot_bytes(config: ModelConfig) -> int:
    """The size of a snapshot in bytes (``engine/models/base.py``).

    0 if the model needs no snapshots, because it can return to any position without them, or if snapshots are not sufficient,
    because layers with a window have freed pages with keys and values.
    """
    restorable = all(spec.restorable for spec in cache_specs(config, 1))
    outputs = 4 * hidden_width(config) if config.mtp and not config.block and restorable else 0
    return recurrent_bytes(config) + outputs


def hidden_width(config: ModelConfig) -> int:
    """The number of elements per position that a layer that drafts needs: usually those of the residual stream."""
    return config.n_embd_draft or stream_width(config)


def stream_width(config: ModelConfig) -> int:
    """The number of elements of a row of the residual stream, or of all of its streams."""
    return config.n_embd * (config.streams.count if config.streams is not None else 1)


def crossing_width(config: ModelConfig) -> int:
    """The number of elements of 4 bytes per row that go from one stage to the next."""
    return stream_width(config) + config.n_shared


def told_width(config: ModelConfig) -> int:
    """The number of per-layer embeddings of a token, for all layers."""
    return config.n_layer * config.n_per_layer


def angle_bytes(config: ModelConfig, positions: int) -> int:
    """The size in bytes of the rotation angles of ``positions`` positions: a cosine and a sine for each pair of each kind of
    rotation."""
    return 4 * positions * sum(rope.n_rot for rope in config.ropes)


def _row_elements(config: ModelConfig) -> tuple[int, int]:
    """The elements per row of the intermediate results of a mixer and of a network, at most."""
    mixers = max(layer.mixer.row_elements for layer in config.all_layers)
    return mixers, max(layer.network.row_elements(config.n_embd) for layer in config.all_layers)


def row_bytes(config: ModelConfig) -> int:
    """An estimate of the memory in bytes per row that one layer needs during a pass.

    It includes the residual stream and the results that are added to it, the intermediate results of the mixer and of the
    network, in float32 and, for products, in int8.
    """
    mixers, networks = _row_elements(config)
    told = 3 * told_width(config)
    streams = 3 * config.streams.count * config.n_embd if config.streams is not None else 0
    taps = 2 * len(config.taps) * config.n_embd
    floats = 8 * config.n_embd + mixers + networks + told + streams + taps + 4 * config.n_shared
    # The factor 3 / 2 accounts for int8 and for fragmentation.
    return 4 * floats * 3 // 2
