"""Speculative decoding: several tokens of an answer from one pass of the model, with the answer unchanged.

A *draft source* proposes tokens; one pass of the target reads the certain token and the drafts together and says, row by row,
what follows each of them; drafts that the target agrees with are kept, and the first one that it rejects is replaced.
"""
