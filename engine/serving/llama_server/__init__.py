"""The interfaces of llama-server, and what other tools ask of a server besides answers."""
