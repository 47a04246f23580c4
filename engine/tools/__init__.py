"""Functions that a model may call: how it writes calls, and the grammars that hold it to them."""
