"""What a run reports: bars while something is slow, a live rate, and a report at the start and the end.

Everything here goes to stderr, so that stdout contains only the answer. On a terminal there are bars and a
line at the bottom of the screen; anywhere else the same facts are a few plain lines.
"""

import os
import sys
import time
from typing import TYPE_CHECKING, Self, TextIO

from engine.checks import shown
from engine.cli.terminal import StatusLine, ends_at_edge, printable, terminal_size, wrapped
from engine.errors import DeviceError
from engine.hub.catalog import CATALOG, model_file
from engine.memory import shown as _bytes

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from engine.decode.generation import Generation
    from engine.llm import LLM
    from engine.ops.operations import Ops
    from engine.speculative.source import LoadedLLM
    from engine.speculative.statistics import Statistics

STAGES = {
    "fetch": ("fetching the model", "bytes"),
    "load": ("loading", "bytes"),
    "compile": ("compiling", "kernels"),
    "prompt": ("reading the prompt", "tokens"),
}

SOURCES = {
    "model": "the draft model",
    "mtp": "the model's own layer",
    "eagle3": "the EAGLE-3 network",
    "dflash": "the DFlash network",
    "assistant": "the assistant",
    "lookup": "lookup",
    "history": "earlier answers",
}

PLAIN_SECONDS = 2.0
"""Seconds between the lines that report the progress of a slow stage without a terminal."""

PACED = ("fetch", "prompt")
"""The stages whose rate and time left are shown."""

PACE_SECONDS = 0.5
"""Seconds after which the rate of a stage is shown."""

LIVE_SECONDS = 0.2
"""How often the line with the live rate is drawn on a terminal."""


