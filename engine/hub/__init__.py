"""Models by name: which there are, where they lie, and how they are fetched."""
