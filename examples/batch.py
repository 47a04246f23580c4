"""Several prompts at once, with a progress bar on a terminal: python examples/batch.py"""

import bitmirror

prompts = ["def add(a, b):\n    return", "for i in range(", "import "]
params = bitmirror.SamplingParams(temperature=0, max_tokens=12, stop="\n")
with bitmirror.load(n_ctx=256, parallel=3) as llm:
    answers = llm.complete(prompts, sampling_params=params, progress=True)
for prompt, answer in zip(prompts, answers, strict=True):
    print(f"{prompt!r} {answer.text!r} {answer.finish_reason}")
