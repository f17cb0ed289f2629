"""Shapes of models from their config.json, bytes of their weights and of a token's KV."""
