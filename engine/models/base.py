"""The common part of all models: embedding, layers, output head, cache, and the methods that run passes."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from engine.arrays import Array, Batch, Matrix, Role, SharedPositions, Thinned, Value
from engine.cache.kv import KVCache, pass_rows
from engine.cache.pages import PagedMemory
from engine.cache.recurrent import Snapshot
from engine.cache.sequence import Sequence
from engine.cache.spec import StoredRows, of_sequence
from engine.cache.thinning import OBSERVED
from engine.cache.types import CHUNK, Types
from engine.compile.jobs import Job
from engine.errors import DeviceError
from engine.gguf.file import GGUF
from engine.limits import MOST_TOGETHER
from engine.models.classifier import Classifier, load_classifier
from engine.models.config import ModelConfig
from engine.models.drafter import Drafter, Fusion
from engine.models.joint import JointStage
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.models.needs import SLICE, cache_specs, crossing_width, drafted_rows, hidden_ring
from engine.models.norm import load_norm
from engine.models.placement import LayerPart, Placement, parts_of
from engine.models.relay import Relay, RelayedPass
from engine.models.routed import MixtureHead
from engine.models.stage import Stage, StagedPass, StageInputs, StreamBuffers
from engine.models.streaming import Streaming, streaming
from engine.ops.executor import SplitPass
from engine.ops.experts import Experts
from engine.ops.operations import Ops

TokenSequences = SequenceOf[tuple[Sequence, SequenceOf[int]]]
"""Sequences, each with the tokens that a pass reads for it."""


ROW_STEP = 32
"""The numbers of rows of passes over whole texts are multiples of this, if they are larger: a pass is recorded once for each
number of rows."""

ANSWER_STEP = 8
"""The same for decode batches of more answers than have drafts."""


class Model(Loader):
    """A model on one backend, or divided into stages on several.  No code here or in subclasses depends on their kind.

    ``ops`` is the backend of the output and, unless the model is divided, of everything else.  A subclass loads a layer in
    ``load_layer`` and computes its two parts in ``mix`` and ``feed``.  ``drafter`` is the network that drafts tokens from the
    outputs of the trunk, either a layer of the file (``engine/models/mtp.py``) or an assistant
    (``engine/models/assistant.py``).  It is None if there is no such network or it is switched off.
    """

    loader_type: type[Loader] = Loader
    """The class of the loaders of further devices."""

    can_be_shared = False
    """Whether several devices can share its layers: their operations are those that a group of devices has."""

    def __init__(
        self,
        config: ModelConfig,
        gguf: GGUF,
        placement: Placement,
        n_ctx: int,
        types: Types,
        rewind: int,
        n_sequences: int = 1,
        capacity: int = 0,
        prompt_rows: int = 0,
        budget: int = 0,
    ) -> None:
        """Load the weights and allocate the cache.

        placement: the backends of the parts of the model.
        n_ctx: the maximum number of positions of a sequence.
        types: the element types of keys and values.
        rewind: the number of tokens that recurrent layers can always roll back.
        n_sequences: the number of sequences in the cache.
        capacity: the number of positions that all sequences share; 0: n_ctx for each sequence.
        prompt_rows: the maximum number of rows in a pass that reads a prompt; 0: the maximum of the backend.
        budget: the number of positions of a prompt that layers without a window keep (``engine/cache/thinning.py``); 0: all.
        """
        ops = placement.last
        super().__init__(config, gguf, ops, n_ctx)
        self.placement = placement
        #: The parts of each layer, which every pass goes through.
        self.parts = [parts_of(config, il) for il in range(config.n_layer)]
        self._loaders: dict[Ops, Loader] = {ops: self}
        #: Loaders of other files, whose rotation angles its passes use, too.
        self.further: list[Loader] = []
        self.rewind = rewind
        self.n_sequences = n_sequences
        #: The maximum number of rows in a pass that reads a prompt.
        self.prompt_rows = prompt_rows or max(device.max_rows for device in self.devices)
        #: The maximum number of rows in a pass.
        self.max_rows = pass_rows(self.prompt_rows, n_ctx, ops.decode_rows)
        self.drafter: Drafter | None = None
        #: What the drafter reads of several layers; None: it reads the output.
        self.fusion: Fusion | None = None
        first = self.loader(placement.first)
        self.embedding = first.embedding_matrix("token_embd.weight", config.n_vocab, config.n_embd)
        n = config.n_positions
        #: The embeddings of positions [n_positions, n_embd]; None if the model has none.
        self.positions = first.embedding_matrix("position_embd.weight", n, config.n_embd) if n else None
        self.load_output()
        #: What scores a query with a document; None: the model is no reranker.
        self.classifier: Classifier | None = load_classifier(self) if config.pooling == "rank" else None
        self.layers: list[Any] = [self.load_layer(il) for il in range(config.n_layer)]
        self.load_rest()
        # load_rest leaves out the layer that drafts if its tensors are wrong.
        config = self.config
        # The cache is allocated last, when the tensors have confirmed the sizes in the metadata.
        others = [hidden_ring(self.max_rows, rewind)] if config.mtp and not config.block else []
        specs = cache_specs(config, rewind, ops.decode_rows)
        places = [placement.memory(il) for il in config.owners]
        sizes = n_ctx, self.max_rows, types
        self.cache = KVCache(specs, *sizes, ops.zeros, ops.store, others, n_sequences, capacity, places, budget)
        #: The number of positions for which rotation angles have been computed, in whole chunks.
        self._n_angles = 0
        #: The sequences, one for each slot of the cache.
        self.sequences = [Sequence(self.cache, slot) for slot in range(n_sequences)]
        #: The sequence in slot 0.
        self.sequence = self.sequences[0]
        #: The slots of the rows in ``_wanted``, int32 [MOST_TOGETHER].
        self._nowhere = ops.zeros((MOST_TOGETHER,), np.int32)
        #: The number of segments in the rings of recurrent layers; 0 without such layers.
        self.segments = max((spec.segments for spec in specs), default=0)
        #: The runs of its parts that lie on one device; empty if all parts do.
        self.stages: list[Stage] = []
        #: These stages as one recorded pass, for passes of few rows; None if the device cannot.
        self.joint: JointStage | None = None
        #: How a divided model reads prompts on the GPU; None if it does not.
        self.streaming: Streaming | None = None
        #: How passes go from stage to stage if each is on a GPU of its own; None if not.
        self.relay: Relay | None = None
        self._divide()
        #: Memory for the residual streams between stages.
        self._buffers = StreamBuffers(placement.accelerator, self.max_rows, crossing_width(config))

    @property
    def devices(self) -> tuple[Ops, ...]:
        """The backends of its parts."""
        return self.placement.devices

    @cached_property
    def token_embd(self) -> Matrix:
        """The embedding [n_vocab, n_embd] in memory that ``ops`` can read, for the network that drafts and, unless several
        devices share the model, the output.  A divided model loads it a second time when it is first used, which must be
        before ``ops.loaded``."""
        if self.placement.first is self.ops:
            return self.embedding
        return self.matrix("token_embd.weight", self.config.n_vocab, self.config.n_embd)

    def _divide(self) -> None:
        """Make the stages, unless one device has all parts."""
        runs = self.placement.stages(self.config)
        if len(runs) == 1:
            return
        relayed = self.placement.relayed
        rows, answers = self.max_rows, 0
        if relayed:
            rows = min(rows, SLICE, *(ops.max_rows for ops in self.devices))
            answers = min(self.n_sequences, *(ops.decode_answers for ops in self.devices))
        inputs = {ops: StageInputs(self.config, ops, rows, answers) for ops, _ in runs}
        ends = [(i == 0, i == len(runs) - 1) for i in range(len(runs))]
        self.stages = [Stage(self, inputs[ops], parts, *end) for (ops, parts), end in zip(runs, ends, strict=True)]
        if relayed:
            self.relay = Relay(self.config, self.stages, inputs, self.tell if self.config.n_per_layer else None)
            return
        self.joint = self._joined(inputs)
        for mixers in (True, False):
            # If the memory of the GPU is too small, fewer parts move for a prompt, or none.
            with contextlib.suppress(DeviceError):
                self.streaming = streaming(self, self.placement, inputs, mixers)
                return

    def _joined(self, inputs: Mapping[Ops, StageInputs]) -> JointStage | None:
        """The stages as one recorded pass; None if the device cannot, or if there are several GPUs.  inputs: what the stages
        of each device begin with."""
        gpu, config = self.placement.accelerator, self.config
        if self.placement.n_accelerators > 1:
            return None
        routed = self.placement.routed(config)
        n_used = max((self.layers[part.layer].network.experts.n_used for part in routed), default=0)
        if any(il < config.n_layer and self.placement.mixers[il] is not gpu for il in config.taps):
            return None  # the network that drafts would need rows that only the CPU has
        exchange = gpu.exchange(len(self.stages) - 1, gpu.decode_rows, crossing_width(config), n_used)
        if exchange is None:
            return None
        heads: dict[int, MixtureHead] = {}
        experts: dict[int, Experts[Array, Matrix]] = {}
        for i, stage in enumerate(self.stages):
            if stage.parts and stage.parts[0] in routed:
                (part,) = stage.parts
                layer = self.layers[part.layer]
                heads[i] = MixtureHead(layer, self.loader(gpu), part.layer)
                experts[i] = layer.network.experts
        host = next(stage.ops for stage in self.stages if stage.ops is not gpu)
        return JointStage(self, inputs[gpu], inputs[host], self.stages, exchange, heads, experts)

    def layer(self, ops: Ops, il: int, network: bool) -> Any:
        """Layer ``il`` with a mixer, or a network, whose weights are in memory that ``ops`` reads."""
        if self.streaming is None or ops is not self.streaming.ops:
            return self.layers[il]
        return self.streaming.layers.get(LayerPart.of(self.config, il, network), self.layers[il])

    def on_device(self, ops: Ops) -> Callable[[np.ndarray], Array]:
        """A function that returns, for an array that a layer on the CPU uses, the array that ``ops`` uses in its place: its
        own table of rotation angles, or else a copy."""
        own = self.loader(ops)
        tables = {
            id(rotary.table): own.rotary(rope).table
            for loader in self._loaders.values()
            if loader is not own
            for rope, rotary in loader._rotaries.items()
        }
        return lambda array: tables.get(id(array)) or ops.upload(array)

    def loader(self, ops: Ops) -> Loader:
        """The loader that loads tensors for a backend: the model itself for its own."""
        if ops not in self._loaders:
            self._loaders[ops] = self.loader_type(self.config, self.gguf, ops, self._n_ctx, taken=self._taken)
        return self._loaders[ops]

    def load_output(self) -> None:
        """Load the norm after the last layer, and the output matrix."""
        config = self.config
        self.output_norm = load_norm(self, config.output_norm)
        tied, is_shared = not self.has("output.weight"), len(self.ops.owners) > 1
        name, shape = "token_embd.weight" if tied else "output.weight", (config.n_vocab, config.n_embd)
        self.output = Linear(self.token_embd) if tied and not is_shared else self.product(name, *shape)

    def load_layer(self, il: int) -> Any:
        """Load the weights of layer ``il``."""
        raise NotImplementedError

    def load_rest(self) -> None:
        """Load all weights that do not belong to a layer of the trunk."""
        raise NotImplementedError

    # --- thinned sequences --------------------------------------------------------------------------------------

    def placed(self, ops: Ops, batch: Batch[Array], observed: bool = False) -> Batch[Array]:
        """The batch with what attention needs if sequences may be thinned, or if layers share selected positions.

        ops: the backend of the layers that come next.
        observed: whether their attention adds masses to those of the rows.
        """
        if self.config.n_shared and batch.choice is None:
            batch = replace(batch, choice=SharedPositions())
        memory = self.cache.memories.get(ops)
        if memory is None or memory.dropped is None or batch.thinned is not None:
            return batch
        places = ops.places(batch.positions, batch, memory.dropped)
        return replace(batch, thinned=Thinned(memory.dropped, places, memory.masses if observed else None))

    def dropped(self, memory: int) -> Array | None:
        """The number of positions that each sequence has dropped, int32 [slots], beside cache ``memory``; None if sequences
        are not thinned."""
        return self.cache.memories[self.placement.memory(self.config.owners[memory]).owners[0]].dropped

    def masses(self, sequence: Sequence) -> np.ndarray:
        """The masses of the chunks of a sequence whose last rows have been observed, int64 [chunks]."""
        rows = slice(sequence.slot * OBSERVED, (sequence.slot + 1) * OBSERVED)
        found = [ops.download(memory.masses[rows]) for ops, memory in self._memories()]
        return np.concatenate(found).sum(0, np.int64)

    # --- the forward pass --------------------------------------------------------------------------------------

    def forward(self, tokens: np.ndarray, positions: np.ndarray, n_logits: int, sequence: Sequence) -> np.ndarray:
        """Run a pass over ``tokens`` int32 [rows] at ``positions`` int32 [rows].  The caller then commits the tokens.

        Positions are consecutive and begin at ``sequence.length``.  The bits of a row do not depend on the number of rows.

        Returns the logits of the last ``n_logits`` rows, float32 [n_logits, n_vocab].  Raises ContextError if the positions
        do not fit into the context, and NoPages if all pages of the cache are in use.
        """
        passing = self.split(tokens, positions, n_logits, sequence, at_once=True)
        passing.advance(passing.pieces)
        logits = passing.logits(wait=True)
        return np.empty((0, self.config.n_vocab), np.float32) if logits is None else logits

    def split(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        n_logits: int,
        sequence: Sequence,
        observed: bool = False,
        at_once: bool = False,
    ) -> SplitPass:
        """Prepare the pass of :meth:`forward` so that it can be started in pieces.

        The caller commits the tokens when it has started all pieces.

        tokens, positions: int32 [rows].
        n_logits: the number of last rows whose logits are computed.
        observed: whether the masses of the chunks that the rows see are computed (:meth:`masses`).  Then there are at most as
            many rows as in a decode batch.
        at_once: whether nothing needs to run between the pieces.  The pass may then have been started when this returns.

        Raises ContextError if the positions do not fit into the context, and NoPages if all pages of the cache are in use.
        """
        self.prepare(int(positions[0]), tokens.size, sequence)
        if observed:
            self.cache.clear_masses(sequence.slot, int(positions[0]), tokens.size)
        slots = np.full(tokens.size, sequence.slot, np.int32)
        # A short part of a prompt is read like a decode batch, so that the recordings of decode passes can be used.
        role = Role.DECODE if tokens.size <= self.ops.decode_rows else Role.PREFILL
        batch = Batch(tokens, positions, slots, role=role, observed=observed)
        if self.relay is not None:
            return RelayedPass(self.relay, batch, n_logits)
        if self.stages:
            return self.staged_pass(batch, n_logits, self.stages if observed else None)
        compute = self.compute_observed if observed else self.compute
        return self.ops.split(compute, batch, n_logits, self.prompt_rows, at_once)

    def split_together(self, parts: TokenSequences, wanted: SequenceOf[bool], at_once: bool = False) -> SplitPass:
        """Prepare one pass over tokens of several sequences, so that it can be started in pieces; ``reads_together`` must be
        true.  The caller commits the tokens when it has started all pieces.

        The bits of a row do not depend on the other sequences.

        parts: for each sequence, the sequence and the tokens that follow it; at most ``MOST_TOGETHER``.
        wanted: for each sequence, whether the logits of its last row are computed.
        at_once: see :meth:`split`.

        Raises ContextError if the positions do not fit into the context, and NoPages if all pages of the cache are in use.
        """
        batch = self._joined_rows(parts)
        ends = np.cumsum([len(tokens) for _, tokens in parts], dtype=np.int32)
        runs = np.full((2, MOST_TOGETHER + 1), batch.rows, np.int32)
        runs[0, 0], runs[0, 1 : ends.size] = 0, ends[:-1]
        runs[1] = 0
        runs[1, : ends.size] = [sequence.slot for sequence, _ in parts]
        role = Role.DECODE if batch.rows <= self.ops.decode_rows else Role.PREFILL
        ends = ends[np.array(wanted, bool)]
        batch = replace(batch, mixed=True, role=role, runs=runs, ends=ends)
        return self.ops.split(self.compute, batch, ends.size, self.prompt_rows, at_once)

    def staged_pass(
        self, batch: Batch[np.ndarray], n_logits: int, stages: SequenceOf[Stage] | None = None
    ) -> StagedPass:
        """A pass over claimed positions that returns the logits of the last ``n_logits`` rows.

        stages: the stages of the pass; None: those that are likely to be faster.
        """
        told = None
        if self.config.n_per_layer:
            told = self.placement.first.run(self.tell, batch, batch.rows, None, self.prompt_rows)
        note = None
        if stages is None:
            stages = self.stages
            if self.joint is not None and batch.role is Role.DECODE:
                stages = [self.joint]
            elif self.streaming is not None and batch.role is Role.PREFILL and not batch.mixed:
                stages, note = self.streaming.choose(stages, batch.rows)
        config = self.config
        taps = {il: np.empty((batch.rows, config.n_embd), np.float32) for il in config.taps if il < config.n_layer}
        return StagedPass(stages, batch, told, n_logits, self._buffers, note, taps)

    @property
    def decode_answers(self) -> int:
        """The most answers of a decode batch.  The CPU and a GPU exchange the rows of smaller batches."""
        return self.stages[-1].decode_answers if self.stages else self.ops.decode_answers

    @cached_property
    def drafted_rows(self) -> int:
        """The most rows of a decode batch with drafts: those of an answer where passes of more rows are slower, or go from
        stage to stage."""
        slow = bool(self.stages) or self.many_answers > self.ops.decode_rows + 1
        return self.ops.decode_rows if slow else drafted_rows(self.ops, self.n_sequences)

    @cached_property
    def many_answers(self) -> int:
        """The number of answers from which a decode batch of more than ``Executor.decode_rows`` is faster than several."""
        weights = Counter[str]()
        for tensor in self.gguf.tensors.values():
            if len(tensor.shape) > 1:
                weights[tensor.type.name] += tensor.nbytes
        return self.ops.many_answers(weights)

    def step(self, parts: TokenSequences) -> list[np.ndarray]:
        """Run one pass over tokens of several sequences.  The caller then commits the tokens that it keeps.

        The bits of a row do not depend on the other sequences.

        parts: for each sequence, the sequence and the tokens that follow it.

        Returns the logits of the rows of each sequence, float32 [tokens, n_vocab].  Raises ContextError if the positions do
        not fit into the context, and NoPages if all pages of the cache are in use.
        """
        many = sum(len(tokens) for _, tokens in parts) > self.ops.decode_rows
        batch = self._joined_rows(parts, ANSWER_STEP if many else 1)
        rows = batch.tokens.size
        if self.relay is not None:
            logits = RelayedPass(self.relay, batch, rows).complete()
        elif self.stages:
            logits = self.staged_pass(batch, rows).complete()
        else:
            logits = self.ops.run(self.compute, batch, rows)
        assert logits is not None
        return _divided(logits, parts)

    def read_texts(self, parts: TokenSequences) -> list[np.ndarray]:
        """Run one pass over tokens of several sequences for what follows the last layer, without logits.  The sequences do
        not change, and what the cache contains of them can only be used by the next call.

        The bits of a row do not depend on the other sequences.  If ``companies`` is false, there must be one sequence.

        parts: for each sequence, the sequence and the tokens that follow it.

        Returns the result of :meth:`outputs` for the rows of each sequence, float32 [tokens, width].  Raises ContextError if
        the positions do not fit into the context, and NoPages if all pages of the cache are in use.
        """
        batch = self._joined_rows(parts, ROW_STEP if self.companies else 1)
        if batch.rows > self.ops.decode_rows and not batch.mixed:
            batch = replace(batch, role=Role.PREFILL)
        outputs = self.ops.run(self.outputs, batch, batch.rows, None, self.prompt_rows)
        assert outputs is not None
        return _divided(outputs, parts)

    @cached_property
    def reads_together(self) -> bool:
        """Whether a pass may read prompts of several sequences (:meth:`split_together`)."""
        return not self.stages and all(layer.mixer.reads_together for layer in self.config.layers)

    @property
    def companies(self) -> bool:
        """Whether the rows of a pass of any size may belong to several sequences, also if copies of the last row follow."""
        return self.reads_together and not self.cache.rings

    @property
    def company_rows(self) -> int:
        """The most rows of a pass over texts of several sequences, or over one text; 1 if ``companies`` is false."""
        # A GPU pads passes of several sequences to powers of two.
        return 1 << (self.prompt_rows.bit_length() - 1) if self.companies else 1

    @property
    def output_width(self) -> int:
        """The number of elements of a row of :meth:`outputs`."""
        return self.config.n_embd if self.classifier is None else max(1, len(self.config.labels))

    def _joined_rows(self, parts: TokenSequences, step: int = 1) -> Batch[np.ndarray]:
        """The rows of a pass over the tokens that follow sequences, at claimed positions.  If there are more than ``step``,
        copies of the last row follow up to a multiple of it, so that passes have few sizes."""
        given: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for sequence, tokens in parts:
            first, count = len(sequence.tokens), len(tokens)
            self.prepare(first, count, sequence)
            given += tokens
            positions += range(first, first + count)
            slots += [sequence.slot] * count
        rows = [np.array(values, np.int32) for values in (given, positions, slots)]
        if len(given) > step and (more := -len(given) % step):
            rows = [np.pad(values, (0, more), "edge") for values in rows]
        return Batch(rows[0], rows[1], rows[2], mixed=len(parts) > 1)

    def memory(self, il: int, ops: Ops | None = None) -> Any:
        """The cache that layer il reads, a ``LayerMemory`` of the kind that its mixer specifies.

        ops: the backend that computes the layer; None: that of its placement.
        """
        if self.streaming is not None and ops is self.streaming.ops and il in self.streaming.mirrors:
            return self.streaming.mirrors[il].memory
        return self.cache.layers[self.config.memory(il)]

    def prepare(self, first: int, count: int, sequence: Sequence) -> None:
        """Claim positions [first, first + count) of a sequence and compute their rotation angles."""
        sequence.claim(first, count)
        self.cache.publish()
        if first + count > self._n_angles:
            end = min(self.cache.n_ctx, -(-(first + count) // CHUNK) * CHUNK)
            self.reserve(end)
            self._n_angles = end

    def save(self, sequence: Sequence, length: int = 0) -> Snapshot:
        """Take a snapshot after the first ``length`` tokens of a sequence; 0: after all tokens, of which there must be at
        least one.

        A snapshot contains the states of recurrent layers, the latest inputs of short convolutions, the latents and open
        blocks of layers with compressed rows, and the output of the trunk for the layer that drafts.  The rings must still
        contain these entries.
        """
        length, arrays = length or sequence.length, []
        pairs = defaultdict[Ops, list[tuple[Array, np.ndarray]]](list)
        for ops, rows in self.remembered(length, sequence):
            runs = [rows.ring[run] for run in rows.runs()]
            if not runs:
                continue
            # Parts before and after the end of a ring are concatenated, so that rings of another length can be restored.
            n = sum(part.shape[0] for part in runs)
            arrays.append(np.empty((n, *runs[0].shape[1:]), np.dtype(cast(Any, runs[0]).dtype)))
            at = 0
            for part in runs:
                pairs[ops].append((part, arrays[-1][at : at + part.shape[0]]))
                at += part.shape[0]
        copies = [each for ops, own in pairs.items() for each in ops.begin_download(own)]
        return Snapshot(length, arrays, copies)

    def restore(self, snapshot: Snapshot, sequence: Sequence) -> None:
        """Restore a snapshot, so that the sequence continues after the tokens of the snapshot.

        These tokens must be the first ones of the sequence, and their keys, values and compressed rows must be in the cache.
        """
        if sequence.length != snapshot.length:
            sequence.resume(snapshot.length)
        self.cache.publish()
        arrays = iter(snapshot.arrays)
        for ops, rows in self.remembered(snapshot.length, sequence):
            if rows.first < rows.end:
                array, at = next(arrays), 0
                for run in rows.runs():
                    count = run.stop - run.start
                    ops.store(rows.ring, run.start, array[at : at + count])
                    at += count

    def remembered(self, length: int, sequence: Sequence) -> Iterator[tuple[Ops, StoredRows[Array]]]:
        """The entries of rings, and of pages that windows free, that a pass after ``length`` tokens of a sequence needs, each
        with the backend whose memory holds it."""
        slot = sequence.slot
        for il, layer in zip(self.config.owners, self.cache.layers, strict=True):
            for rows in layer.needed(slot, length, sequence.pages):
                yield self.placement.memory(il), replace(rows, name=f"{rows.name} of layer {il}")
        if self.drafter is not None and self.drafter.hidden is not None:
            hidden = of_sequence(self.drafter.hidden, slot)
            yield self.ops, StoredRows("output of the trunk", hidden, max(0, length - 1), length)

    def compute(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """Run the operations of a pass on arrays of the backend.

        A backend may record the operations once and replay them.  The sequence of operations may therefore depend on the
        number of rows, but not on values.

        Returns the logits of the last ``n_logits`` rows, float32 [n_logits, n_vocab], or None if ``n_logits`` is 0.
        """
        return self._pass(batch, n_logits, range(self.config.n_layer))

    def compute_observed(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The operations of :meth:`compute`, and the masses of the chunks that the rows see.  Returns the same."""
        return self._pass(batch, n_logits, range(self.config.n_layer), True)

    def compute_kinds(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The operations of :meth:`compute` for some layers, so that a backend lists the kernels of a model sooner."""
        return self._pass(batch, n_logits, self._examples)

    @cached_property
    def _examples(self) -> list[int]:
        """Layers among which each kind of layer occurs after each kind that it follows in the model.

        Layers are of the same kind if their configurations and the shapes and formats of their tensors are equal.
        """
        tensors: dict[int, list[tuple[object, ...]]] = {}
        for name, tensor in sorted(self.gguf.tensors.items()):
            blk, _, rest = name.partition(".")[2].partition(".")
            if blk.isdecimal():
                tensors.setdefault(int(blk), []).append((rest, tensor.shape, tensor.type))
        kinds = [(layer, tuple(tensors.get(il, ()))) for il, layer in enumerate(self.config.layers)]
        wanted, seen = set(), set()
        for il, kind in enumerate(kinds):
            pair = (kinds[il - 1] if il else None, kind)
            if pair not in seen:
                seen.add(pair)
                wanted |= {il, max(il - 1, 0)}
        return sorted(wanted | {len(kinds) - 1})

    def outputs(self, batch: Batch[Array], n_outputs: int) -> Array:
        """Run the operations of a pass on arrays of the backend for what follows the last layer, without logits.

        Returns the normalized outputs of the last ``n_outputs`` rows, float32 [n_outputs, n_embd], or, if the model is a
        reranker, their scores, float32 [n_outputs, number of labels].
        """
        batch = self.placed(self.ops, batch)
        x = self.embed(batch)
        batch = self.begin(batch, x)
        for il in range(self.config.n_layer):
            x = self.block(il, x, batch)
        return self.joined(x[batch.rows - n_outputs : batch.rows])

    def joined(self, x: Array) -> Array:
        """What :meth:`outputs` returns for the residual stream x after the last layer, float32 [rows, width]."""
        y = self.normed(x)
        return self.ops.plain(y) if self.classifier is None else self.classifier.apply(self.ops, y)

    def _pass(
        self, batch: Batch[Array], n_logits: int, layers: SequenceOf[int], observed: bool = False
    ) -> Array | None:
        """The operations of a pass through some layers; observed: whether attention adds masses."""
        batch = self.placed(self.ops, batch, observed)
        x, taps = self.embed(batch), dict[int, Array]()
        batch = self.begin(batch, x)
        for il in layers:
            if il in self.config.taps:
                taps[il] = x
            x = self.block(il, x, batch)
        return self.finish(x, batch, n_logits, [taps.get(il, x) for il in self.config.taps])

    def embed(self, batch: Batch[Array]) -> Array:
        """The residual stream that begins with the embeddings of the tokens, float32 [rows, width]."""
        ops = self.placement.first
        x = ops.embed(self.embedding, batch.tokens, self.config.embedding_scale)
        if self.positions is not None:
            x = ops.add(x, ops.embed(self.positions, batch.positions))
        return self.enter(ops, x)

    def tell(self, batch: Batch[Array], n_logits: int) -> Array | None:
        """The per-layer embeddings of the tokens, float32 [n_layer, rows, n_per_layer], as a pass of its own; None if the
        model has none.  n_logits: not used."""
        return self.begin(batch, self.embed(batch)).per_layer

    def finish(self, x: Array, batch: Batch[Array], n_logits: int, taps: SequenceOf[Array] = ()) -> Array | None:
        """What follows the last layer, whose residual stream x is float32 [rows, width]: the logits of the last ``n_logits``
        rows, float32 [n_logits, n_vocab], or None for ``n_logits`` 0.  The drafter stores what it needs.

        taps: the residual stream before the layers ``ModelConfig.taps``.
        """
        ops, config = self.ops, self.config
        if self.drafter is None:
            return self.logits_of(self._wanted(x, batch, n_logits)) if n_logits else None
        if self.fusion is not None or config.streams is not None or not config.mtp_normed:
            # The drafter needs the residual stream of all tokens, before several layers or after the last one.
            self.drafter.follow(batch, x if self.fusion is None else self.fusion.apply(ops, taps))
            return self.logits_of(self._wanted(x, batch, n_logits)) if n_logits else None
        # The drafter needs the outputs of all tokens, not only of those whose logits are requested.
        x = ops.plain(self.output_norm.apply(ops, x))
        self.drafter.follow(batch, x)
        return self._head(self._wanted(x, batch, n_logits)) if n_logits else None

    def _wanted(self, x: Array, batch: Batch[Array], n_logits: int) -> Array:
        """The rows of x [rows, width] whose logits are wanted, [n_logits, width]."""
        if batch.ends is None:
            return x[batch.rows - n_logits : batch.rows]
        # The rows before the ends, if x is taken for the ring of a sequence.
        rows = replace(batch, positions=batch.ends, sequences=self._nowhere[:n_logits])
        return self.ops.rows_before(x.reshape(1, *x.shape), rows)

    def logits_of(self, x: Array) -> Array:
        """The logits for the residual stream x [rows, width] after the last layer, or after another one: float32 [rows,
        n_vocab]."""
        return self._head(self.normed(x))

    def normed(self, x: Array) -> Value:
        """The normalized outputs for the residual stream x after the last layer: [rows, n_embd]."""
        return self.output_norm.apply(self.ops, self.leave(self.ops, x))

    def _head(self, x: Value) -> Array:
        """The logits of the normalized rows x [rows, n_embd]: float32 [rows, n_vocab]."""
        logits = self.output.apply(self.ops, x)
        if self.config.logit_scale != 1.0:
            logits = self.ops.scale(logits, self.config.logit_scale)
        return self.ops.softcap(logits, self.config.final_softcap) if self.config.final_softcap else logits

    def enter(self, ops: Ops, x: Array) -> Array:
        """The residual stream before the first layer, computed from the embeddings x, float32 [rows, n_embd]."""
        return x

    def leave(self, ops: Ops, x: Array) -> Array:
        """The input of the output norm, float32 [rows, n_embd], computed from the residual stream x after the last layer."""
        return x

    def begin(self, batch: Batch[Array], x: Array) -> Batch[Array]:
        """The batch, extended by inputs that layers need in addition to the residual stream x, float32 [rows, n_embd]."""
        return batch

    def block(self, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute layer ``il``: the residual stream after it from the residual stream x before it, float32 [rows, n_embd]."""
        for part in self.parts[il]:
            x = (self.mix if part.mixer else self.feed)(self.ops, il, x, batch)
        return x

    def mix(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the mixer of layer ``il``, or the whole layer if it is parallel: the residual stream after it from x before
        it, float32 [rows, width]."""
        raise NotImplementedError

    def feed(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """The network of layer ``il``, and what follows it: residual stream in, residual stream out, float32 [rows,
        width].  A parallel layer has nothing left to compute."""
        raise NotImplementedError

    # --- what callers ask of all devices ---------------------------------------------------------------------------

    @property
    def splits(self) -> bool:
        """Whether prefill passes have several pieces, so that decode passes can run between them."""
        return bool(self.stages) or self.ops.splits

    @property
    def prompts_ahead(self) -> int:
        """The most passes over prompts in flight: more than one if a single queue of a device gets all of their pieces."""
        return 2 if self.ops.splits and not self.stages else 1

    def next_rows(self, left: int, beside: bool = False) -> int:
        """The number of tokens, out of the ``left`` ones of a prompt, that the next pass should read; beside: whether steps
        of answers run between its pieces."""
        if self.stages and self.relay is None:
            return min(left, self.prompt_rows, self.max_rows)
        return self.ops.next_rows(left, self.prompt_rows, beside)

    def jobs(self) -> list[Job]:
        """A compile job for every kernel that its passes use."""
        if not self.stages:
            return self.ops.jobs(self)
        streamed = () if self.streaming is None else self.streaming.distinct(self.config)
        jobs = [job for stage in (*self.stages, *streamed) for job in stage.ops.jobs(stage)]
        if self.relay is not None and self.relay.tell is not None:
            jobs += self.placement.first.pass_jobs(self.relay.tell, self.ops.decode_rows)
        return list(dict.fromkeys([*jobs, *(self.joint.jobs() if self.joint is not None else ())]))

    def warm_up(self) -> None:
        """Load the kernels of its passes.  Overwrites the cache."""
        if self.relay is not None:
            for stage in self.stages:
                stage.ops.load_pass(stage.compute, self.ops.decode_rows)
        if self.stages:
            self.step([(self.sequence, [0])])
        else:
            self.ops.warm_up(self)

    def stage_seconds(self) -> dict[str, float]:
        """The seconds that the stages on each device have taken so far, by the label of the device; empty for a model that is
        not divided, or whose devices work at the same time."""
        found: dict[str, float] = {}
        if self.relay is not None:
            return found
        joint = () if self.joint is None else (self.joint,)
        for stage in (*self.stages, *joint, *(self.streaming.stages if self.streaming is not None else ())):
            found[stage.ops.label] = found.get(stage.ops.label, 0.0) + stage.seconds
        if self.joint is not None:
            found[self.joint.host.ops.label] += self.joint.host_seconds
        return found

    def expect_drafts(self) -> None:
        """Choose kernels that are fast for passes of a few rows, which verify drafts or continue several answers."""
        for ops in self.devices:
            ops.expect_drafts()

    def rest(self) -> None:
        """Give memory back to the system that holds nothing while no pass runs."""
        for ops, memory in self._memories():
            ops.rest(memory)

    def resume(self) -> None:
        """Prepare for passes after :meth:`rest`."""
        for ops, memory in self._memories():
            ops.resume(memory)

    def _memories(self) -> list[tuple[Ops, PagedMemory]]:
        return [(cast(Ops, place), memory) for place, memory in self.cache.memories.items()]

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length) on all devices."""
        for loader in (*self._loaders.values(), *self.further):
            Loader.reserve(loader, length)


def _divided(rows: np.ndarray, parts: TokenSequences) -> list[np.ndarray]:
    """The rows of each sequence of a pass, whose rows have results ``rows``, [all rows, width]."""
    found, end = [], 0
    for _, tokens in parts:
        end += len(tokens)
        found.append(rows[end - len(tokens) : end])
    return found
