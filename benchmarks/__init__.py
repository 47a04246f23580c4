"""Suites for asv: load time and memory, tokenizer, every CPU operation, sampler, prompt and generation, the GPU.

``asv.conf.json`` says how to run them.  Kernels are compiled in each suite's ``setup``, never while time is taken.
"""

from engine.compile import cache as kernel_cache

# Before any kernel is imported: compiled ones are then shared with ``python -m engine.run``.
kernel_cache.use()
