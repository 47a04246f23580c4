"""Grammars of calls: what an answer may be if the model must call functions, or must follow their schemas."""
