"""Opening a model: the file, the backend, the sizes of its context and its memory, and the draft model."""

import gc
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.cache.disk import open_folder
from engine.cache.recurrent import default_budget
from engine.cache.types import CHUNK, F16, Types
from engine.cache.types import cache_type as find_cache_type
from engine.checks import described, folder_path, function, memory_size, whole
from engine.compile.pool import compile_all
from engine.decode.device import ahead_drafted
from engine.default_cache import default_types
from engine.devices import check_batch_size, check_gpu_memory, host_beside, open_device, open_group, parse_devices
from engine.errors import ContextError, DeviceError, DeviceMemoryError, ModelError, UsageError
from engine.gguf.file import GGUF, GGUFTensor, read_gguf
from engine.gguf.quants import FORMATS
from engine.hub.catalog import cache_dir
from engine.hub.resolve import resolve
from engine.limits import ALL_LAYERS, LEAST_KV_BUDGET, MOST_DRAFTS, MOST_OWNERS, MOST_PARALLEL
from engine.llm import LLM, opened
from engine.machine.memory import available_memory
from engine.models.assistant import Assistant
from engine.models.config import ASSISTANT, JOINED, ModelConfig
from engine.models.division import (
    PER_LAYER,
    Division,
    fitted,
    parse_overrides,
    streamed_bytes,
    tensors_of,
    weight_bytes,
)
from engine.models.families.deepseek4 import with_rounding
from engine.models.layer_split import MODES, layer_split, parse_split
from engine.models.mtp import layer_tensors
from engine.models.needs import cache_specs, context_bytes
from engine.models.placement import LayerPart, Placement
from engine.models.registry import (
    build,
    can_be_shared,
    is_mtp,
    load_layer_that_drafts,
    read_assistant,
    read_config,
    with_mtp,
    without_mtp,
)
from engine.models.sharing import why_not_shared
from engine.ops.memory import Progress
from engine.ops.operations import Ops
from engine.rooms import PlacedOwner, owned_bytes, rooms
from engine.speculative.assistant import AssistantDraft
from engine.speculative.draft_model import DraftModel, check_tokens
from engine.speculative.params import DRAFT_MAX
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.cuda.target import Target


SPARE = 16
"""If a model that should fit did not, one part in ``SPARE`` of the GPU's memory stays free; then two parts, and so on."""

COMPANY = 32
"""The most texts that one pass reads for embeddings."""

FITTED_CONTEXT = 8192
"""The positions of a context for which there should be room on a GPU that is too small for a whole model."""


