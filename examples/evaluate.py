"""An evaluation: the beginnings of 50 pieces of Python source, and how each should continue.

    python examples/evaluate.py
    python examples/evaluate.py -m smollm2-135m

A model completes each opening greedily, and passes if its text begins as expected. The program prints a table and the score.
The same model always gets the same score, on every device: there is no seed, and no answer depends on another one.
"""

import argparse

import engine

QUESTIONS = (
    ("import numpy as ", "np"),
    ("import pandas as ", "pd"),
    ("import matplotlib.pyplot as ", "plt"),
    ("from collections import default", "dict"),
    ("from dataclasses import data", "class"),
    ("from pathlib import ", "Path"),
    ("from typing import TYPE_", "CHECKING"),
    ("from __future__ import ", "annotations"),
    ("if __name__ == ", '"__main__"'),
    ('if __name__ == "__main__', '":'),
    ("class Point:\n    def __init__(", "self"),
    ("class Point:\n    def __repr__(", "self"),
    ("class Stack:\n    def push(self, item):\n        self.items.", "append"),
    ("def add(a, b):\n    return ", "a + b"),
    ("def subtract(a, b):\n    return ", "a - b"),
    ("def multiply(a, b):\n    return ", "a * b"),
    ("def square(x):\n    return ", "x * x"),
    ("def is_even(n):\n    return n % ", "2"),
    ("def maximum(a, b):\n    if a > b:\n        return ", "a"),
    ("def factorial(n):\n    if n == 0:\n        return ", "1"),
    ("def fibonacci(n):\n    if n < 2:\n        return ", "n"),
    ("def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - ", "1) + fibonacci(n - 2)"),
    ("for i in ", "range("),
    ("for line in lines:\n    words.", "append("),
    ("for key, value in data.", "items()"),
    ("for i, item in ", "enumerate("),
    ("for a, b in ", "zip("),
    ("while Tr", "ue:"),
    ("while True:\n    try:\n        step()\n    except KeyboardInterrupt:\n        ", "break"),
    ("try:\n    import json\nexcept ", "ImportError"),
    ("try:\n    value = int(text)\nexcept ", "ValueError"),
    ("try:\n    value = data[key]\nexcept ", "KeyError"),
    ("def f(x):\n    if not isinstance(x, int):\n        raise ", "TypeError"),
    ("def f(x):\n    raise NotImplemented", "Error"),
    ("with open(path) as ", "f"),
    ("with open(path) as f:\n    return f.", "read()"),
    ("with open(path, 'rb') as f:\n    data = f.", "read()"),
    ("import os\npath = os.path.", "join"),
    ("import sys\nif len(sys.", "argv"),
    ("import re\npattern = re.", "compile"),
    ("import json\nwith open(path) as f:\n    data = json.", "load"),
    ("import time\nstart = time.", "time()"),
    ("import random\nrandom.shuf", "fle("),
    ("import threading\nlock = threading.", "Lock()"),
    ("import logging\nlogger = logging.getLogger(", "__name__"),
    ("@property\ndef name(self):\n    return self.", "_name"),
    ("@staticmethod\ndef ", "_"),
    ("@classmethod\ndef create(", "cls"),
    ("assert len(a) == ", "len(b)"),
    ("words = text.", "split("),
)


def main() -> None:
    """Runs the evaluation for the model on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", help="path or name of a model; default: the bundled one")
    model = parser.parse_args().model
    passed = 0
    with engine.load(model, n_ctx=256) as llm:
        print(f"{'':6} {'opening':32} {'expected':24} answer")
        for opening, expected in QUESTIONS:
            # Healing: " range" is one token, so after "for i in " the model would not expect "range".
            text = llm.complete(opening, max_tokens=8, temperature=0, heal=True).text
            fits = text.startswith(expected)
            passed += fits
            shown = repr(opening.splitlines()[-1])[-32:]
            print(f"{'pass' if fits else 'fail':6} {shown:32} {expected!r:24} {text!r}")
    print(f"\n{passed} of {len(QUESTIONS)} passed ({passed / len(QUESTIONS):.0%})")


if __name__ == "__main__":
    main()
