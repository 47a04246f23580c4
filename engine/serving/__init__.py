"""The server: HTTP interfaces over the engine."""