def load(
    path_or_name: str | os.PathLike[str] | None = None,
    *,
    device: "str | Target" = "auto",
    n_ctx: int = 0,
    n_threads: int = 0,
    batch_size: int = 0,
    cache_type: str | None = None,
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
    kv_budget: int = 0,
    ds4_rounding: bool = False,
    check_tensors: bool = False,
    draft_model: str | os.PathLike[str] | None = None,
    device_draft: str | None = None,
    gpu_memory: int | str | None = None,
    n_gpu_layers: int | None = None,
    n_cpu_moe: int = 0,
    override_tensor: str = "",
    split_mode: str = "layer",
    tensor_split: str = "",
    mtp: bool = True,
    parallel: int = 1,
    draft_max: int = 0,
    snapshot_bytes: int | None = None,
    cache_disk: int | str | None = None,
    cache_disk_path: str | os.PathLike[str] | None = None,
    pooling: str | None = None,
    progress: Progress | None = None,
) -> LLM:
    """Open a model.

    Parameters
    ----------
    path_or_name : str or path, optional
        A GGUF file, ``hf:owner/repo:Q4_K_M`` or ``hf:owner/repo/file.gguf`` for a file of the model hub, or the name of a
        model that ``bitmirror models`` lists. By default the model that ships with the package.
    device : str
        "cpu", "cuda", "cuda:1" and so on, or "auto": the first GPU if there is a usable one, else the CPU. Several GPUs,
        such as "cuda:0,cuda:1", each have a part of the layers. The answer is the same, bit for bit. (A ``Target`` of
        ``engine/cuda/target.py`` is a GPU that kernels can only be compiled for.)
    n_ctx : int
        Positions of the context; 0: the model's trained context, or what fits into half of the free memory.
    n_threads : int
        CPU threads; 0: one per core. The answer does not depend on it.
    batch_size : int
        Tokens of a prompt that are read in one pass, at most 4096; 0: 128 on the CPU and 1024 on a GPU, fewer if the
        context leaves too little memory. The answer does not depend on it. A GPU of compute capability 7.5 reads 16.
    cache_type : str, optional
        Element type of the key-value cache: "f32", "f16", "q8_0", "q4_0", "i12" or "i8". By default "i8" for a model with
        quantized weights and "i12" for one with float weights, and "f16" for latents, for heads whose size is not a multiple
        of 32, and for models that make embeddings.
    cache_type_k, cache_type_v : str, optional
        Element types of keys and of values; by default ``cache_type``. If only one of the two is given and ``cache_type``
        is not, the other is "f16".
    kv_budget : int
        The most positions of a prompt that layers without a window keep while an answer is generated, at least 256; 0: all.
        Of a longer prompt, they keep whole chunks of 64 positions: the first one, the last ones, and those that the last 64
        tokens attend to most (SnapKV). Answers are faster and need less memory, and what was dropped cannot be recalled. The
        answer is a function of the text, as without a budget. A later prompt with the same beginning reads again what has
        not been kept elsewhere.
    ds4_rounding : bool
        Of a deepseek4 model with the cache type "f32": round what it stores as ds4 and the official implementation do,
        latents to 8 bits and the indexer's keys and queries to 4. Other logits, but no less memory.
    check_tensors : bool
        Also check every block scale, and refuse files with scales that are not finite or implausibly large.
    draft_model : str or path, optional
        A smaller model with the same vocabulary that drafts for this one, its assistant (gemma4-assistant), its EAGLE-3 or
        DFlash network, or its layer for drafting in a file of its own: a path, a name or an ``hf:`` reference.
    device_draft : str, optional
        Device of the draft model; by default the device of the model.
    gpu_memory : int or str, optional
        The most memory that this process may use of a GPU, in bytes or as "12G" or "800M": what does not fit is refused as
        if the GPU had no more. The limit is for everything: weights, caches, intermediate results, draft models on the same
        GPU, what the driver stores for kernels and graphs, and 512 MiB for its context. By default all memory that is free.
    n_gpu_layers : int, optional
        The number of layers on the GPU: the last ones, and the output. The others are on the CPU. By default as many as fit
        into the memory of the GPU; of a mixture, the experts of the first layers leave it first. 0: none. The answer does not
        depend on it. On the CPU it has no effect.
    n_cpu_moe : int
        The number of layers, from the first one on, whose mixture of experts is on the CPU.
    override_tensor : str
        ``"REGEX=DEVICE,..."``: the device, cpu or gpu, of the parts of layers whose tensors' names contain a match, such as
        ``"ffn_.*_exps=cpu"``. The first match counts, and it takes precedence over ``n_gpu_layers`` and ``n_cpu_moe``. The
        tensors of a mixer stay together, and so do those of a network.
    split_mode : str
        How several GPUs divide a model: "layer": each has a run of layers, in the order of ``device``; "tensor": each has a
        part of every layer, also owners on the CPU (``device="cpu,cpu"``); "none": the first one has all of it.
    tensor_split : str
        The shares of several GPUs, a number for each, such as "3,1"; 0: none. By default in proportion to their free memory.
    mtp : bool
        Whether a model that has a layer for drafting (multi-token prediction) uses it. A draft model takes precedence.
    parallel : int
        The most answers that are computed at the same time, 1 to 1024; others wait. ``n_ctx`` is the context of each. A pass
        computes a token of up to 128 of them. They share the memory for keys and values; if it runs out, the latest answer
        waits until there is room. If memory is short for so many contexts, there are fewer, and a warning says how many. An
        answer does not depend on the others.
    draft_max : int
        The most drafts of a pass that recurrent models must be able to roll back. They keep a state for each, as far as
        memory allows. 0: the default.
    snapshot_bytes : int, optional
        Host memory, in bytes, for states of recurrent models, and for what other models keep in rings, at multiples of 64
        tokens near the ends of messages, so that texts with the same beginning can be continued from there; 0: none. By
        default an eighth of the memory that is free beside the model, at most 2 GiB.
    cache_disk : int or str, optional
        The most bytes, also as "20G" or "800M", for a cache on disk: what the cache holds of texts whose answers have ended
        is written to files, and a later prompt with the same beginning is read from there, also after a restart, where that
        is faster than computing it. The answer does not depend on it. None: no cache on disk.
    cache_disk_path : str or path, optional
        The folder of the cache on disk; by default one in the user's cache. Models of a process may share it.
    pooling : str, optional
        How :meth:`LLM.embed` joins the outputs of a text: "mean", or "cls" or "last" for that of the first or last token. By
        default as the file says; only models that are made for embeddings say it.
    progress : callable, optional
        Called as ``progress(stage, done, total)``; stage "fetch" and "load" count bytes, "compile" kernels.

    Returns
    -------
    LLM
        The model. It can be used in a ``with`` statement, which closes it.

    Raises
    ------
    GGUFError
        If the file is damaged.
    ModelError
        If the file is sound, but this engine cannot run its model.
    FetchError
        If there is no such model, or if it cannot be downloaded.
    ContextError
        If the context does not fit into memory.
    DeviceError
        If the device cannot be used.
    UsageError
        If an argument is out of range or of a wrong type.

    Examples
    --------
    >>> import engine
    >>> with engine.load(n_ctx=256) as llm:
    ...     print(llm.complete("import ", max_tokens=1, temperature=0).text)
    queue
    """
    numbers = {"n_ctx": n_ctx, "n_threads": n_threads, "batch_size": batch_size}
    numbers |= {"parallel": parallel, "draft_max": draft_max, "n_cpu_moe": n_cpu_moe, "kv_budget": kv_budget}
    optional = {"snapshot_bytes": snapshot_bytes, "n_gpu_layers": n_gpu_layers}
    for name, value in (numbers | {name: given for name, given in optional.items() if given is not None}).items():
        whole(name, value)
    if not isinstance(device, str) and not hasattr(device, "compute_capability"):
        raise UsageError(f"a device is given by its name, such as cpu or cuda:1, not {described(device)}.")
    function("progress", progress)
    types = _given_types(cache_type, cache_type_k, cache_type_v)
    if not 1 <= parallel <= MOST_PARALLEL:
        raise UsageError(f"parallel must be 1 to {MOST_PARALLEL}, not {described(parallel)}.")
    if pooling is not None and pooling not in JOINED:
        raise UsageError(f"pooling must be {', '.join(JOINED[:-1])} or {JOINED[-1]}, not {described(pooling)}.")
    if device_draft is not None and draft_model is None:
        raise UsageError("device_draft says where a draft model runs; give one with draft_model=...")
    if not 0 <= draft_max <= MOST_DRAFTS:
        raise UsageError(f"draft_max must be 1 to {MOST_DRAFTS}, or 0 for the default, not {described(draft_max)}.")
    if kv_budget and kv_budget < LEAST_KV_BUDGET:
        least = f"at least {LEAST_KV_BUDGET} positions, or 0 for all"
        raise UsageError(f"kv_budget must be {least}, not {described(kv_budget)}.")
    if snapshot_bytes is not None and snapshot_bytes < 0:
        raise UsageError(f"snapshot_bytes must be 0 or more, not {described(snapshot_bytes)}.")
    if min(n_gpu_layers or 0, n_cpu_moe) < 0:
        raise UsageError("n_gpu_layers and n_cpu_moe are numbers of layers: they must be 0 or more.")
    division = Division(n_gpu_layers, n_cpu_moe, parse_overrides(override_tensor))
    check_batch_size(batch_size)
    limit = 0 if gpu_memory is None else memory_size("gpu_memory", gpu_memory)
    check_gpu_memory(limit, device, device_draft or device)
    folder = None
    if cache_disk is not None:
        where = cache_dir() / "pages" if cache_disk_path is None else folder_path("cache_disk_path", cache_disk_path)
        folder = open_folder(where, memory_size("cache_disk", cache_disk))
    elif cache_disk_path is not None:
        raise UsageError("cache_disk_path is the folder of a cache on disk; say how large that is with cache_disk=...")
    names, shares = _split(device, split_mode, tensor_split)
    gpus = tuple(open_device(name, n_threads, None, batch_size, limit) for name in names)
    shared = split_mode == "tensor" and len(gpus) > 1
    if shared and folder is not None:
        raise UsageError(
            "a cache on disk is for one device, or for devices with some layers each: leave out cache_disk=..."
        )
    ops = open_group(gpus) if shared else gpus[-1]
    drafter, draft_ops = None, ops
    if draft_model is not None:
        drafter = _open(draft_model, check_tensors, progress)
        # On one GPU both models share a device object, so that drafts need not leave the GPU: that which chooses tokens.
        at = 0 if shared else -1
        draft_ops = open_device(device_draft or names[at], n_threads, gpus[at], batch_size, limit)
    # A layer of a model in a file of its own.
    layer = drafter.gguf if drafter is not None and is_mtp(drafter.gguf) else None
    if layer is not None and device_draft is not None:
        raise UsageError(
            f"{layer.path} is a layer of the model, so it runs on the model's device: leave out its device "
            "(device_draft=...)."
        )
    # An assistant can only draft for the model whose outputs, keys and values it reads.
    assists = drafter is not None and layer is None and drafter.gguf.get("general.architecture", "str", "") == ASSISTANT
    if drafter is not None and assists and device_draft is not None and not draft_ops.can_reach(ops):
        raise UsageError(
            f"{drafter.gguf.path} reads the keys and values of the model, so it cannot run on another kind of device: "
            "leave out its device (device_draft=...)."
        )
    beside = drafter.gguf.n_bytes if drafter is not None and assists and device_draft is None else 0
    if layer is not None:
        beside = sum(tensor.nbytes for tensor in layer_tensors(layer))
    drafted = drafter is not None and not assists and layer is None
    rest = draft_max, snapshot_bytes, ds4_rounding, parallel, drafted, beside, layer, division, n_threads, kv_budget
    split = gpus if len(gpus) > 1 and not shared else ()
    options = _Options(
        types, batch_size > 0, mtp and drafter is None, *rest, pooling=pooling or "", gpus=split, shares=shares
    )
    llm = _load(_open(path_or_name, check_tensors, progress), ops, n_ctx, options, progress)
    if layer is not None and "tokenizer.ggml.tokens" in layer.metadata:
        check_tokens(layer.path, layer.require("tokenizer.ggml.tokens", "str[]"), llm)
    if drafter is not None:
        llm.model.expect_drafts()
    if drafter is not None and assists:
        llm.draft = _assistant(drafter.gguf, llm, None if device_draft is None else draft_ops)
    elif drafter is not None and drafted:
        draft = _load(
            drafter,
            draft_ops,
            llm.n_ctx,
            replace(
                options,
                # It has a sequence for each of the model.
                parallel=min(parallel, llm.model.n_sequences),
                fewer=False,
                snapshot_bytes=0,
                ds4_rounding=False,
                kv_budget=0,
                pooling="",
                drafted=False,
                layer=None,
                division=Division(n_gpu_layers=ALL_LAYERS),
                gpus=(),
            ),
            progress,
        )
        llm.draft = DraftModel(draft, llm)
    if folder is not None and llm.config.causal:
        llm.keep_on_disk(folder)
    return llm


