"""Speculative decoding: several tokens of an answer from one pass of the model, and the answer it would have given anyway.

A *draft source* proposes what may follow; one pass of the target reads the certain token and the drafts together and says,
row by row, what follows each of them; drafts that it agrees with are kept, and the first that it does not is replaced.
"""
