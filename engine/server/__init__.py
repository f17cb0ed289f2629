"""The OpenAI-compatible server on top of the engine."""
