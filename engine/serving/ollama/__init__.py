"""Ollama's interface."""
