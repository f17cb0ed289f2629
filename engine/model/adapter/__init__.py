"""Transformers backend: models that the native decoder does not cover, over the paged KV cache."""
