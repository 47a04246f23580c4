"""Suites for asv: load time and memory, tokenizer, every CPU operation, sampler, prompt and generation, the GPU.

``docs/benchmarks.md`` describes how to run them.  Kernels are compiled in each suite's ``setup``, never while it is timed.
"""

import os
from pathlib import Path

from . import commits

if "ASV_ENV_DIR" in os.environ:
    # asv switches between many commits, whose kernels would displace all others in the user's own folder.
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(os.environ["ASV_ENV_DIR"], "kernels")))
# Older commits do not check the fingerprint on each access: they choose the folder once, before any kernel is imported.
getattr(commits.find("engine.compile.cache"), "use", lambda: None)()
commits.use_old_names()
