"""The program of the process in which grammars are tried.

It reads a JSON object per line from stdin and writes a JSON string per line to stdout: what llguidance reports on a grammar,
"" if it accepts it; the first line says that it is ready.  A grammar that takes too long, too much memory or too deep a
recursion ends the process.  Nothing of the package is imported, so that it starts fast and needs no path.
"""

import json
import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import llguidance

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

STACK_BYTES = 2 << 20
"""A part of what threads usually have, so that a grammar which is accepted here can be compiled in any thread."""

MOST_BYTES = 2 << 30
"""The most memory of this process, in bytes of address space."""


def serve() -> None:
    """Answer requests until stdin ends."""
    tokenizers: dict[str, Any] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        limit(request["seconds"])
        vocabulary = request["vocabulary"]
        if vocabulary and vocabulary not in tokenizers:
            tokenizers = {vocabulary: tokenizer(**json.loads(vocabulary))}
        try:
            found = report(request["source"], request["limits"], tokenizers.get(vocabulary))
        except Exception as error:
            found = str(error) or type(error).__name__
        limit(0)
        print(json.dumps(found), flush=True)


def limit(seconds: float) -> None:
    """End this process by SIGPROF after as many further seconds of processor time; 0: never."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)


def tokenizer(size: int, ends: list[int], special: list[int], texts: dict[str, str]) -> Any:
    """A tokenizer of ``size`` tokens, of which only those of single bytes and the special ones have text: all that the
    compilation of a grammar depends on.  texts: bytes of tokens as latin-1, by id."""
    tokens = [b""] * size
    for id, text in texts.items():
        tokens[int(id)] = text.encode("latin-1")
    given = SimpleNamespace(eos_token_id=ends[0], bos_token_id=None, tokens=tokens, special_token_ids=special)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(given), eos_token=ends, slices=[])


def report(source: str, limits: dict[str, Any], tokenizer: Any) -> str:
    """What llguidance reports on a grammar; tokenizer: None to leave its tokens unchecked."""
    bounds = llguidance.LLParserLimits(**limits)
    if tokenizer is None:
        return llguidance.LLMatcher.validate_grammar(source, limits=bounds)
    matcher = llguidance.LLMatcher(tokenizer, source, limits=bounds, log_level=0)
    mask = matcher.compute_bitmask() if not matcher.is_error() else b""
    if matcher.is_error() or matcher.is_stopped():
        return matcher.get_error()
    permitted = (8 * i + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1)
    first = next((token for token in permitted if token not in tokenizer.eos_tokens), None)
    if first is not None and matcher.consume_token(first):
        matcher.rollback(1)
    return matcher.get_error()


def main() -> None:
    """Serve in a thread with a stack of known size."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
