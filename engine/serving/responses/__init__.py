"""OpenAI's Responses, stateless: every request brings the whole conversation."""
