"""How models write thoughts and calls of functions in their answers: one file per format, read while the text arrives."""
