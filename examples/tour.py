# %% [markdown]
"""A tour of the Python interface, cell by cell.

    python examples/tour.py

Editors that support ``# %%`` cells show this file as a notebook. It uses the model that ships with the package, which
continues Python source, and takes a few seconds. It shows loading, tokens, logits, answers, streams, seeds,
log-probabilities, conversations, speculation and saved states.
"""

# %% Load a model. Without a name it is the bundled one; a name, a path or hf:owner/repo/file.gguf selects another.

import tempfile
from pathlib import Path

import engine

llm = engine.load(n_ctx=256)
print(llm)

# %% Text becomes token ids, and ids become text.

ids = llm.tokenize("def add(a, b):")
print(ids, [llm.detokenize([id]) for id in ids])

# %% A pass scores every token of the vocabulary after each token of the text.

rows = llm.logits(ids)
best = rows[-1].argsort()[::-1][:5]
print(rows.shape, {llm.detokenize([id]): round(float(rows[-1][id]), 2) for id in best})

# %% An answer. Temperature 0 takes the most probable token each time.

PROMPT = "def add(a, b):\n    return"
answer = llm.complete(PROMPT, max_tokens=24, temperature=0, stop="\n")
print(answer, answer.finish_reason, answer.timings.prompt_n)

# %% The same, piece by piece, while it is computed.

for piece in llm.generate(PROMPT, max_tokens=8, temperature=0):
    print(repr(piece), end=" ")
print()

# %% A seed determines the text: on every device, with any number of threads, whatever was generated before.

drawn = llm.complete("import ", max_tokens=12)
again = llm.complete("import ", max_tokens=12, seed=drawn.seed)
print(drawn.seed >= 0, drawn.ids == again.ids)

# %% How probable was each token, and what else was likely?

for entry in llm.complete(PROMPT, max_tokens=3, temperature=0, logprobs=3).logprobs:
    print(f"{entry.text!r:8} {entry.logprob:7.3f}  ", {likely.text: round(likely.logprob, 3) for likely in entry.top})

# %% A conversation. The bundled model was not trained to converse, so the template is given, and the answers are source code.

messages = [{"role": "user", "content": "# a function that adds two numbers"}]
first = llm.chat(messages, chat_template="chatml", max_tokens=16, seed=1)
messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "# one that subtracts"}]
second = llm.chat(messages, chat_template="chatml", max_tokens=16, seed=1)
print(f"{second.timings.cache_n} of {len(second.prompt_ids)} tokens were in the cache")

# %% Speculation: drafts from earlier text save passes and change no token.

repeated = "x = 1\ny = 2\n" * 6
plain = llm.complete(repeated, max_tokens=48, temperature=0)
drafted = llm.complete(repeated, max_tokens=48, temperature=0, speculation=engine.SpeculationParams(lookup=True))
assert drafted.speculation is not None
print(drafted.ids == plain.ids, f"{drafted.speculation.accepted} of {drafted.speculation.drafted} drafts were right")

# %% A saved state: what the cache holds of a text, to continue later or elsewhere with the same bits.

with tempfile.TemporaryDirectory() as folder:
    state = Path(folder) / "state"
    llm.save_state(state)
    print(state.stat().st_size > 100_000, llm.n_cached)
    llm.reset()
    print(len(llm.load_state(state)) == llm.n_cached)

# %% Errors are one sentence each.

try:
    llm.complete("x", temperature=float("nan"))
except engine.UsageError as error:
    print(error)

# %% Closing frees the memory. ``with engine.load() as llm:`` does it at the end of the block.

llm.close()
print(llm)
