"""The most probable of a few labels, by their log-probabilities: python examples/classify.py"""

import math

import bitmirror

labels = (" ImportError", " KeyError")
with bitmirror.load(n_ctx=256) as llm:
    for code in ("import numpy", "return self._cache[key]", "from rich import print"):
        answer = llm.complete(f"try:\n    {code}\nexcept", max_tokens=1, temperature=0, logprobs=100)
        scores = {entry.text: entry.logprob for entry in answer.logprobs[0].top}
        print(code, "->", max(labels, key=lambda label: scores.get(label, -math.inf)))
