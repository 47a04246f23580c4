"""Limits that several rooms must agree on."""

MOST_DRAFTS = 15
"""Drafts of one pass: with the certain token they fill the 16 rows that a GPU reads at once."""

STEP_ROWS = MOST_DRAFTS + 1
"""Rows of the largest step of an answer: the certain token and the most drafts.  A pass that reads a prompt may have
more rows, or fewer where that is requested."""
