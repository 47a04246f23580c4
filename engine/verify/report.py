"""The file of ``bitmirror parity --report FILE``: the machine, the versions, and every comparison of each model that was run.

It is JSON, to be sent to the maintainers by users of other GPUs.  Runs on the same machine with the same versions add their
model to the file.  It has nothing about the user: of a path only the name of the file, and of a prompt the number of tokens.
"""

import json
import os
import platform
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checks import shown
from engine.compile.cache import COMPILERS
from engine.errors import UsageError
from engine.gguf.digest import sampled_digest
from engine.gguf.file import GGUF
from engine.machine.files import replaced
from engine.version import ARITHMETIC, __version__

if TYPE_CHECKING:
    from engine.cuda.runtime.driver import DeviceInfo
    from engine.verify.tally import Tally

FORMAT = "bitmirror-parity"
VERSION = 1

MOST_BYTES = 64 << 20
"""The largest file that is read to add to it."""

FEATURES = re.compile(r"avx|fma|f16c|amx|sse4|neon|dotprod|i8mm|sve|fullfp16|bf16")
"""The beginnings of features of a CPU that vectors and their speed depend on."""


def about(gpu: "DeviceInfo") -> dict[str, Any]:
    """The machine and the versions, as plain values."""
    from llvmlite.binding import get_host_cpu_features

    from engine.cpu import simd
    from engine.machine.cores import available_cores
    from engine.machine.cpu import cpu_name
    from engine.machine.memory import total_memory

    features = get_host_cpu_features()
    return {
        "gpu": {
            "name": gpu.name,
            "compute_capability": ".".join(map(str, gpu.compute_capability)),
            "memory_mib": gpu.memory >> 20,
            "multiprocessors": gpu.multiprocessors,
            "shared_memory_kib": gpu.shared_memory >> 10,
            "driver": gpu.driver,
        },
        "cpu": {
            "name": cpu_name(),
            "architecture": platform.machine(),
            "threads": available_cores(),
            "memory_mib": total_memory() >> 20,
            "instructions": simd.host(),
            "features": sorted(name for name, there in features.items() if there and FEATURES.match(name)),
        },
        "system": sys.platform,
        "versions": {
            "bitmirror": __version__,
            "arithmetic": ARITHMETIC,
            "python": platform.python_version(),
            **{name: _version(name) for name in dict.fromkeys(COMPILERS["cpu"] + COMPILERS["gpu"])},
        },
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def about_model(path: Path, gguf: GGUF) -> dict[str, Any]:
    """What identifies a model: the name of its file, its digest, and what it is made of."""
    return {
        "file": path.name,
        "digest": sampled_digest(gguf),
        "architecture": gguf.get("general.architecture", "str", ""),
        "bytes": gguf.n_bytes,
        "tensors": dict(Counter(tensor.type.name for tensor in gguf.tensors.values())),
    }


def outcome(tally: "Tally", problem: str, result: str) -> dict[str, Any]:
    """The results of a run: result, equal, different or error; problem: the sentence that says what differs or failed."""
    lines = list(tally.lines())
    return {
        "result": result,
        "problem": problem,
        "values": tally.values,
        "differing_bits": sum(line["differing_bits"] for line in lines),
        "comparisons": lines,
    }


def without_paths(text: str, path: Path) -> str:
    """A sentence with only the name of the model's file, and ~ for the user's folder."""
    text, home = text.replace(str(path), path.name), os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


class ReportFile:
    """A file that runs of parity add to."""

    def __init__(self, name: str, about: Mapping[str, Any]) -> None:
        """Raises UsageError if the file cannot be written, is no such report, or is that of another machine or version."""
        self.path = Path(os.path.expanduser(name))
        self._about = about
        try:
            self._models = self._read()
            tempfile.TemporaryFile(dir=self.path.parent).close()  # before the comparison, which takes minutes
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"the report cannot be written to {self._shown}: {reason}; give --report another name."
            ) from None

    def add(self, model: Mapping[str, Any]) -> None:
        """Add the run of a model.  Raises UsageError if the file cannot be written."""
        try:
            self._write([*self._models, model])
        except OSError as error:
            raise UsageError(
                f"the report cannot be written to {self._shown}: {error.strerror}; give --report another name."
            ) from None

    @property
    def _shown(self) -> str:
        return shown(self.path, 200)

    def _read(self) -> list[Any]:
        """The models that the file has already."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        try:
            before = json.loads(data) if len(data) <= MOST_BYTES else None
        except ValueError:
            before = None
        if not isinstance(before, dict) or before.get("format") != FORMAT or before.get("version") != VERSION:
            raise ValueError("the file exists and is no report of bitmirror parity")
        if {key: before.get(key) for key in self._about} != self._about:
            raise ValueError("it is the report of another machine or of other versions")
        models = before.get("models")
        return models if isinstance(models, list) else []

    def _write(self, models: list[Any]) -> None:
        """Replace the file once the new one is complete."""
        with replaced(self.path) as file:
            text = json.dumps({"format": FORMAT, "version": VERSION, **self._about, "models": models}, indent=1)
            file.write(f"{text}\n".encode())
