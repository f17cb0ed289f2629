"""Compares `llmopt check` with what loaders really do with checkpoints that other tools wrote."""
