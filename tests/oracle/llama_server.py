#!/usr/bin/env python
"""``bitmirror serve`` in the place of llama-server, for llama.cpp's own tests of its server.

They start the program that ``LLAMA_SERVER_BIN_PATH`` names.  Flags that name their models are replaced by the bundled model,
and those that are always given although a test does not need them are left out.
"""

import sys

from engine.serve import main

LEFT_OUT = {
    **dict.fromkeys(("--hf-repo", "--hf-file", "--model-url", "--seed", "--n-predict", "--ubatch-size"), 1),
    **dict.fromkeys(("--no-slots", "--no-jinja", "--offline"), 0),
}
"""Flags that are left out, and how many values each has."""


def translated(words: list[str]) -> list[str]:
    """The flags of ``bitmirror serve`` for those that a test gives to llama-server."""
    own, given = ["-m", "pycoder", "--device", "cpu"], iter(words)
    for word in given:
        if word in LEFT_OUT:
            for _ in range(LEFT_OUT[word]):
                next(given)
        else:
            own.append(word)
    if not {"--chat-template", "--chat-template-file"} & set(own):
        own += ["--chat-template", "chatml"]
    return own


if __name__ == "__main__":
    sys.exit(main(translated(sys.argv[1:])))