def _given_types(both: str | None, keys: str | None, values: str | None) -> Types | None:
    """The element types of a cache that a caller gives, or None if the file decides."""
    if both is keys is values is None:
        return None
    k, v = (both if given is None else given for given in (keys, values))
    k, v = ("f16" if name is None else name for name in (k, v))
    types = Types(find_cache_type(k), find_cache_type(v))
    if k != v and (types.k.whole or types.v.whole):
        own = k if types.k.whole else v
        raise UsageError(f"cache type {own} is for keys and values alike, not for {k} and {v}: use {own} for both.")
    return types


def _split(device: "str | Target", mode: str, shares: str) -> tuple[tuple["str | Target", ...], tuple[float, ...]]:
    """The devices that have parts of a model, and their shares; () for those of their free memory.  Raises UsageError."""
    if mode not in MODES:
        raise UsageError(f"split_mode must be {', '.join(MODES[:-1])} or {MODES[-1]}, not {described(mode)}.")
    if not isinstance(shares, str):
        raise UsageError(f'tensor_split is a text such as "3,1", not {described(shares)}.')
    if not isinstance(device, str):
        return (device,), ()
    names = parse_devices(device)
    if mode == "tensor" and shares:
        raise UsageError('tensor_split is for layers (split_mode="layer"): devices that share layers have equal parts.')
    if len(names) > MOST_OWNERS and mode == "tensor":
        raise UsageError(f"at most {MOST_OWNERS} devices share a model, not {len(names)}: name fewer (device=...).")
    given = parse_split(shares, len(names))
    if mode == "none":
        return names[:1], ()
    used = [i for i in range(len(names)) if not given or given[i]]
    return tuple(names[i] for i in used), tuple(given[i] for i in used if given)


