"""Limits that several packages share."""

MOST_DRAFTS = 15
"""The most drafts of an answer in one pass."""

DECODE_ROWS = 16
"""The most rows of an answer in a decode batch, on both backends (``engine/ops/executor.py``): the last sampled token and its
drafts, at most ``MOST_DRAFTS``.  A pass that reads a prompt may have more rows, or fewer if requested."""

DECODE_ANSWERS = 128
"""The most rows of a decode batch, and so the most answers that it continues."""

DRAFTED_ROWS = 4
"""The rows for each sequence of a model of the largest decode batch with drafts, if that has more than ``DECODE_ROWS``."""

IN_FLIGHT = 3
"""The number of decode batches, each with drafts, whose tokens caches must be able to roll back: those that devices have in
flight, and the next one."""

STREAMS = 4
"""The number of streams that hyper-connections mix."""

MOST_PARALLEL = 1024
"""The most answers that are computed at the same time."""

MOST_TOGETHER = 32
"""The most sequences of a pass that reads prompts."""

MOST_LOGITS = 128
"""Rows of a pass that returns the logits of all its rows; few, because a vocabulary is large."""

REPLAYED_ROWS = 256
"""The most rows of a pass whose logits are read on the device: more than ``MOST_LOGITS``, because they are not copied."""

ALL_LAYERS = 1 << 16
"""More layers than a model has."""

LEAST_KV_BUDGET = 256
"""The smallest number of positions of a prompt that a budget of keys and values may leave: the first chunk, the one or two of
the last tokens, and one more."""

MOST_OWNERS = 16
"""The most devices that share the layers of a model."""
