"""Solutions: ``python -m exercises solution k1``."""