@dataclass(frozen=True)
class _File:
    """An open file, and the time that it took to open it, in seconds."""

    gguf: GGUF
    seconds: float


def _open(path_or_name: str | os.PathLike[str] | None, check_tensors: bool, progress: Progress | None) -> _File:
    started = time.perf_counter()
    gguf = read_gguf(resolve(path_or_name, progress), check_tensors=check_tensors)
    return _File(gguf, time.perf_counter() - started)


def _assistant(gguf: GGUF, llm: LLM, ops: Ops | None) -> AssistantDraft:
    """The assistant of a model as its draft source, on the device of ``ops``; None: where the model's output is."""
    target = llm.model
    if "tokenizer.ggml.tokens" in gguf.metadata:
        check_tokens(gguf.path, gguf.require("tokenizer.ggml.tokens", "str[]"), llm)
    if ops is None or ops.shares_memory_with(target.ops):
        ops = target.ops
    elif ops.can_reach(target.ops):
        ops.reach(target.ops)
    else:
        raise UsageError(
            f"{gguf.path} reads the output of the model, which is on another kind of device: leave out its device "
            "(device_draft=...)."
        )
    target.drafter = Assistant(read_assistant(gguf), gguf, ops, target)
    ops.loaded()
    return AssistantDraft(llm)


