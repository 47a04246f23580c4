"""Limits that several packages share."""

MOST_DRAFTS = 15
"""The most drafts of one pass: together with the last sampled token they fill the 16 rows that a GPU reads at once."""

STEP_ROWS = MOST_DRAFTS + 1
"""The number of rows of the largest step of an answer: the last sampled token and the most drafts.  A pass that reads a
prompt may have more rows, or fewer if requested."""

STREAMS = 4
"""The number of streams that hyper-connections mix."""

MOST_PARALLEL = 1024
"""The most answers that are computed at the same time."""

MOST_LOGITS = 128
"""Rows of a pass that returns the logits of all its rows; few, because a vocabulary is large."""
