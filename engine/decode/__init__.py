"""One answer: the choice of its tokens, and its text as it grows."""
