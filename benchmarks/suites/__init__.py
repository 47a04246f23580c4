"""Suites for asv: load time and memory, tokenizer, every CPU operation, sampler, prompt and generation, the GPU.

``docs/benchmarks.md`` says how to run them.  Kernels are compiled in each suite's ``setup``, never while time is taken.
"""

import os
from pathlib import Path

from . import commits

if "ASV_ENV_DIR" in os.environ:
    # asv goes back and forth between commits; the user's own folder would soon hold nothing but their kernels.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(os.environ["ASV_ENV_DIR"], "kernels")))
# Commits before the fingerprint was checked on each access choose the folder once, before any kernel is imported.
getattr(commits.find("engine.compile.cache"), "use", lambda: None)()
commits.use_old_names()
