"""Random models of real shapes."""
