"""Speculative decoding: several tokens of an answer from one pass of the model, with the answer unchanged.

A *draft source* proposes tokens.  One pass of the target reads the last sampled token and the drafts, and each row says what
follows it.  Drafts that the target agrees with are kept, and the first one that it rejects is replaced.
"""
