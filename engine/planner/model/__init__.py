"""Model shapes from config.json, bytes of weights and of the KV cache per token."""