@dataclass(frozen=True)
class _Options:
    """The arguments of :func:`load` other than the model and its device."""

    #: Element types of keys and values; None: as the file has them by default.
    given_types: Types | None
    #: Whether a batch size was requested.
    batched: bool
    mtp: bool
    draft_max: int
    snapshot_bytes: int | None
    ds4_rounding: bool = False
    #: The number of answers that are computed at the same time.
    parallel: int = 1
    #: Whether a draft model is loaded next.
    drafted: bool = False
    #: Bytes of other models' weights that share the device.
    beside: int = 0
    #: The file of the layer that drafts, if it has one of its own.
    layer: GGUF | None = None
    division: Division = Division()
    #: CPU threads.
    n_threads: int = 0
    #: The number of positions of a prompt that layers without a window keep; 0: all.
    kv_budget: int = 0
    #: Bytes of the GPU's memory that a placement leaves free, because a larger part of the model did not fit after all.
    spare: int = 0
    #: How outputs are joined to embeddings, if not as the file says.
    pooling: str = ""
    #: Element types of keys and values, once the file has been read.
    types: Types = F16
    #: Whether fewer than ``parallel`` answers are computed at the same time if memory is short.
    fewer: bool = True
    #: The GPUs that divide the layers, if there are several, and their shares; () for those of their free memory.
    gpus: tuple[Ops, ...] = ()
    shares: tuple[float, ...] = ()


