"""OpenAI's interfaces."""
