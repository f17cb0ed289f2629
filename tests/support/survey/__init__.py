"""Tiny random checkpoints of every model type of transformers that is surveyed."""
