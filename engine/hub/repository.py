"""Models of the model hub: which file a reference means, and how it is fetched.

A reference is ``owner/repo/file.gguf``, or ``owner/repo`` with an optional ``:QUANT`` that selects one of its files.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import FetchError

USUAL = "Q4_K_M"
"""The quantization that a reference without one prefers, as in llama.cpp."""

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True)
class Reference:
    """What a user writes after ``hf:``; either ``file`` or ``quant`` is empty, or both."""

    repository: str
    file: str
    quant: str

    @classmethod
    def parse(cls, text: str) -> "Reference":
        """The parts of ``owner/repo``, ``owner/repo:QUANT`` or ``owner/repo/file.gguf``; raises FetchError."""
        owner, _, rest = text.partition("/")
        repository, slash, file = rest.partition("/")
        repository, colon, quant = repository.partition(":")
        if not (owner and repository) or (slash and not file) or (colon and (slash or not quant)) or ":" in owner:
            raise FetchError(
                f"hf:{text} is not a valid reference: write hf:owner/repo:QUANT or hf:owner/repo/file.gguf"
            )
        return cls(f"{owner}/{repository}", file, quant)

    def __str__(self) -> str:
        return f"hf:{self.repository}" + (f"/{self.file}" if self.file else f":{self.quant}" if self.quant else "")


def choose(reference: Reference, files: Sequence[str]) -> str:
    """The file of a repository that a reference without a file name means: the one of its quantization, or the usual one, or
    the only one.  Of a split file it is the first part.  Raises FetchError, which lists the choices."""
    models = sorted(name for name in files if name.lower().endswith(".gguf") and "mmproj" not in name.lower())
    models = [name for name in models if (part := PART.fullmatch(name)) is None or int(part[2]) == 1]
    if not models:
        raise FetchError(f"hf:{reference.repository} has no GGUF file: look for a repository whose name ends in -GGUF")
    # A name such as model-Q4_K.gguf must not answer to Q4_K_M, nor the other way round.
    wanted = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(reference.quant or USUAL)}(?![A-Za-z0-9_])", re.IGNORECASE)
    found = [name for name in models if wanted.search(name)]
    if not found and not reference.quant:
        found = models
    if len(found) == 1:
        return found[0]
    problem = "has several such files" if found else f"has no file for {reference.quant}"
    shown = ", ".join((found or models)[:20]) + (", ..." if len(found or models) > 20 else "")
    raise FetchError(f"{reference} {problem}: write hf:{reference.repository}/ and one of {shown}")


def fetch_hub(text: str) -> Path:
    """Fetches what a reference means, with every part of it if it is split, and returns the path; raises FetchError."""
    reference = Reference.parse(text)
    import huggingface_hub as hub  # here: most runs fetch nothing

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # it reports every retry
    try:
        file = reference.file or choose(reference, hub.HfApi().list_repo_files(reference.repository))
        names = [file]
        if split := PART.fullmatch(file):
            names += [f"{split[1]}-{i:05d}-of-{split[3]}.gguf" for i in range(1, int(split[3]) + 1)]
        paths = [Path(hub.hf_hub_download(reference.repository, name)) for name in dict.fromkeys(names)]
        return paths[0]
    except FetchError:
        raise
    except Exception as error:  # the hub's errors have no common base: network, rights, names, disk
        raise FetchError(f"{reference} could not be fetched: {_why(error, reference)}") from error
    finally:
        log.setLevel(level)


def _why(error: Exception, reference: Reference) -> str:
    """What an error of the hub's client means, and what to do.

    The classes are told apart by name: they have moved between modules of the client, whose messages are paragraphs.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "GatedRepoError" in names:
        return "access to it is restricted: accept the terms on its page, then log in with `hf auth login`"
    if "RepositoryNotFoundError" in names or status == 401:
        return "there is no such repository, or it is private: check the name, or log in with `hf auth login`"
    if names & {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "TimeoutException"}:
        return "the hub cannot be reached: check the network, the proxy and HF_HUB_OFFLINE, or give the path of a file"
    if "EntryNotFoundError" in names or status == 404:
        return "the repository has no such file: check the name"
    if status == 429:
        return "the hub has received too many requests: wait a few minutes, or log in with `hf auth login`"
    if status is not None:
        return f"the hub answered with status {status}: try again later"
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or str(error)
    lines = str(error).strip().splitlines()
    said = lines[0].rstrip(".:") if lines else type(error).__name__
    return f"{said}; check the network and the name"