class Report:
    """Writes to one stream, stderr by default; a context manager that restores the terminal at the end."""

    def __init__(self, verbose: bool = False, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.verbose = verbose
        self.terminal = self.stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._stage = ""
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._status: StatusLine | None = None
        self._said = self._started = 0.0
        #: The work done when the stage began, the work done now, and the total.
        self._first = self._done = self._total = 0
        #: The text before the answer on the screen.
        self._echoed = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends a bar or a live line that is still shown."""
        self._end_stage()
        if self._status is not None:
            self._status.close()
            self._status = None

    def line(self, text: str = "") -> None:
        """Prints one line, dim on a terminal."""
        self.close()
        text = printable(text)
        if self.terminal:
            text = wrapped(text, terminal_size(self.stream).columns)
        print(f"\x1b[2m{text}\x1b[0m" if self.terminal and text else text, file=self.stream, flush=True)

    def detail(self, text: str) -> None:
        """Prints one line if ``--verbose`` is on."""
        if self.verbose:
            self.line(text)

    # -- stages: progress(stage, done, total), as called by engine.load, LLM.compile and the catalog

    def progress(self, stage: str, done: int, total: int) -> None:
        """Shows how far a stage is: a bar on a terminal, else a line if it is slow. The bar ends at ``done == total``."""
        if stage != self._stage:
            self.close()
            self._stage = stage
            self._said = self._started = time.perf_counter()
            self._first = done
            if self.terminal and done < total:
                self._start_bar(stage, total)
        self._done, self._total = done, total
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, amount=self._pace())
        elif not self.terminal:
            now = time.perf_counter()
            finished = done >= total and now - self._started >= PLAIN_SECONDS
            if finished or now - self._said >= PLAIN_SECONDS:
                self._said = now
                print(f"{_label(stage)}: {self._pace()}", file=self.stream, flush=True)
        if done >= total:
            self._end_stage()

    def _start_bar(self, stage: str, total: int) -> None:
        # Imported here: a run without a bar starts 0.05 s sooner.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=32), TextColumn("{task.fields[amount]}"))
        console = Console(file=self.stream)
        # A transient bar leaves no trace; rich must not redirect stdout, which is the answer.
        self._bar = Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task(_label(stage), total=total, amount=_amount(stage, 0, total))
        self._bar.start()

    def _pace(self) -> str:
        """The progress of the stage; if its work is uniform, also its rate and the remaining time."""
        amount = _amount(self._stage, self._done, self._total)
        seconds = time.perf_counter() - self._started
        # Kernels differ too much in size, and the rate of the first moments is not meaningful.
        if self._stage not in PACED or self._done <= self._first or seconds < PACE_SECONDS:
            return amount
        rate = (self._done - self._first) / seconds
        left = (self._total - self._done) / rate
        return f"{amount}, {_rate(rate) if self._stage == 'prompt' else _speed(rate)}" + (
            f", {_duration(left)} left" if left else ""
        )

    def _end_stage(self) -> None:
        self._stage = ""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    # -- the answer

    def columns(self) -> int:
        """The width of the terminal at present."""
        return terminal_size(self.stream).columns

    def live(self, generation: "Generation", fills_line: bool | None = None) -> None:
        """Shows the rate while an answer is written; call it after each piece, once that has been flushed.

        fills_line: whether the answer on the screen ends in the last column; None if it is written as it is.
        """
        now = time.perf_counter()
        if self._stage != "answer":
            self._end_stage()
            self._stage = "answer"
            self._said = self._started = now
        elif now - self._said >= (LIVE_SECONDS if self.terminal else 5 * PLAIN_SECONDS):
            if fills_line is None and self.terminal and sys.stdout.isatty():
                fills_line = ends_at_edge(self._echoed + generation.text, self.stream)
            if fills_line:
                return  # the next character begins a line; moving the cursor now would lose the last one
            self._said = now
            text = f"{_tokens(len(generation.ids))}  {_rate(generation.timings.predicted_per_second)}"
            if not self.terminal:
                print(f"answering: {text}", file=self.stream, flush=True)
                return
            if self._status is None:
                self._status = StatusLine(self.stream, shared=sys.stdout.isatty())
            self._status.draw(text)

    def echo(self, prompt: str) -> None:
        """Shows the text that a completion continues, if answer and report share the screen."""
        self.close()
        if self.terminal and sys.stdout.isatty():
            shown = prompt if len(prompt) <= 2000 else "…" + prompt[-2000:]
            self._echoed = shown
            self.stream.write(f"\x1b[2m{printable(shown)}\x1b[0m")
            self.stream.flush()

    def answered(self, text: str, *, shown: bool) -> None:
        """Call it once the answer is complete: what follows starts on a line of its own."""
        self.close()
        # The line break belongs to the report, not to the answer: stdout stays exactly what the model wrote.
        if shown and self.terminal and sys.stdout.isatty() and not text.endswith("\n"):
            self.stream.write("\n")
            self.stream.flush()

    # -- the two reports

    def started(self, llm: "LLM") -> None:
        """Reports what was loaded: model, size, context, cache, threads."""
        config = llm.config
        bits = 8 * llm.n_bytes / max(llm.n_params, 1)
        self.line(
            f"{name_of(llm)}  {config.architecture}, {_count(llm.n_params)} parameters, "
            f"{_bytes(llm.n_bytes)} ({bits:.1f} bits each)"
        )
        trained = f" (trained for {config.n_ctx_train})" if llm.n_ctx != config.n_ctx_train else ""
        where = f"{llm.n_threads} thread{'s' * (llm.n_threads != 1)}"
        if not llm.n_threads:
            where = llm.model.ops.label
        self.line(f"context {_tokens(llm.n_ctx)}{trained}, {_cache(llm)}, {where}")
        if llm.model.stages:
            from engine.cli.placements import describe

            self.line(describe(llm.model.placement))
            if llm.model.streaming is not None:
                self.line("long prompts are read by the GPU, with weights of the CPU that are copied to it")
        if llm.recurrent_bytes and not llm.model.segments:
            self.line(f"up to {_bytes(llm.states.budget)} of host memory for snapshots at the ends of messages")
        elif llm.recurrent_bytes:
            self.line(
                f"recurrent states {llm.model.segments} x {_bytes(llm.recurrent_bytes)} to roll tokens back, and up to "
                f"{_bytes(llm.states.budget)} of host memory for snapshots at the ends of messages"
            )
        if llm.draft is not None and llm.draft.name == "mtp":
            self.line(
                f"drafts by the model's own layer (multi-token prediction), which reads {_bytes(int(llm.draft.cost))}"
            )
        elif llm.draft is not None and llm.draft.name == "eagle3":
            self.line(f"drafts by an EAGLE-3 network, which reads {_bytes(int(llm.draft.cost))}")
        elif llm.draft is not None and llm.draft.name == "dflash":
            self.line(
                f"drafts by a DFlash network, up to {llm.draft.most} in a pass, which reads "
                f"{_bytes(int(llm.draft.cost) * llm.draft.most)}"
            )
        elif llm.draft is not None and llm.draft.name == "assistant":
            where = "" if llm.draft.ops is llm.model.ops else f", on {llm.draft.ops.label}"
            self.line(f"drafts by an assistant (gemma4-assistant), which reads {_bytes(int(llm.draft.cost))}{where}")
        elif llm.draft is not None:
            draft = llm.draft.llm
            where = "" if draft.model.ops.name == llm.model.ops.name else f", {draft.model.ops.label}"
            self.line(
                f"drafts by {name_of(draft)}, {_count(draft.n_params)} parameters, "
                f"{_bytes(draft.n_bytes)}, {_cache(draft)}{where}"
            )

    def device(self, llm: "LLM") -> None:
        """Reports a GPU's memory, used by the model and free, and how fast it can be read; with ``--verbose``, what the model
        has on the CPU."""
        ops = llm.model.ops
        memory = ops.device_memory()
        if memory is None:
            self.detail(f"memory: {llm.memory}")
            return
        if llm.draft is not None and llm.draft.name == "assistant" and llm.draft.ops is not ops:
            other = llm.draft.ops.device_memory()
            if other is not None:
                self.line(f"memory of {llm.draft.ops.label}: {_bytes(other.allocated)} for the assistant")
        gpus = [ops for ops in llm.model.devices if ops.device_memory() is not None]
        for gpu in gpus:
            memory = gpu.device_memory()
            assert memory is not None
            cache = llm.model.cache.memory_bytes(gpu)
            rest = memory.allocated - memory.weights - cache
            parts = f"weights {_bytes(memory.weights)}, cache {_bytes(cache)}, rest {_bytes(rest)}"
            bandwidth = _bandwidth(gpu)
            read = f"; it reads at {_speed(bandwidth)}" if bandwidth else ""
            name = gpu.label if len(gpus) > 1 else "GPU"
            self.line(f"{name} memory {_bytes(memory.allocated)} ({parts}), {_bytes(memory.free)} free{read}")

    def finished(self, llm: "LLM", generation: "Generation", *, ending: str) -> None:
        """Prints the end report: seconds, tokens, rates, memory, and ``ending``, which says why the answer ended."""
        from engine.models.traffic import bytes_per_second

        t, ops = generation.timings, llm.model.ops
        on_gpu = ops.device_memory()
        peak = peak_memory()  # before the bandwidth of a CPU is measured, which also takes memory
        cached = f"  ({t.cache_n} more were in the cache)" if t.cache_n else ""
        rows = [("load", f"{t.load_s:.2f} s")]
        if t.compile_s:
            rows.append(("compile", f"{t.compile_s:.2f} s"))
        if (missing := len(generation.prompt_ids) - t.cache_n - t.prompt_n) > 0:
            cached += f"  ({missing} more were not read)"
        rows.append(("prompt", f"{_tokens(t.prompt_n)}  {t.prompt_s:.3f} s  {_rate(t.prompt_per_second)}{cached}"))
        if t.dropped_n:
            kept = len(generation.prompt_ids) - t.dropped_n
            rows.append(
                ("kv budget", f"{kept} of {len(generation.prompt_ids)} positions kept in layers without a window")
            )
        if t.predicted_n:
            rows.append(("first token", f"{t.first_token_s:.3f} s"))
        # One token comes with the prompt, so it has no rate.
        rate = _rate(t.predicted_per_second if t.predicted_n > 1 else 0.0)
        answer = f"{_tokens(t.predicted_n)}  {t.predicted_s:.3f} s  {rate}"
        if speed := bytes_per_second(llm, t):
            answer += f"  {_speed(speed)}"
            # A GPU's is already known; a CPU's takes half a second and a gigabyte, so it is measured only on request.
            measured = (on_gpu is not None or self.verbose) and not llm.model.stages
            if bandwidth := _bandwidth(ops) if measured else 0.0:
                answer += f" ({speed / bandwidth:.0%} of the {_speed(bandwidth)} that a plain read reaches)"
        rows.append(("answer", answer))
        if seconds := llm.model.stage_seconds():
            shares = ", ".join(f"{label} {spent:.3f} s" for label, spent in seconds.items())
            rows.append(("stages", f"{shares}, of all prompts and answers"))
        if generation.speculation is not None:
            rows += _speculation(generation.speculation, t.predicted_per_second)
        rows.append(("ended by", ending))
        memory = f"{_bytes(peak)} at most"
        if on_gpu is not None:
            held = [each.allocated for ops in llm.model.devices if (each := ops.device_memory()) is not None]
            memory += f", {_bytes(sum(held))} on the GPU{'s' * (len(held) > 1)}"
        if snapshots := llm.memory.snapshots:
            memory += f", {_bytes(snapshots)} of them for snapshots (up to {_bytes(llm.memory.snapshots_limit)})"
        rows.append(("memory", memory))
        self.line()
        for label, value in rows:
            self.line(f"{label:<12}{value}")

    def turn(self, generation: "Generation", *, reason: str, n_ctx: int) -> None:
        """Reports one answer of a conversation, on one line."""
        t = generation.timings
        total = len(generation.prompt_ids)
        if t.cache_n + t.prompt_n < total:
            read = f"{_tokens(t.prompt_n)} read, {_rate(t.prompt_per_second)}"
            self.line(f"[{read}, {total - t.cache_n - t.prompt_n} more were not, {reason}]")
            return
        used = t.cache_n + t.prompt_n + t.predicted_n
        end = "" if reason == "stop" else f", {reason}"
        s = generation.speculation
        drafts = f"{s.acceptance:.0%} of {s.drafted} drafts kept, " if s is not None and s.drafted else ""
        dropped = f"{t.dropped_n} positions dropped, " if t.dropped_n else ""
        self.line(
            f"[{_tokens(t.predicted_n)}, {_rate(t.predicted_per_second)}, first after {t.first_token_s:.2f} s, {drafts}"
            f"{dropped}context {used} of {n_ctx}{end}]"
        )

    def logprobs(self, generation: "Generation") -> None:
        """Prints one line per generated token: its log-probability (natural), then the most likely tokens in its place."""
        self.line()
        for entry in generation.logprobs:
            top = "  ".join(f"{likely.text!r} {likely.logprob:.4f}" for likely in entry.top)
            self.line(f"{entry.logprob:9.4f}  {entry.text!r:<16} {top}")


def peak_memory() -> int:
    """The peak physical memory of this process in bytes, including mapped weights."""
    try:
        # getrusage would inherit the peak of the process that started this one.
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _label(stage: str) -> str:
    label = STAGES.get(stage, (stage, ""))[0]
    if stage == "compile":
        from engine.compile.cache import places

        label += (
            " (kept for the next run)" if places("cpu").write is not None else " (no folder to keep the kernels in)"
        )
    return label


def _amount(stage: str, done: int, total: int) -> str:
    unit = STAGES.get(stage, ("", ""))[1]
    if unit == "bytes":
        return f"{done / 1e6:.1f} of {_bytes(total)}"
    return f"{done} of {total} {unit}".rstrip()


def _duration(seconds: float) -> str:
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _speed(bytes_per_second: float) -> str:
    if bytes_per_second < 1e9:
        return f"{bytes_per_second / 1e6:.1f} MB/s"
    return f"{bytes_per_second / 1e9:.{0 if bytes_per_second >= 1e11 else 1}f} GB/s"


def _speculation(s: "Statistics", per_second: float) -> list[tuple[str, str]]:
    """The rows of the end report about drafts."""
    if not s.drafted:
        return [("drafts", "none: nothing was found to draft" if s.plain_n else "none")]
    kept = f"{s.accepted} of {s.drafted} kept ({s.acceptance:.0%}"
    kept += f"; by place {' '.join(f'{share:.0%}' for share in s.by_place)})" if len(s.by_place) > 1 else ")"
    sources = ", ".join(f"{s.accepted_by[name]} of {n} by {SOURCES[name]}" for name, n in s.drafted_by.items())
    rows = [("drafts", kept + (f", {sources}" if len(s.drafted_by) > 1 else ""))]
    passes = f"{s.mean_length:.2f} tokens per verification ({s.verifications}), {s.plain_n} plain"
    if s.plain_per_second:
        passes += f" at {_rate(s.plain_per_second)}: {per_second / s.plain_per_second:.2f} x that"
    return [*rows, ("passes", passes)]


def _bandwidth(ops: "Ops") -> float:
    """Bytes per second that the device reads at best; 0 if too little memory is left to measure it."""
    try:
        return ops.bandwidth()
    except (DeviceError, MemoryError):
        return 0.0


def _cache(llm: "LoadedLLM") -> str:
    """The size of a model's cache and the types of its elements."""
    return f"cache {_bytes(llm.cache_bytes)} in {'/'.join(dict.fromkeys(llm.cache_types))}"


def name_of(llm: "LoadedLLM") -> str:
    """A named model's name; else the name in its file, or that of the file."""
    known = next((model.name for model in CATALOG.values() if model_file(model) == llm.path), None)
    return known or llm.config.name or shown(llm.path.stem)


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} G" if n >= 1e9 else f"{n / 1e6:.1f} M"


def _tokens(n: int) -> str:
    return f"{n} token{'s' * (n != 1)}"


def _rate(per_second: float) -> str:
    # If nothing was done, nothing was measured: no rate then, rather than zero or infinity.
    return f"{per_second:.1f} tokens/s" if 0 < per_second < float("inf") else "- tokens/s"