def _load(file: _File, ops: Ops, n_ctx: int, options: _Options, progress: Progress | None) -> LLM:
    """Load the model of a file.  If memory runs out although the placement should fit, and no option has chosen it, the model
    is loaded again with less on the GPU."""
    gguf, layer = file.gguf, options.layer
    config = read_config(gguf)
    if layer is not None:
        config = with_mtp(config, gguf, layer)
    elif not options.mtp:
        config = without_mtp(config)
    if options.pooling:
        if config.pooling == "rank":
            raise UsageError(f"{gguf.path} is a reranker, which has no vectors of texts: leave out its pooling.")
        config = replace(config, pooling=options.pooling)
    options = replace(options, types=options.given_types or default_types(config, gguf))
    check_types(config, options.types, gguf)
    if options.kv_budget:
        _check_budget(config, gguf)
    if options.ds4_rounding:
        config = with_rounding(config, options.types, gguf)
    shortage: DeviceMemoryError | None = None
    while True:
        placement, fits = _placement(config, gguf, ops, n_ctx, options)
        if shortage is not None and not fits:
            raise shortage
        try:
            return _build(file, config, placement, ops, n_ctx, options, progress)
        except BaseException as error:
            for device in {ops, *placement.devices}:
                device.stop_loading()
            if not (fits and isinstance(error, DeviceMemoryError)):
                raise
            shortage = error.with_traceback(None)  # the frames hold what has been loaded
        gc.collect()
        options = replace(options, spare=options.spare + max(1, ops.free_memory(0) // SPARE))


def _build(
    file: _File,
    config: ModelConfig,
    placement: Placement,
    ops: Ops,
    n_ctx: int,
    options: _Options,
    progress: Progress | None,
) -> LLM:
    """Load the model of a file on the devices of its placement."""
    started, gguf, layer = time.perf_counter(), file.gguf, options.layer
    rewind = _rewind(options.draft_max, ops, config)
    weights = weight_bytes(config, gguf, placement)
    weights[ops] += options.beside + options.spare
    gpu = placement.accelerator
    streaming = gpu.stream_bytes(streamed_bytes(config, gguf, placement))
    # Without room for them, prompts are slower.
    weights[gpu] += streaming if gpu.free_memory(weights[gpu]) > 2 * streaming else 0
    owned = _owned(config, gguf, ops, options)
    tensors = tensors_of(config, gguf, placement)
    _check_weights(gguf, tensors)
    given_context = n_ctx > 0
    n_ctx, rows, capacity, parallel = _context(config, n_ctx, options, rewind, placement, weights, owned)
    if not config.causal:
        n_ctx, rows = _whole_texts(placement.last, n_ctx, options.batched, given_context)
    fewer = parallel < options.parallel
    if config.pooling:
        # Texts that are read in one pass have sequences and pages of their own.
        parallel = max(parallel, COMPANY)
        capacity = max(capacity, min(parallel * n_ctx, rows + CHUNK * parallel))
    tensors[placement.last] += [] if layer is None else layer_tensors(layer)
    for device, own in tensors.items():
        device.loading([tensor.data for tensor in own], progress)
    sizes = n_ctx, options.types, rewind, parallel, capacity, rows, options.kv_budget
    model = build(config, gguf, placement, *sizes)
    if layer is not None:
        model.drafter = load_layer_that_drafts(model, layer)
    tokenizer = Tokenizer.from_gguf(gguf)  # while threads read weights
    budget = options.snapshot_bytes
    if budget is None:
        # Neither the cache nor copies of weights have taken their memory yet.
        hosts = [device for device in placement.devices if device.device_memory() is None]
        in_host = sum(weights[device] + model.cache.memory_bytes(device) for device in hosts)
        if placement.first not in hosts and PER_LAYER in gguf.tensors:
            in_host += gguf.tensors[PER_LAYER].nbytes  # a GPU reads it there
        budget = default_budget(available_memory() - in_host)
    llm = opened(gguf, tokenizer, model, 0.0, budget)
    if model.config.mtp_problem:
        llm.warnings.append(f"the model's own layer does not draft: {model.config.mtp_problem}.")
    llm.warnings += [*model.config.warnings, *tokenizer.warnings]
    if fewer:
        llm.warnings.append(
            f"the memory is enough for {parallel} answers at a time, not {options.parallel}, so further ones wait; a smaller "
            "context (n_ctx=...) leaves room for more."
        )
    if options.spare:
        llm.warnings.append(
            f"the GPU had less memory than it reported, so {options.spare / 1e9:.2f} GB stay free: it has fewer layers, or "
            "the context is smaller."
        )
    if model.drafter is not None or options.parallel > 1:
        model.expect_drafts()
    needed = [job for device in placement.devices for job in device.load_jobs()]
    if not all(job.kept() for job in needed):
        # The first model of all: what loading needs is compiled together with the rest, by all cores.
        compiling = time.perf_counter()
        compile_all([*needed, *llm.jobs()], progress)
        llm.compile_seconds = time.perf_counter() - compiling
    elif placement.accelerator.device_memory() is not None:
        # Threads read weights meanwhile, and a GPU keeps the list of its kernels for LLM.compile.
        llm.jobs()
    for device in placement.devices:
        device.loaded()
    llm.load_seconds = file.seconds + time.perf_counter() - started - llm.compile_seconds
    return llm


def _whole_texts(ops: Ops, n_ctx: int, batched: bool, given: bool) -> tuple[int, int]:
    """The number of positions of a context of an encoder, and the number of rows of a pass, which must hold a whole text.

    batched, given: whether the size of passes, and that of the context, were requested.

    Raises ContextError if it cannot.
    """
    most = 1 << (ops.max_rows.bit_length() - 1)
    if n_ctx > most and (batched or ops.device_memory() is not None):
        if given:
            raise ContextError(
                f"a pass must read a whole text, and holds {most} tokens, not {n_ctx}: choose a smaller context (n_ctx=...), "
                "or larger passes (batch_size=...)."
            )
        n_ctx = most
    return n_ctx, 1 << (n_ctx - 1).bit_length()


def _placement(config: ModelConfig, gguf: GGUF, ops: Ops, n_ctx: int, options: _Options) -> tuple[Placement, bool]:
    """Where the parts of a model lie: as the options say, or else on the GPU as far as its memory reaches; and whether it was
    chosen because it should fit into that memory.  Raises UsageError for options that do not fit the model."""
    division, whole = options.division, Placement.whole(config, ops)
    if options.gpus:
        return _layers_of_gpus(config, gguf, n_ctx, options), False
    if len(ops.owners) > 1:
        _check_shared(config, gguf, len(ops.owners), options)
        return whole, False
    if division.divides(config):
        host = host_beside(ops, options.n_threads)
        return (whole if host is None else division.placement(config, gguf, ops, host)), False
    positions, rewind = n_ctx or min(config.n_ctx_train, FITTED_CONTEXT), _rewind(options.draft_max, ops, config)

    def fits(placement: Placement) -> bool:
        """Whether the GPU has room for its parts and for a context, if prompts are read in small passes."""
        streamed = ops.stream_bytes(streamed_bytes(config, gguf, placement))
        weights = weight_bytes(config, gguf, placement)[ops] + options.beside
        room = ops.free_memory(weights + streamed + options.spare)
        # Fewer answers at a time are better than layers on the CPU.
        sizes = positions, ops.decode_rows, rewind, min(options.parallel, ops.decode_rows), positions
        return room >= context_bytes(config, ops, options.types, *sizes, placement)

    if ops.device_memory() is None or division.n_gpu_layers is not None:
        return whole, False
    if fits(whole):
        return whole, True
    host = host_beside(ops, options.n_threads)
    found = host and fitted(config, gguf, ops, host, fits)
    return found or whole, found is not None


def _check_shared(config: ModelConfig, gguf: GGUF, n_owners: int, options: _Options) -> None:
    """Raise UsageError if this number of devices cannot share the layers of a model with these options."""
    if options.division.divides(config):
        raise UsageError(
            "devices that share layers have all of them: leave out n_gpu_layers, n_cpu_moe and override_tensor, or give "
            'each GPU some layers (split_mode="layer").'
        )
    if options.kv_budget:
        raise UsageError("kv_budget is for one device, or devices with some layers each: leave it out (kv_budget=0).")
    why = why_not_shared(config, n_owners, can_be_shared(config))
    if why:
        raise UsageError(f"{gguf.path.name}: {why}.")


def _owned(config: ModelConfig, gguf: GGUF, ops: Ops, options: _Options) -> tuple[int, ...]:
    """The bytes of weights of each of several devices that share the layers of a model; () if it has one.  Raises DeviceError
    if a GPU has too little memory for them."""
    n = len(ops.owners)
    if n == 1:
        return ()
    loaded = owned_bytes(config, gguf, ops, options.types, options.layer)
    # An assistant, which they share, too.
    beside = options.beside if options.layer is None else 0
    found = tuple(each + beside // n for each in loaded)
    for own, needed in zip(ops.owners, found, strict=True):
        if own.device_memory() is not None and own.free_memory(needed) <= 1:
            raise DeviceError(
                f"{own.label} has {own.free_memory(0) / 1e9:.2f} GB free and its part of every layer needs "
                f"{needed / 1e9:.2f} GB: name more devices (device=...), or choose a smaller quantization or model."
            )
    return found


def _layers_of_gpus(config: ModelConfig, gguf: GGUF, n_ctx: int, options: _Options) -> Placement:
    """The placement with a part of the layers on each of several GPUs, so that each has room for its part.  Raises UsageError
    for options that do not fit, and DeviceError if a GPU has too little memory."""
    gpus, division, elsewhere = options.gpus, options.division, list[LayerPart]()
    host = host_beside(gpus[-1], options.n_threads) if division.divides(config) else None
    if host is not None:
        kept = division.placement(config, gguf, gpus[-1], host)
        elsewhere = [part for part, ops in kept.parts(config) if ops is host]
    if not config.causal or config.pooling:
        raise UsageError(f"{gguf.path.name} computes embeddings, on one device: name one (device=...).")
    shares = options.shares or [ops.free_memory(0) for ops in gpus]
    positions, rewind = n_ctx or min(config.n_ctx_train, FITTED_CONTEXT), _rewind(options.draft_max, gpus[-1], config)
    for everything in (False, True):
        placement = layer_split(config, gguf, gpus, shares, everything, elsewhere)
        if host is not None:
            placement = division.beside(config, gguf, placement, host)
        weights = weight_bytes(config, gguf, placement)
        weights[gpus[-1]] += options.beside
        sizes = positions, gpus[-1].decode_rows, rewind, 1, positions
        known = [
            (ops.free_memory(weights[ops]), context_bytes(config, ops, options.types, *sizes, placement))
            for ops in gpus
        ]
        if all(room >= needed for room, needed in known):
            return placement
    for ops, (room, _) in zip(gpus, known, strict=True):
        if room <= 1:
            raise DeviceError(
                f"{ops.label} has {ops.free_memory(0) / 1e9:.2f} GB free and its layers need {weights[ops] / 1e9:.2f} GB: "
                "give it a smaller share (tensor_split=...), or name more devices (device=...)."
            )
    return placement


def _check_weights(gguf: GGUF, tensors: Mapping[Ops, list[GGUFTensor]]) -> None:
    """Raise DeviceError if weights that are copied to host memory do not fit there.  Those of float formats stay in the
    file.

    tensors: those that each device loads.
    """
    for ops, own in tensors.items():
        formats = [(tensor, FORMATS.get(tensor.type)) for tensor in own if tensor.name != PER_LAYER]
        needed = sum(tensor.nbytes for tensor, entry in formats if entry is not None and entry.quantized)
        free = ops.free_memory(0)
        if ops.device_memory() is None and 1 < free < needed:
            bits = 8 * free / sum(math.prod(tensor.shape) for tensor in own)
            raise DeviceError(
                f"the weights of {gguf.path.name} need {needed / 1e9:.2f} GB of memory and {free / 1e9:.2f} GB are free, "
                f"which is enough for {bits:.1f} bits per weight; choose a smaller quantization or model, close other "
                "programs, or place more layers on a GPU (n_gpu_layers=...)."
            )


def check_types(config: ModelConfig, types: Types, gguf: GGUF) -> None:
    """Raise ModelError if the cache of a layer cannot have elements of these types."""
    for spec in cache_specs(config, 1):
        if problem := spec.refusal(types, config.architecture):
            raise ModelError(f"{gguf.path}: {problem}.")


def _check_budget(config: ModelConfig, gguf: GGUF) -> None:
    """Raise ModelError if a layer cannot keep only a part of a prompt."""
    if not all(spec.can_be_thinned for spec in cache_specs(config, 1)):
        raise ModelError(
            f"{gguf.path}: kv_budget is for keys and values, and {config.architecture} stores latents, which stay whole; "
            "leave it out (kv_budget=0)."
        )


def _rewind(draft_max: int, ops: Ops, config: ModelConfig) -> int:
    """The number of latest tokens that recurrent layers can roll back: those of all passes in flight, each with its drafts,
    and the token before them, which a hybrid that drafts for another model reads again."""
    return 1 + ahead_drafted(ops) * ((draft_max or DRAFT_MAX["dflash" if config.block else "mtp"]) + 1)


def _context(
    config: ModelConfig,
    n_ctx: int,
    options: _Options,
    rewind: int,
    placement: Placement,
    weights: Mapping[Ops, int],
    owned: Sequence[int],
) -> tuple[int, int, int, int]:
    """The number of positions of a context, the number of tokens of a prompt that one pass reads, the number of positions
    that all contexts share, and the number of contexts.  Raises ContextError if the device's memory is too small.

    weights: the bytes of weights on each device; owned: those of each of several devices that share the layers.
    """
    if not 0 <= n_ctx < 2**31:
        raise UsageError(
            f"the context must be 0 (the model's own) or a number of tokens below 2**31, not {described(n_ctx)}."
        )
    if 0 < config.n_positions < n_ctx:
        raise ContextError(
            f"a context of {n_ctx} is longer than the {config.n_positions} positions that this model has embeddings for; "
            f"choose a context of at most {config.n_positions} (n_ctx=...)."
        )
    room_of = rooms(placement, weights, owned)
    decode_rows, parallel = placement.last.decode_rows, options.parallel
    rows = max(ops.max_rows for ops in placement.devices)

    def fullest(positions: int, rows: int, capacity: int = 0) -> tuple[int, int]:
        """The bytes that a context needs in the memory that it fills most, and those that are free there."""

        def needed(place: PlacedOwner) -> int:
            ops, owner = place
            sizes = positions, min(rows, ops.max_rows), rewind, parallel, capacity or positions
            return context_bytes(config, ops, options.types, *sizes, placement, owner)

        known = [(sum(map(needed, room.places)), room.free) for room in room_of if room.free]
        return max(known, key=lambda pair: pair[0] / pair[1], default=(0, 1))

    def fits(positions: int, rows: int, part: float = 1, capacity: int = 0) -> bool:
        """Whether a context takes at most this part of the free memory of every device."""
        needed, free = fullest(positions, rows, capacity)
        return needed <= free * part

    positions = n_ctx or config.n_ctx_train
    while not n_ctx and positions > 1024 and not fits(positions, rows, 1 / 2):
        positions //= 2
    # Fewer answers at a time are better than slow prompts, down to those of a pass with drafts.
    while options.fewer and parallel > decode_rows and not fits(positions, rows):
        parallel = max(decode_rows, parallel * 7 // 8)
    # Reading prompts in smaller pieces is better than not reading them.
    while not fits(positions, rows) and rows > decode_rows and not options.batched:
        rows = max(decode_rows, rows // 2)
    while options.fewer and parallel > 1 and not fits(positions, rows):
        parallel -= 1
    if not fits(positions, rows):
        size, free = fullest(positions, rows)
        needed = f"{size / 2**20:.0f} MiB"
        batch = " or batch (batch_size=...)" if options.batched and rows > decode_rows else ""
        fewer = ", or fewer answers at a time (parallel=...)" if parallel > 1 else ""
        smaller = f"a smaller context (n_ctx=...){batch}{fewer}"
        if n_ctx:
            raise ContextError(
                f"a context of {n_ctx} needs {needed} and {free / 2**20:.0f} MiB are free; choose {smaller}."
            )
        raise ContextError(
            f"this model needs {needed} for a context of {positions} and {free / 2**20:.0f} MiB are free; choose a smaller "
            f"model, or {smaller}."
        )
    capacity = parallel * positions
    if parallel > 1:
        # Something is left for a draft model, for others, and for intermediate results that were estimated too low.
        part, step = (6 if options.drafted else 9) / 10, max(CHUNK, positions)
        while capacity > positions and not fits(positions, rows, part, capacity):
            capacity = max(positions, capacity - step)
    return positions, rows, capacity, parallel
