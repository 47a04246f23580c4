"""The tools of the command ``bitmirror``."""

TOOLS = {
    "run": ("engine.run", "answer a prompt, or start a conversation"),
    "chat": ("engine.run", "start a conversation"),
    "serve": ("engine.serve", "serve models over HTTP"),
    "embed": ("engine.cli.embed", "turn texts into vectors"),
    "models": ("engine.cli.models", "list, fetch, verify and remove named models"),
    "bench": ("engine.bench", "measure how fast a model reads and generates"),
    "verify": ("engine.cli.verify", "replay a receipt: whether a model gives an answer, bit by bit"),
    "trace": ("engine.cli.trace", "follow one token through the layers of a model"),
    "parity": ("engine.parity", "compare a model on the CPU and on a GPU, bit by bit"),
    "synthetic": ("engine.cli.synthetic", "write a random model of a real shape"),
    "compile": ("engine.cli.compile", "compile a model's GPU kernels on a machine without a GPU"),
    "completion": ("bitmirror.completion", "print a script that completes commands in bash, zsh or fish"),
}
"""The module of each tool, and what it does."""
