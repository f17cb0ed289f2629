"""Paged attention over the KV cache."""
